"""Python objects and variables, exchanged by name among a process set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.named import tensors as named
from hvpipe.keras.named.process_sets import ProcessSet
from hvpipe.keras.variables import native
from hvpipe.session import current
from hvpipe.world.objects import packed_for_user, unpacked_for_user


def allgather_object(value: Any, process_set: ProcessSet | None = None, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks of a process set, in rank order."""
    _refuse_graphs("allgather_object", "allgather")
    label = name or type(value).__name__
    mine = _bytes_of(value)
    lengths = named.allgather([tf.shape(mine, tf.int64)], process_set, f"{label}.sz")[0].numpy()
    everything = named.allgather([mine], process_set, f"{label}.t")[0].numpy().tobytes()
    values, start = [], 0
    for length in lengths:
        values.append(unpacked_for_user(everything[start : start + length], current().world.trusted))
        start += length
    return values


def broadcast_object(
    value: Any, root_rank: int = 0, process_set: ProcessSet | None = None, name: str | None = None
) -> Any:
    """Return the object of one rank on every rank of a process set."""
    _refuse_graphs("broadcast_object", "broadcast")
    # The class of the other ranks' value may differ, so the name does not depend on it.
    label = name or "object"
    sends = current().world.rank == root_rank
    mine = _bytes_of(value) if sends else tf.zeros([0], tf.uint8)
    length = named.broadcast([tf.shape(mine, tf.int64)], root_rank, process_set, f"{label}.sz")[0]
    room = mine if sends else tf.zeros(length, tf.uint8)
    received = named.broadcast([room], root_rank, process_set, f"{label}.t")[0].numpy().tobytes()
    return value if sends else unpacked_for_user(received, current().world.trusted)


def _refuse_graphs(function: str, instead: str) -> None:
    if not tf.executing_eagerly():
        raise HvpipeError(
            f"Call {function}() outside of graphs and tf.function: Python objects do not exist there, and it "
            f"would run once, while the function is traced. Use {instead}() for tensors."
        )


def _bytes_of(value: Any) -> Any:
    return tf.io.decode_raw(tf.constant(packed_for_user(value, current().world.trusted)), tf.uint8)


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet | None = None, name: str | None = None
) -> list[Any]:
    """Set variables to one rank's values, also in a graph; return the values."""
    targets = [native(variable) for variable in variables]
    if not targets:
        return []
    received = named.broadcast(targets, root_rank, process_set, name or "variables")
    return [target.assign(value) for target, value in zip(targets, received, strict=True)]
