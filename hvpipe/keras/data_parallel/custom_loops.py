"""For custom training loops: an optimizer and a tape that reduce over all ranks, and tensor collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.comm.engine import Compression, Op, check_compression
from hvpipe.comm.horovod_arguments import check_other_arguments
from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.bucket_reducer import Reducer, counted_alike, dense, sliced
from hvpipe.keras.data_parallel.overlap import OverlappedOptimizer
from hvpipe.keras.supported import told
from hvpipe.session import current


def DistributedOptimizer(
    optimizer: Any, *, compression: Compression = None, bucket_bytes: int | None = None, **others: Any
) -> Any:
    """Make `apply` (and `apply_gradients`) average gradients over all ranks first; returns the optimizer.

    Reduction overlaps with the rest of backward, the update is exact, and every rank counts the same
    whatever its batch. For `compile` and `fit`, `data_parallel` does more: it broadcasts the start,
    averages metrics, weighs by sample count, and overlaps with the next step. Without it, give `fit` a
    BroadcastGlobalVariablesCallback, and `compile` jit_compile=False: XLA cannot compile communication, and
    Keras switches it on by itself where there is a GPU (the callback switches it off).
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise HvpipeError(
            f"DistributedOptimizer wants a keras.optimizers.Optimizer. Received: {told(optimizer)}"
        )
    check_compression(compression)
    check_other_arguments("DistributedOptimizer", others)
    session = current()
    if session.world.size == 1:
        return optimizer
    hooked: list[OverlappedOptimizer] = []

    def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        variables = (
            optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
        )
        _refuse_loss_scaling_outside(optimizer)
        if not optimizer.built:
            optimizer.build(variables)
        if not hooked:
            used = [v for g, v in zip(grads, variables, strict=True) if g is not None]
            hooked.append(
                OverlappedOptimizer(
                    *(session, optimizer, used, "backward", compression, bucket_bytes),
                    tables=sliced(session, grads, variables),
                )
            )
        hooked[0].apply(grads, variables)

    optimizer.apply = apply
    return optimizer


def _refuse_loss_scaling_outside(optimizer: Any) -> None:
    """Keras would skip an update, and with it the reduction, on the ranks whose own gradients overflow."""
    if keras.config.dtype_policy().name != "mixed_float16":
        return
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise HvpipeError(
            "With mixed_float16 the optimizer that scales the loss should be inside: "
            "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)). "
            f"Received: DistributedOptimizer of {type(optimizer).__name__}"
        )


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` averages over all ranks; the rest is the tape's own.

    Call `gradient` on all ranks in the same order. Gradients that are None stay None.
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        *,
        compression: Compression = None,
        bucket_bytes: int | None = None,
        **others: Any,
    ) -> None:
        check_compression(compression)
        check_other_arguments("DistributedGradientTape", others)
        self._tape = tape
        self._compression = compression
        self._bucket_bytes = bucket_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._tape.__exit__(*exception)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """As `tf.GradientTape.gradient`, averaged over ranks."""
        leaves = tf.nest.flatten(sources)
        watched = [v.value if isinstance(v, keras.Variable) else v for v in leaves]
        found = tf.nest.flatten(self._tape.gradient(target, watched, *args, **kwargs))
        averaged = average_gradients(
            found, leaves, compression=self._compression, bucket_bytes=self._bucket_bytes
        )
        return tf.nest.pack_sequence_as(sources, averaged)


def average_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    *,
    compression: Compression = None,
    bucket_bytes: int | None = None,
) -> list[Any]:
    """Gradients averaged over ranks, in a graph or eagerly; None where they were None."""
    session = current()
    if session.world.size == 1:
        return list(gradients)
    used = [place for place, gradient in enumerate(gradients) if gradient is not None]
    if not used:
        raise HvpipeError("At least one gradient is wanted. Received: None for every variable")
    trained = [variables[place] for place in used]
    given = [gradients[place] for place in used]
    reducer = _reducer_for(trained, given, compression, bucket_bytes)
    found = [dense(gradient) for gradient in given]
    tokens = reducer.submit(reducer.announce(counted_alike(found)), found)
    averaged = list(gradients)
    for place, gradient in zip(used, reducer.collect_all(tokens), strict=True):
        averaged[place] = gradient
    return averaged


def allreduce(tensor: Any, op: Op = "average", compression: Compression = None, **others: Any) -> Any:
    """Average or sum of an eager tensor over all ranks; in a `tf.function`, reduce gradients instead."""
    check_other_arguments("allreduce", others)
    array = _eager("allreduce", tensor, "; use DistributedGradientTape or average_gradients there")
    return tf.convert_to_tensor(current().engine.allreduce(array, op, compression))


def allgather(tensor: Any, **others: Any) -> Any:
    """All ranks' eager tensors, one after the other along the first axis, whose length may differ by rank."""
    check_other_arguments("allgather", others)
    return tf.convert_to_tensor(current().engine.allgather(_eager("allgather", tensor)))


def broadcast(tensor: Any, root_rank: int = 0, **others: Any) -> Any:
    """The root's eager tensor, on every rank."""
    check_other_arguments("broadcast", others)
    return tf.convert_to_tensor(current().engine.broadcast(_eager("broadcast", tensor), root_rank))


def _eager(function: str, tensor: Any, instead: str = "") -> Any:
    """The array of a tensor that is no symbol."""
    if not tf.executing_eagerly():
        raise HvpipeError(
            f"hvpipe.keras.{function} works on eager tensors. "
            f"Received: a symbolic tensor inside tf.function{instead}"
        )
    return tf.convert_to_tensor(tensor).numpy()


def _reducer_for(
    variables: Sequence[Any], gradients: Sequence[Any], compression: Compression, bucket_bytes: int | None
) -> Reducer:
    """One plan for each list of variables, kept as long as the session."""
    session = current()
    key = (tuple(id(v) for v in variables), compression, bucket_bytes)
    found = session.reducers.get(key)
    if found is None:
        tables = sliced(session, gradients, variables)
        found = Reducer(session, "gradients", variables, compression, bucket_bytes, tables=tables)
        session.reducers[key] = found
    reducer: Reducer = found
    return reducer
