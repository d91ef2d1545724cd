"""Keras callbacks that write files: if several ranks pass the same path, only the lowest of them writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras

from hvpipe.session import Session

Place = tuple[str, str]
"""A class of callbacks, and the absolute path it writes to."""

# The attribute with the path, for each class.
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
    """Return the callbacks without those whose path a lower rank writes to; collective.

    All ranks see the same logs. If all wrote, a file would be torn or get every row several times. `writers`
    names the classes of callbacks to check.
    """
    places = [place_of(callback, writers) for callback in callbacks]
    written = written_before(session, places)
    return [c for c, place in zip(callbacks, places, strict=True) if place not in written]


def written_before(session: Session, places: Sequence[Place | None]) -> set[Place]:
    """Return the paths that lower ranks write to; collective. `places` are this rank's own."""
    everyone = session.engine.allgather_object(list(places), "the callbacks of fit")
    return {place for of_rank in everyone[: session.world.rank] for place in of_rank if place is not None}


def place_of(callback: Any, writers: Sequence[str]) -> Place | None:
    """Return where a callback writes, or None if it is of none of these classes."""
    for name in writers:
        kind = getattr(keras.callbacks, name, None)  # OrbaxCheckpoint is not in Keras 3.12
        if kind is not None and isinstance(callback, kind):
            return name, os.path.abspath(getattr(callback, _PLACES[name]))
    return None
