"""Callbacks of Keras that write files: of those that all ranks were told to write, one rank's does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras

from hvpipe.session import Session

Place = tuple[str, str]
"""A class of callbacks, and what it writes to."""

# The attribute of each that says where it writes.
_PLACES = {
    "BackupAndRestore": "backup_dir",
    "CSVLogger": "filename",
    "ModelCheckpoint": "filepath",
    "OrbaxCheckpoint": "directory",
    "TensorBoard": "log_dir",
}


def with_one_writer(
    session: Session, callbacks: Sequence[Any], writers: Sequence[str] = tuple(_PLACES)
) -> list[Any]:
    """The callbacks without those that write where one of a lower rank does; collective.

    All see the same logs: a file would be torn, or get every row from each. `writers` are the classes in
    question.
    """
    places = [place_of(callback, writers) for callback in callbacks]
    written = written_before(session, places)
    return [c for c, place in zip(callbacks, places, strict=True) if place not in written]


def written_before(session: Session, places: Sequence[Place | None]) -> set[Place]:
    """The places at which ranks lower than this one write; collective, with this rank's own `places`."""
    everyone = session.engine.allgather_object(list(places))
    return {place for of_rank in everyone[: session.world.rank] for place in of_rank if place is not None}


def place_of(callback: Any, writers: Sequence[str]) -> Place | None:
    """Where a callback of one of these classes writes."""
    for name in writers:
        kind = getattr(keras.callbacks, name, None)  # one of them came with a later Keras
        if kind is not None and isinstance(callback, kind):
            return name, os.path.abspath(getattr(callback, _PLACES[name]))
    return None
