"""Callbacks of a pipeline's `fit`: one of its own, and changes to the user's, which all ranks run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras

from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras.graph.stage_cuts import Stages
from hvpipe.keras.one_writer import Place, place_of, written_before
from hvpipe.keras.pipeline.on_all_ranks import on_all_ranks
from hvpipe.keras.pipeline.shared_variables import SharedVariables
from hvpipe.session import Session


class CombineState(keras.callbacks.Callback):
    """Combines the state that several ranks hold at the end of an epoch; runs before other callbacks."""

    def __init__(self, session: Session, shared: SharedVariables) -> None:
        super().__init__()
        self._session = session
        self._shared = shared

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Without this, replicas would wait until the timeout for a rank whose data ended early.
        self._session.engine.agree(f"end of epoch {epoch + 1}")
        self._shared.combine_state()


def make_folders(session: Session, callbacks: Sequence[Any]) -> None:
    """Let rank 0 make the folders that ModelCheckpoint writes to; collective.

    Raises:
        HvpipeError: A callback would write its own files from every rank.
        MismatchError: Only some ranks have a callback that saves or sets weights.
    """
    orbax: Any = getattr(keras.callbacks, "OrbaxCheckpoint", ())  # not in Keras 3.12
    restoring, averaging = 0, 0
    folders = []
    for callback in callbacks:
        if isinstance(callback, (keras.callbacks.BackupAndRestore, orbax)):
            name = type(callback).__name__
            raise HvpipeError(
                f"In a pipeline every rank would write its own part of the model to {name}'s folder: use "
                f"hvpipe.keras.Checkpoint(folder). Received: a callback {name}"
            )
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            folder = os.path.dirname(callback.filepath)
            if "{" in folder:
                raise HvpipeError(
                    "In a pipeline, put ModelCheckpoint's placeholders into the file name, not into the "
                    f"folder name. Received: filepath={callback.filepath!r}"
                )
            folders.append(folder)
        if isinstance(callback, keras.callbacks.EarlyStopping):
            restoring += bool(callback.restore_best_weights)
        averaging += isinstance(callback, keras.callbacks.SwapEMAWeights)
    _check_same(session, "save a model", "ModelCheckpoint", len(folders))
    _check_same(session, "restore weights", "EarlyStopping(restore_best_weights=True)", restoring)
    _check_same(session, "swap weights", "SwapEMAWeights", averaging)
    if folders:
        on_all_ranks(session, "making the folders of ModelCheckpoint", lambda: _make(session, folders))


def _check_same(session: Session, what: str, name: str, count: int) -> None:
    counts = session.engine.agree(f"callbacks that {what}", float(count))
    other = next((rank for rank, each in enumerate(counts) if each != counts[0]), None)
    if other is not None:
        raise MismatchError(
            f"All ranks of a pipeline {what} together, each for its stages: give {name} to all of them. "
            f"Received: {counts[0]:.0f} on rank 0 and {counts[other]:.0f} on rank {other}"
        )


def without_duplicates(
    session: Session, callbacks: Sequence[Any], stages: Stages, own_layers: Sequence[Any]
) -> list[Any]:
    """Return the callbacks, changed so that ranks with the same logs do not all write them; collective.

    If several ranks pass a TensorBoard of the same folder or a RemoteMonitor of the same address, only the
    lowest of these ranks keeps it. A TensorBoard that shows weights stays on all ranks, because each rank has
    its own weights: the higher ranks write to subfolders rank1, rank2, ... of that folder.

    Args:
        session: The session.
        callbacks: This rank's callbacks.
        stages: All stages of the model.
        own_layers: The layers of this rank's stages.
    """
    rank = session.world.rank
    places = [_place(callback) for callback in callbacks]
    written = written_before(session, places)
    elsewhere = {layer.name for layer in stages.graph.all_layers()}
    elsewhere -= {layer.name for layer in own_layers}
    found = []
    for callback, place in zip(callbacks, places, strict=True):
        if isinstance(callback, keras.callbacks.TensorBoard):
            if isinstance(callback.embeddings_metadata, dict):
                rest = {n: path for n, path in callback.embeddings_metadata.items() if n not in elsewhere}
                callback.embeddings_metadata = rest
            if place in written and (callback.histogram_freq or callback.embeddings_freq):
                callback.log_dir = os.path.join(callback.log_dir, f"rank{rank}")
                place = None
        if rank > 0 and type(callback).__module__.startswith("keras.") and hasattr(callback, "verbose"):
            callback.verbose = 0
        if place is None or place not in written:
            found.append(callback)
    return found


def _place(callback: Any) -> Place | None:
    """Return where a callback writes, if only one rank may write there."""
    if isinstance(callback, keras.callbacks.RemoteMonitor):
        return "RemoteMonitor", f"{callback.root}{callback.path}"
    return place_of(callback, ["TensorBoard"])


def _make(session: Session, folders: Sequence[str]) -> None:
    if session.world.rank == 0:
        for folder in filter(None, folders):
            os.makedirs(folder, exist_ok=True)
