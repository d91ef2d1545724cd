"""How a pipeline is saved and loaded: the methods, and what callbacks that save need of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras.graph.stage import Stages
from hvpipe.keras.initial_state import settle
from hvpipe.keras.one_writer import Place, place_of, written_before
from hvpipe.keras.pipeline.checkpoint import load_checkpoint, save_checkpoint
from hvpipe.keras.pipeline.model_file import optimizer_of, read_whole, write_whole
from hvpipe.keras.pipeline.state_names import Holdings, begin_slots_anew, holdings_of, together
from hvpipe.session import Session


class PipelineFiles:
    """The part of PipelineParallel that writes and reads files; every method is called by all ranks."""

    _parts: Any
    trainable_variables: Any

    def save(self, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **kwargs: Any) -> None:
        """As keras.Model.save: rank 0 writes a file that plain Keras loads as the undivided model, compiled.

        With the optimizer's state. Meanwhile rank 0 holds all weights and slots in host memory; where it
        has no room for them, `save_checkpoint`. Raises HvpipeError, on all ranks, where writing fails.
        """
        self._write_whole(lambda model: model.save(filepath, overwrite=overwrite, zipped=zipped, **kwargs))

    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """No rank has the graph of the whole model; plain Keras exports what `save` writes."""
        raise HvpipeError(
            "A pipeline is saved, and what was saved exported: pipe.save('model.keras') on all ranks, then "
            f"keras.models.load_model('model.keras').export(...) on one. Received: export to {filepath!r}"
        )

    def get_config(self) -> dict[str, Any]:
        """Keras's own saving asks for it, which would write one rank's part from every rank."""
        raise HvpipeError(
            "A rank has a part of the model: pipe.save('model.keras') on all ranks saves the whole, in place "
            "of keras.saving.save_model(pipe, ...). Received: a call of get_config"
        )

    def save_weights(
        self, filepath: Any, overwrite: bool = True, max_shard_size: float | None = None
    ) -> None:
        """As keras.Model.save_weights, in the way of `save`."""
        self._write_whole(
            lambda model: model.save_weights(filepath, overwrite=overwrite, max_shard_size=max_shard_size)
        )

    def load(self, filepath: Any) -> None:
        """Take the weights out of a .keras or .weights.h5 file of the undivided model.

        Every rank reads its own part, so all of them must see the file. The optimizer's state comes too,
        where the pipeline is compiled with one of the same class. Raises HvpipeError, on all ranks and
        before any weight is changed, for no such file or one of another model.
        """
        self.load_weights(filepath)

    def load_weights(self, filepath: Any, skip_mismatch: bool = False, **kwargs: Any) -> None:
        """As keras.Model.load_weights, in the way of `load`."""
        if kwargs:
            raise HvpipeError(f"load_weights takes filepath and skip_mismatch. Received: {sorted(kwargs)}")
        parts = self._parts
        self._load(lambda own: read_whole(parts.session, self, parts.model, own, filepath, skip_mismatch))
        settle(self)

    def save_checkpoint(self, folder: str | os.PathLike[str]) -> None:
        """Write all that training depends on into a folder, which all ranks must see; each rank its own part.

        Weights, statistics, seeds and the optimizer's state. A checkpoint that is in the folder is replaced
        when the new one is complete. Raises HvpipeError, on all ranks, where writing fails.
        """
        parts = self._parts
        save_checkpoint(
            parts.session, folder, parts.layout.stages.graph.name, self._holdings(), optimizer_of(self)
        )

    def load_checkpoint(self, folder: str | os.PathLike[str]) -> None:
        """Go on from what `save_checkpoint` wrote, with any number of stages, schedule and replicas.

        Compile first, with an optimizer of the same class and settings: its state comes too. Raises
        HvpipeError, on all ranks and before anything is changed, for a checkpoint that is of another model
        or optimizer, or not whole.
        """
        parts = self._parts
        self._load(lambda own: load_checkpoint(parts.session, folder, own, optimizer_of(self)))
        settle(self)
        parts.sharing.note_apart()

    def _write_whole(self, write: Callable[[Any], None]) -> None:
        parts = self._parts
        parts.sharing.average_statistics()
        write_whole(parts.session, self, parts.model, self._holdings(), write)

    def _load(self, read: Callable[[Holdings], bool]) -> None:
        """Let `read` give values to what this rank holds; it tells whether any were the optimizer's."""
        holdings = self._holdings()
        optimizer = optimizer_of(self)
        if not read(holdings) and optimizer is not None:
            begin_slots_anew(optimizer, holdings)

    def _holdings(self) -> Holdings:
        parts = self._parts
        return holdings_of(parts.session, parts.layout, optimizer_of(self), self.trainable_variables)


def make_folders(session: Session, callbacks: Sequence[Any]) -> None:
    """Let rank 0 make the folders that ModelCheckpoint writes to, which all ranks would try; collective.

    Raises HvpipeError for callbacks that write files of their own beside the model's from every rank, and
    MismatchError where only some ranks have a ModelCheckpoint.
    """
    folders = []
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise HvpipeError(
                "In a pipeline every rank would write and delete BackupAndRestore's folder. Call "
                "save_checkpoint(folder) at the end of an epoch, say in a keras.callbacks.Callback's "
                "on_epoch_end, and load_checkpoint(folder) before fit(initial_epoch=...). "
                "Received: a BackupAndRestore callback"
            )
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            folder = os.path.dirname(callback.filepath)
            if "{" in folder:
                raise HvpipeError(
                    "In a pipeline ModelCheckpoint's placeholders belong in the name of the file, not of "
                    f"its folder. Received: filepath={callback.filepath!r}"
                )
            folders.append(folder)
    counts = session.engine.agree("callbacks that save the model", float(len(folders)))
    other = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
    if other is not None:
        raise MismatchError(
            "All ranks save a model together, each its part: give ModelCheckpoint to all of them; rank 0 "
            f"writes the file. Received: {counts[0]:.0f} on rank 0 and {counts[other]:.0f} on rank {other}"
        )
    if folders:
        together(session, "making the folders of ModelCheckpoint", lambda: _make(session, folders))


def told_once(session: Session, callbacks: Sequence[Any], stages: Stages, own: Sequence[Any]) -> list[Any]:
    """The callbacks so that ranks that have the same logs do not all write or print them; collective.

    Of TensorBoards in one folder, and RemoteMonitors of one address, the first rank's stays. A TensorBoard
    that shows weights stays on all, as each rank has some: in folders rank1, rank2, ... beside the first's.
    `own` are this rank's layers.
    """
    rank = session.world.rank
    places = [_place(callback) for callback in callbacks]
    written = written_before(session, places)
    elsewhere = {layer.name for layer in stages.graph.all_layers()}
    elsewhere -= {layer.name for layer in own}
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
    """Where a callback writes that may be on one rank alone."""
    if isinstance(callback, keras.callbacks.RemoteMonitor):
        return "RemoteMonitor", f"{callback.root}{callback.path}"
    return place_of(callback, ["TensorBoard"])


def _make(session: Session, folders: Sequence[str]) -> None:
    if session.world.rank == 0:
        for folder in filter(None, folders):
            os.makedirs(folder, exist_ok=True)
