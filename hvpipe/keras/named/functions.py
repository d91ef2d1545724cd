"""The collectives of `hvpipe.keras`: on tensors, eager and in a `tf.function`.

Ranks meet by name and may call them in any order. Every rank gets an error where ranks differ, and may go on
after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvpipe.engine.engine import Compression, check_compression
from hvpipe.environment.horovod_arguments import check_other_arguments
from hvpipe.errors import HvpipeError
from hvpipe.keras.named import tensors as named
from hvpipe.keras.named.compression import COMPRESSORS
from hvpipe.keras.named.process_sets import ProcessSet
from hvpipe.log import logger
from hvpipe.session import current


def _reduction(
    op: str, compression: Compression, prescale: float, postscale: float, process_set: ProcessSet | None
) -> named.Reduction:
    check_compression(compression)
    return named.Reduction(op, prescale, postscale, COMPRESSORS[compression], process_set)


def allreduce(
    tensor: Any,
    op: str = "average",
    compression: Compression = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    name: str | None = None,
    **others: Any,
) -> Any:
    """Reduce a tensor over ranks, eagerly or in a graph.

    Its gradient is Horovod's: the gradients of all ranks, reduced by the same `op`. That is the derivative of
    a sum and of an average, but not of "min", "max" and "product".

    Args:
        tensor: A tensor, IndexedSlices, or a value that converts to a tensor, of the same shape and dtype on
            all ranks. IndexedSlices are gathered instead.
        op: "average", "sum", "min", "max", "product" or "adasum". An average of integers is cut off.
        compression: None, "bf16" or "fp16": the type in which floating-point numbers are sent.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after it.
        process_set: The ranks that take part; None for all.
        name: Ranks meet by this name; None to take it from the graph.
        **others: Arguments of Horovod's function that hvpipe does not have; those that matter are refused.

    Returns:
        A tensor of the same shape and dtype, or IndexedSlices.

    Raises:
        HvpipeError: For an unknown `op` or `compression`, or before `hvpipe.init()`.
        tf.errors.FailedPreconditionError: On every rank, if shapes, dtypes or arguments differ.
        tf.errors.InvalidArgumentError: If this rank is not in the process set, or the name is in use.

    Example:
        ```python
        mean_loss = hk.allreduce(loss)
        ```
    """
    check_other_arguments("allreduce", others)
    how = _reduction(op, compression, prescale_factor, postscale_factor, process_set)
    return named.allreduce(tensor, how, name)


def grouped_allreduce(
    tensors: Sequence[Any],
    op: str = "average",
    compression: Compression = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    name: str | None = None,
    **others: Any,
) -> list[Any]:
    """Reduce several tensors over ranks in one call, eagerly or in a graph.

    Args:
        tensors: Tensors of any shapes and dtypes, the same on all ranks.
        op: As for `allreduce`.
        compression: As for `allreduce`.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after it.
        process_set: The ranks that take part; None for all.
        name: Ranks meet by this name; None to take it from the graph.
        **others: Arguments of Horovod's function that hvpipe does not have; those that matter are refused.

    Returns:
        The reduced tensors, in their order.

    Raises:
        HvpipeError: For an unknown `op` or `compression`, or before `hvpipe.init()`.
        tf.errors.FailedPreconditionError: On every rank, if shapes, dtypes or arguments differ.

    Example:
        ```python
        loss, accuracy = hk.grouped_allreduce([loss, accuracy])
        ```
    """
    check_other_arguments("grouped_allreduce", others)
    how = _reduction(op, compression, prescale_factor, postscale_factor, process_set)
    return named.grouped_allreduce(tensors, how, name) if tensors else []


def allgather(
    tensor: Any, *, process_set: ProcessSet | None = None, name: str | None = None, **others: Any
) -> Any:
    """Concatenate the tensors of ranks along axis 0, eagerly or in a graph.

    Its gradient is Horovod's: this rank's rows of the gradients of all ranks, averaged. The derivative of the
    ranks' mean loss is that times the number of ranks; docs/pitfalls.md has the line for it.

    Args:
        tensor: A tensor, or a value that converts to one. Ranks may contribute different lengths of axis 0;
            the other axes and the dtype are equal.
        process_set: The ranks that take part; None for all.
        name: Ranks meet by this name; None to take it from the graph.
        **others: Arguments of Horovod's function that hvpipe does not have; those that matter are refused.

    Returns:
        The tensors of ranks 0, 1, ... one after the other.

    Raises:
        HvpipeError: Before `hvpipe.init()`.
        tf.errors.FailedPreconditionError: On every rank, if dtypes or other axes differ.

    Example:
        ```python
        predictions = hk.allgather(model(x_of_this_rank))
        ```
    """
    check_other_arguments("allgather", others)
    return named.allgather([tensor], process_set, name)[0]


def broadcast(
    tensor: Any,
    root_rank: int = 0,
    *,
    process_set: ProcessSet | None = None,
    name: str | None = None,
    **others: Any,
) -> Any:
    """Return the root's tensor on every rank, eagerly or in a graph.

    Args:
        tensor: A tensor, or a value that converts to one, of the same shape and dtype on all ranks.
        root_rank: The rank of the world whose tensor the ranks get.
        process_set: The ranks that take part; None for all.
        name: Ranks meet by this name; None to take it from the graph.
        **others: Arguments of Horovod's function that hvpipe does not have; those that matter are refused.

    Returns:
        The root's tensor.

    Raises:
        HvpipeError: Before `hvpipe.init()`.
        tf.errors.FailedPreconditionError: On every rank, if shapes, dtypes or roots differ.
        tf.errors.InvalidArgumentError: If the root is not in the process set.

    Example:
        ```python
        seed = hk.broadcast(tf.random.uniform((), maxval=1 << 30, dtype=tf.int32))
        ```
    """
    check_other_arguments("broadcast", others)
    return named.broadcast([tensor], root_rank, process_set, name)[0]


def alltoall(
    tensor: Any, splits: Any = None, *, process_set: ProcessSet | None = None, name: str | None = None
) -> tuple[Any, Any]:
    """Send rows to every rank, and receive rows from every rank, eagerly or in a graph.

    Args:
        tensor: Rows, in the order of the ranks that get them.
        splits: The number of rows for each rank; None to share them out evenly.
        process_set: The ranks that take part; None for all.
        name: Ranks meet by this name; None to take it from the graph.

    Returns:
        The received rows, in the order of the ranks that sent them, and int32[ranks]: rows from each rank.

    Raises:
        HvpipeError: Before `hvpipe.init()`.
        tf.errors.FailedPreconditionError: If dtypes or other axes differ between ranks.
        tf.errors.InvalidArgumentError: If the splits do not fit the tensor or the number of ranks.

    Example:
        ```python
        rows, counts = hk.alltoall(tokens, splits=tokens_for_each_expert)
        ```
    """
    return named.alltoall(tensor, splits, process_set, name)


def reducescatter(
    tensor: Any,
    op: str = "average",
    compression: Compression = None,
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
    name: str | None = None,
) -> Any:
    """Reduce a tensor over ranks, and give each rank its part of axis 0, eagerly or in a graph.

    Args:
        tensor: A tensor with at least one axis, of the same shape and dtype on all ranks.
        op: As for `allreduce`, but not "adasum".
        compression: As for `allreduce`.
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after it.
        process_set: The ranks that take part; None for all.
        name: Ranks meet by this name; None to take it from the graph.

    Returns:
        This rank's rows. If the rows cannot be shared out evenly, the first ranks get one more.

    Raises:
        HvpipeError: For an unknown `op` or `compression`, or before `hvpipe.init()`.
        tf.errors.FailedPreconditionError: On every rank, if shapes, dtypes or arguments differ.

    Example:
        ```python
        part = hk.reducescatter(gradient, op="sum")
        ```
    """
    how = _reduction(op, compression, prescale_factor, postscale_factor, process_set)
    return named.grouped_reducescatter([tensor], how, name)[0]


def join() -> int:
    """Wait until all ranks have called this; until then take part in their allreduces with zeros.

    For ranks with fewer batches than others, in loops of your own that call `allreduce`. Only sums and
    averages work meanwhile, and no steps of `average_gradients`, `DistributedOptimizer` or a tape in a graph.

    Returns:
        The rank that called it last.

    Raises:
        PeerError: If a rank leaves without calling it.
        HvpipeError: In a graph.

    Example:
        ```python
        for batch in batches_of_this_rank:
            total += hk.allreduce(loss_of(batch))
        hk.join()
        ```
    """
    session = current()
    if not tf.executing_eagerly():
        raise HvpipeError(
            "Call join() outside of tf.function: inside it would run once, while the function is traced."
        )
    if session.loops_by_plan:
        session.loops_by_plan = False  # told once
        logger.warning(
            "hvpipe: join() stands in for this rank in collectives by name, such as allreduce, but not in "
            "steps of a tape in a tf.function, of average_gradients or of DistributedOptimizer. If other "
            "ranks have batches left, they wait for this one: give all the same number with shard()."
        )
    joined: int = session.named_calls().join()
    return joined


def join_as_tensor() -> Any:
    """Call `join`; return its rank as an int32 tensor, as Horovod does."""
    return tf.constant(join(), tf.int32)
