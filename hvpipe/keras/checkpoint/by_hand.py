"""`save_checkpoint` and `load_checkpoint` of a pipeline: one checkpoint in a folder, without a `fit`.

    manifest.json       as hk.Checkpoint writes it: the model, and which file has what
    4f2a9c-2.npz        what rank 2 wrote in the save 4f2a9c

Every save has new names. It replaces the manifest when all its files are complete; until then the folder
holds the old checkpoint. Files of other saves are removed last.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvpipe.checkpoints import folder as folders
from hvpipe.checkpoints.arrays import write_arrays
from hvpipe.checkpoints.files import check_seen, write_file
from hvpipe.checkpoints.manifest import MANIFEST, Manifest, Position, RankPart, write_manifest
from hvpipe.checkpoints.usable import checked_manifest
from hvpipe.errors import HvpipeError
from hvpipe.keras.checkpoint.pipeline_values import KIND, read_values
from hvpipe.keras.pipeline.on_all_ranks import on_all_ranks
from hvpipe.keras.pipeline.state_names import RankState
from hvpipe.session import Session

_ARRAYS = re.compile(r"\.?([0-9a-f]{6})-\d+\.npz(\.\d+\.partial)?")


def save_checkpoint(
    session: Session, folder: str | os.PathLike[str], model: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Write `values`, each rank its own, of a `model` that `describe` has described; collective.

    Raises:
        HvpipeError: Writing failed. Raised on all ranks; the old checkpoint is still there.
    """
    path, rank = folders.folder_path(folder), session.world.rank
    what = f"saving a checkpoint in {path}"
    save = session.engine.broadcast_object(secrets.token_hex(3), "saving a checkpoint")
    on_all_ranks(session, what, lambda: _make(path) if rank == 0 else None)

    def write() -> RankPart:
        file = write_file(path / f"{save}-{rank}.npz", lambda sink: write_arrays(sink, values))
        return RankPart(rank, file, tuple(values))

    part = on_all_ranks(session, what, write)
    parts = tuple(session.engine.allgather_object(part, "saving a checkpoint"))

    def finish() -> None:
        if rank == 0:
            check_seen(path, *(part.file for part in parts))
            write_manifest(path, Manifest(save, KIND, Position(0, 0, 0), model, parts))
            _remove_others(path, save)

    on_all_ranks(session, what, finish)


def load_checkpoint(
    session: Session, folder: str | os.PathLike[str], state: RankState, optimizer: Any
) -> bool:
    """Set this rank's variables, and return whether the optimizer's are among them; collective.

    Raises:
        HvpipeError: The checkpoint is incomplete, or of another model or optimizer. Raised on all ranks,
            before anything has changed.
    """
    path, world = folders.folder_path(folder), session.world
    what = f"loading the checkpoint in {path}"

    def check() -> Manifest:
        _check_complete(path)
        return checked_manifest(path, world.rank, world.size)

    manifest = on_all_ranks(session, what, check, patiently=True)
    values = on_all_ranks(
        session, what, lambda: read_values(path, manifest, state, optimizer, world.rank), patiently=True
    )
    named = state.named
    for name, value in values.items():
        named[name].assign(value)
    return any(name in state.optimizer for name in values)


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if folders.of_a_fit(folder):
        raise HvpipeError(
            "save_checkpoint should get a folder of its own. "
            f"Received: {str(folder)!r}, where hk.Checkpoint has written"
        )


def _remove_others(folder: Path, save: str) -> None:
    for name in os.listdir(folder):
        match = _ARRAYS.fullmatch(name)
        if match is not None and match[1] != save:
            with contextlib.suppress(OSError):
                (folder / name).unlink()


def _check_complete(folder: Path) -> None:
    if not (folder / MANIFEST).exists():
        of_fit = folders.complete(folder)
        instead = f". It has checkpoints of hk.Checkpoint: load one, such as {of_fit[0]}" if of_fit else ""
        raise HvpipeError(
            f"A checkpoint should have a manifest, {MANIFEST}. An interrupted save leaves none. "
            f"Received: folder={str(folder)!r} without one{instead}"
        )
