"""Variables that must be equal on all ranks: checked, broadcast at the start, averaged where they drift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvpipe.errors import MismatchError
from hvpipe.keras.data_parallel.bucket_reducer import name_of
from hvpipe.session import Session, current


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Give every rank the root's values of these variables (Keras or TensorFlow), bit for bit.

    Collective: all ranks call it with variables of the same names, shapes and dtypes; where they differ,
    every rank gets a MismatchError that names the first difference.
    """
    session = current()
    if session.world.size == 1 or not variables:
        return
    check_same_variables(session, variables)
    values = [np.asarray(v.numpy()) for v in variables]
    packed = np.concatenate([np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in values])
    received = session.engine.broadcast(packed, root_rank)
    start = 0
    for variable, value in zip(variables, values, strict=True):
        end = start + value.nbytes
        variable.assign(received[start:end].view(value.dtype).reshape(value.shape))
        start = end


def check_same_variables(session: Session, variables: Sequence[Any]) -> None:
    """Raise MismatchError, on every rank, unless all ranks have variables of the same shapes and dtypes."""
    mine = [(name_of(v), tuple(v.shape), str(getattr(v.dtype, "name", v.dtype))) for v in variables]
    everyone: list[list[tuple[Any, ...]]] = session.engine.allgather_object(mine)
    for rank, theirs in enumerate(everyone):
        if [row[1:] for row in theirs] == [row[1:] for row in everyone[0]]:
            continue
        raise MismatchError(
            f"All ranks should train the same model. Received: {_first_difference(everyone[0], theirs, rank)}"
        )


def average_variables(session: Session, variables: Sequence[Any], weight: float) -> None:
    """Set each variable to its mean over ranks, by `weight` (of this rank, say its samples).

    For statistics such as BatchNormalization's moving averages, which every rank takes from its own data.
    Summed in float64, so that a value that is equal on all ranks keeps its bits. Collective.
    """
    floating = [v for v in variables if np.issubdtype(np.dtype(_dtype_name(v)), np.floating)]
    total = sum(session.engine.agree("mean of statistics", weight))
    if not floating or total == 0:
        return
    values = [np.asarray(v.numpy()) for v in floating]
    packed = np.concatenate([v.reshape(-1).astype(np.float64) for v in values]) * (weight / total)
    mean = session.engine.allreduce(packed, op="sum")
    start = 0
    for variable, value in zip(floating, values, strict=True):
        end = start + value.size
        variable.assign(mean[start:end].reshape(value.shape).astype(value.dtype))
        start = end


def _dtype_name(variable: Any) -> str:
    name = str(getattr(variable.dtype, "name", variable.dtype))
    return "float32" if name == "bfloat16" else name


def _first_difference(first: list[tuple[Any, ...]], other: list[tuple[Any, ...]], rank: int) -> str:
    for place, (ours, theirs) in enumerate(zip(first, other, strict=False)):
        if ours[1:] != theirs[1:]:
            return f"variable {place} is {_told(ours)} on rank 0 and {_told(theirs)} on rank {rank}"
    return f"{len(first)} variables on rank 0 and {len(other)} on rank {rank}"


def _told(row: tuple[Any, ...]) -> str:
    name, shape, dtype = row
    return f"{name} {dtype}{list(shape)}"
