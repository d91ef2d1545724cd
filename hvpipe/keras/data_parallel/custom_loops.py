"""For custom training loops: an optimizer and a tape that reduce over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager.record import should_record_backprop

from hvpipe.environment.horovod_arguments import check_other_arguments
from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import trained_variables
from hvpipe.keras.data_parallel.bucket_reduce import (
    BucketReducer,
    ReduceOptions,
    agree_on_gradients,
    one_sample,
)
from hvpipe.keras.data_parallel.compressed_reduce import (
    check_compressible,
    check_gradient_compression,
    make_reducer,
)
from hvpipe.keras.data_parallel.optimizer_hook import OptimizerHook
from hvpipe.keras.data_parallel.overlap import OverlapOptions
from hvpipe.keras.data_parallel.overlap_modes import BackwardOverlap
from hvpipe.keras.named.compression import COMPRESSORS
from hvpipe.keras.named.gradients import (
    GradientOptions,
    reduce_gradients,
    refuse_loss_scaling_outside,
)
from hvpipe.keras.named.tensors import Reduction
from hvpipe.keras.ops import without_autograph
from hvpipe.keras.supported import described_type
from hvpipe.keras.training_alone import note_averaged
from hvpipe.plan.compression import compression_named
from hvpipe.session import Session, current


def DistributedOptimizer(
    optimizer: Any, *, compression: str | None = None, bucket_bytes: int | None = None, **others: Any
) -> Any:
    """Make an optimizer's `apply` (and `apply_gradients`) average gradients over all ranks first.

    The reduction overlaps with the rest of backward, and the update is exact. Every rank counts the same,
    whatever its batch. For `compile` and `fit`, `data_parallel` does more: it broadcasts the initial state,
    averages metrics, weights ranks by samples, and overlaps with the next step. Without it, give `fit` a
    BroadcastGlobalVariablesCallback and `compile` jit_compile=False: XLA cannot compile communication, and
    Keras switches it on by default if there is a GPU. (The callback switches it off.)

    Args:
        optimizer: A Keras optimizer. Its `apply` is replaced on the instance.
        compression: As in `data_parallel`. "int8" and "powersgd:R" begin at once, and what they leave out of
            the sums is in no checkpoint.
        bucket_bytes: Size of a fused buffer, in bytes; None: as in `data_parallel`.
        **others: Arguments of Horovod's function that hvpipe does not have; those that matter are refused.

    Returns:
        The same optimizer.

    Raises:
        HvpipeError: If `optimizer` is not a Keras optimizer, for an unknown `compression`, or before
            `hvpipe.init()`; at an update, if `mixed_float16` scales the loss outside the optimizer.

    Example:
        ```python
        optimizer = hk.DistributedOptimizer(keras.optimizers.Adam(1e-3))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        ```
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise HvpipeError(
            f"DistributedOptimizer needs a keras.optimizers.Optimizer. Received: {described_type(optimizer)}"
        )
    check_other_arguments("DistributedOptimizer", others)
    session = current()
    check_gradient_compression(session, compression)
    check_compressible(optimizer, compression)
    session.warn_without_checks("DistributedOptimizer")
    if session.world.size == 1:
        return optimizer
    hooks: dict[Session, OptimizerHook] = {}

    @without_autograph
    def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        given = trained_variables(optimizer) if trainable_variables is None else trainable_variables
        variables = list(given)
        refuse_loss_scaling_outside(optimizer)
        if not optimizer.built:
            optimizer.build(variables)
        session = current()
        if session not in hooks:
            hooks.clear()  # of a session that has ended
            session.loops_by_plan = True
            used = [v for g, v in zip(grads, variables, strict=True) if g is not None]
            tables = agree_on_gradients(session, grads, variables)
            options = ReduceOptions(compression, bucket_bytes, tables=tables, tables_agreed=True)
            overlap = BackwardOverlap(OverlapOptions(elastic=session.settings.elastic))
            hooks[session] = OptimizerHook(session, optimizer, used, overlap, options)
        hooks[session].apply(grads, variables)

    optimizer.apply = apply
    return optimizer


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` averages over all ranks; everything else is the tape's own.

    It works eagerly and in a `tf.function` without `jit_compile`. There the reduction overlaps with the rest
    of backward, unless another tape records the averages for their derivatives, also while the function is
    traced. Every rank counts the same.

    Args:
        tape: The tape to record with.
        compression: As in `data_parallel`. "int8" and "powersgd:R" begin at once, and what they leave out of
            the sums is in no checkpoint.
        bucket_bytes: Size of a fused buffer, in bytes; None: as in `data_parallel`.
        **others: Arguments of Horovod's class that hvpipe does not have; those that matter are refused.

    Raises:
        HvpipeError: For an unknown `compression`, or an argument that hvpipe does not have.

    Example:
        ```python
        with hk.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(model(x, training=True), y)
        gradients = tape.gradient(loss, model.trainable_variables)
        ```
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        *,
        compression: str | None = None,
        bucket_bytes: int | None = None,
        **others: Any,
    ) -> None:
        compression_named(compression)
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
        """Return what `tf.GradientTape.gradient` returns, averaged over all ranks; collective.

        Args:
            target: As for the tape.
            sources: Variables in any structure, of Keras or TensorFlow.
            *args: As for the tape.
            **kwargs: As for the tape.

        Returns:
            Dense gradients in the structure of `sources`; None for a source without one.
        """
        leaves = tf.nest.flatten(sources)
        watched = [v.value if isinstance(v, keras.Variable) else v for v in leaves]
        found = tf.nest.flatten(self._tape.gradient(target, watched, *args, **kwargs))
        averaged = average_gradients(
            found, leaves, compression=self._compression, bucket_bytes=self._bucket_bytes
        )
        return tf.nest.pack_sequence_as(sources, averaged)


@without_autograph
def average_gradients(
    gradients: Sequence[Any],
    variables: Sequence[Any],
    *,
    compression: str | None = None,
    bucket_bytes: int | None = None,
) -> list[Any]:
    """Average gradients over ranks, eagerly or in a graph; collective. Every rank counts the same.

    Args:
        gradients: A tensor, IndexedSlices or None for each variable. All ranks pass None for the same ones.
        variables: The variables; their sizes and order determine the buckets.
        compression: As in `data_parallel`. "int8" and "powersgd:R" begin at once, and what they leave out of
            the sums is in no checkpoint.
        bucket_bytes: Size of a fused buffer, in bytes; None: as in `data_parallel`.

    Returns:
        A dense tensor for each variable, or None if its gradient is None.

    Raises:
        HvpipeError: If all gradients are None, or before `hvpipe.init()`.

    Example:
        ```python
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = hk.average_gradients(gradients, model.trainable_variables)
        ```
    """
    session = current()
    check_gradient_compression(session, compression)
    if session.world.size == 1:
        return list(gradients)
    note_averaged(session, variables)
    used = [place for place, gradient in enumerate(gradients) if gradient is not None]
    if not used:
        raise HvpipeError(
            "Averaging needs at least one gradient, or the other ranks would wait for this one. "
            "Received: None for every variable"
        )
    trained = [variables[place] for place in used]
    given = [gradients[place] for place in used]
    if should_record_backprop(list(filter(tf.is_tensor, (getattr(g, "values", g) for g in given)))):
        return _average_by_name(gradients, variables, compression)
    options = ReduceOptions(compression, bucket_bytes, places=tuple(used))
    reducer = _reducer_for(trained, given, options)
    found = reducer.as_submitted(given)
    tokens = reducer.submit(reducer.announce(one_sample(found)), found)
    averaged = list(gradients)
    for place, gradient in zip(used, reducer.collect_all(tokens), strict=True):
        averaged[place] = gradient
    return averaged


def _average_by_name(
    gradients: Sequence[Any], variables: Sequence[Any], compression: str | None
) -> list[Any]:
    """Average gradients that a tape records: the collectives by name have derivatives."""
    if compression not in COMPRESSORS:
        raise HvpipeError(
            "Gradients that a tape records (another one, or a persistent one inside its own `with`) should "
            "be averaged with compression None, 'bf16' or 'fp16'. "
            f"Received: compression={compression!r}"
        )
    options = GradientOptions(Reduction(compression=COMPRESSORS[compression]), sparse_as_dense=True)
    return reduce_gradients(gradients, variables, options, name="average_gradients")


def _reducer_for(variables: Sequence[Any], gradients: Sequence[Any], options: ReduceOptions) -> BucketReducer:
    """Return the reducer for a list of variables. The session keeps it as long as it lives."""
    session = current()
    session.loops_by_plan = True
    key = (tuple(id(v) for v in variables), options)
    found = session.reducers.get(key)
    if found is None:
        session.warn_without_checks("custom training loops")
        tables = agree_on_gradients(session, gradients, variables)
        found = make_reducer(session, "gradients", variables, replace(options, tables=tables))
        session.reducers[key] = found
    reducer: BucketReducer = found
    return reducer
