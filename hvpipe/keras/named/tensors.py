"""Collectives on tensors, IndexedSlices and lists of them, eager and in graphs, by name.

Ranks may call them in any order. If ranks differ in shape, dtype or arguments, every rank gets an error of
TensorFlow, and may go on: `tf.errors.FailedPreconditionError` where ranks differ, `InvalidArgumentError` on a
rank whose own input is bad, `UnavailableError` if a rank has left, `DeadlineExceededError` after the time
limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.named import ops
from hvpipe.keras.named.compression import Compression
from hvpipe.keras.named.process_sets import ProcessSet, number_of
from hvpipe.keras.training_alone import note_by_hand


@dataclass(frozen=True)
class Reduction:
    """How to combine tensors.

    Attributes:
        op: "average", "sum", "min", "max", "product" or "adasum".
        prescale_factor: Factor before the reduction.
        postscale_factor: Factor after it.
        compression: A class with `compress` and `decompress`.
        process_set: The ranks; None for all.
    """

    op: str = "average"
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    compression: Any = Compression.none
    process_set: ProcessSet | None = None

    def __post_init__(self) -> None:
        if self.op not in ops.OPS:
            raise HvpipeError(f"op should be one of {', '.join(ops.OPS)}. Received: op={self.op!r}")

    @property
    def factors(self) -> tuple[float, float]:
        """The factors before and after."""
        return float(self.prescale_factor), float(self.postscale_factor)


def allreduce(tensor: Any, how: Reduction, name: str | None = None) -> Any:
    """Reduce a tensor or IndexedSlices, whose values and indices are gathered instead."""
    return grouped_allreduce([tensor], how, name)[0]


def grouped_allreduce(tensors: Sequence[Any], how: Reduction, name: str | None = None) -> list[Any]:
    """Reduce tensors and IndexedSlices. The tensors travel together: all of them or none."""
    _note(tensors, how)
    reduced = list(tensors)
    dense = [place for place, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    sliced = [place for place, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    if sliced:
        for place, found in zip(sliced, _reduce_slices([tensors[p] for p in sliced], how, name), strict=True):
            reduced[place] = found
    if dense:

        def send(packed: Sequence[Any]) -> list[Any]:
            number = number_of(how.process_set)
            return ops.allreduce(packed, ops.OPS[how.op], how.factors, number, name)

        for place, found in zip(dense, _compressed([tensors[p] for p in dense], how, send), strict=True):
            reduced[place] = found
    return reduced


def _note(tensors: Sequence[Any], how: Reduction) -> None:
    if how.op in ("average", "sum", "adasum"):
        note_by_hand(tensors)


def _reduce_slices(slices: Sequence[Any], how: Reduction, name: str | None) -> list[Any]:
    if how.op not in ("average", "sum"):
        raise NotImplementedError(
            "IndexedSlices can be averaged and summed; or make them dense first (sparse_as_dense=True). "
            f"Received: op={how.op!r}"
        )
    number = number_of(how.process_set)
    prefix = f"{name}." if name else ""
    values = ops.allgather([s.values for s in slices], number, f"{prefix}values" if name else None)
    indices = ops.allgather([s.indices for s in slices], number, f"{prefix}indices" if name else None)
    ranks = ops.world_number("size", number) if how.op == "average" else 1
    return [
        tf.IndexedSlices(_scaled(value, how, ranks), index, dense_shape=given.dense_shape)
        for value, index, given in zip(values, indices, slices, strict=True)
    ]


def _scaled(values: Any, how: Reduction, ranks: Any) -> Any:
    """Return values times the factors, divided by `ranks`, in their own type; integers are cut off."""
    factor = how.factors[0] * how.factors[1]
    if values.dtype.is_integer and factor != 1.0:
        values = tf.cast(tf.cast(values, tf.float64) * factor, values.dtype)
    elif factor != 1.0:
        values = values * tf.cast(factor, values.dtype)
    divide = tf.truncatediv if values.dtype.is_integer else tf.divide
    return divide(values, tf.cast(ranks, values.dtype))


def _compressed(
    tensors: Sequence[Any], how: Reduction, send: Callable[[Sequence[Any]], list[Any]]
) -> list[Any]:
    """Send tensors in the type that the compression wants, and return the results in their own type."""
    packed = [how.compression.compress(_dense(tensor)) for tensor in tensors]
    received = send([tensor for tensor, _ in packed])
    return [how.compression.decompress(r, context) for r, (_, context) in zip(received, packed, strict=True)]


def _dense(tensor: Any) -> Any:
    if isinstance(tensor, (tf.RaggedTensor, tf.SparseTensor)):
        raise ValueError(
            "Collectives take dense tensors and variables, and allreduce also IndexedSlices: give the parts "
            f"of others, such as .values. Received: {type(tensor).__name__}"
        )
    return tf.convert_to_tensor(tensor)


def allgather(
    tensors: Sequence[Any], process_set: ProcessSet | None = None, name: str | None = None
) -> list[Any]:
    """Concatenate each tensor of all ranks along the first axis, which may differ by rank."""
    return ops.allgather([_dense(t) for t in tensors], number_of(process_set), name)


def broadcast(
    tensors: Sequence[Any], root_rank: int, process_set: ProcessSet | None = None, name: str | None = None
) -> list[Any]:
    """Return the tensors of one rank, which is a rank of the world."""
    given = [_dense(t) for t in tensors]
    return ops.broadcast(given, root_rank, number_of(process_set), name)


def alltoall(
    tensor: Any, splits: Any = None, process_set: ProcessSet | None = None, name: str | None = None
) -> tuple[Any, Any]:
    """Exchange rows; return the received rows, and how many came from each rank.

    Without splits every rank gets the same number of rows.
    """
    given = tf.zeros([0], tf.int32) if splits is None else tf.convert_to_tensor(splits, tf.int32)
    return ops.alltoall(_dense(tensor), given, number_of(process_set), name)


def grouped_reducescatter(tensors: Sequence[Any], how: Reduction, name: str | None = None) -> list[Any]:
    """Reduce tensors; each rank gets its part of the first axis. The first ranks get one row more.

    Raises HvpipeError for Adasum, whose factors depend on whole tensors.
    """
    if how.op == "adasum":
        raise HvpipeError(
            "reducescatter takes every op but adasum: use allreduce, and take this rank's rows. "
            "Received: op='adasum'"
        )

    _note(tensors, how)

    def send(packed: Sequence[Any]) -> list[Any]:
        number = number_of(how.process_set)
        return ops.reducescatter(packed, ops.OPS[how.op], how.factors, number, name)

    return _compressed(tensors, how, send)
