"""Resuming: from a checkpoint that was found to the first batch that is trained on again."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvpipe.checkpoints.manifest import Manifest
from hvpipe.errors import HvpipeError
from hvpipe.keras.checkpoint.callback_state import set_callbacks
from hvpipe.keras.checkpoint.data_position import OwnRank, ResumedReading, resumed_reading
from hvpipe.keras.checkpoint.random_state import AT_EPOCH, set_python_state
from hvpipe.keras.checkpoint.training_state import OWN, Restored, TrainingState
from hvpipe.keras.compat import SWAPPED, set_initial_epoch, swap_averages
from hvpipe.keras.data_parallel.shards import batch_of
from hvpipe.keras.pipeline.on_all_ranks import on_all_ranks
from hvpipe.keras.resize import scale_learning_rate, tell_resize
from hvpipe.session import Resize

logger = logging.getLogger("hvpipe")

_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")


class Resume:
    """The first epoch of a resumed `fit`.

        begin          values are read and, if the variables exist, set: callbacks see them
        begin_callbacks
                       the other callbacks continue from what they remembered
        begin_epoch    random numbers are those of the epoch's beginning
        restore        the first batch: values are set, the data is read up to the position
        skips          for each batch that was trained on: the other callbacks do not see them
        end_epoch      everything is as it would be without a resume

    Args:
        place: The checkpoint.
        manifest: Its manifest.
        state: The state of the model.
        others: The other callbacks.
        model: The model.
    """

    def __init__(
        self, place: Path, manifest: Manifest, state: TrainingState, others: Sequence[Any], model: Any
    ) -> None:
        self._place = place
        self._manifest = manifest
        self._state = state
        self._others = others
        self._model = model
        world = state.session.world
        self._ranks = OwnRank(world.rank, world.size, state.samples_in)
        self._part = manifest.parts[world.rank % manifest.ranks]
        self._reading = ResumedReading(None, manifest.position.batch)
        self._skipped = 0
        self._own_hooks: list[tuple[Any, str, Any]] = []
        self._length: int | None = None
        self._built = False
        self._swapped: list[Any] = []  # callbacks that had put averages into the model
        self.begun = False
        """Whether the first batch has come."""

    @property
    def done(self) -> bool:
        """Whether all batches that were trained on have been skipped."""
        return self.begun and self._skipped >= self._reading.skipped

    @property
    def reading(self) -> ResumedReading:
        """Where the data was read to, once the first batch has come."""
        return self._reading

    def begin(self, params: Mapping[str, Any]) -> None:
        """Read the values, and set the first epoch; collective."""
        session, position = self._state.session, self._manifest.position
        self._length = params.get("steps")
        self._built = self._state.build()
        stopped = bool(self._manifest.parts[0].notes.get("stopped"))
        epochs = int(params["epochs"])
        if not self._built and (stopped or position.epoch >= epochs):
            raise HvpipeError(
                "A model should be built before fit if all its epochs are done: give it an input shape. "
                f"Received: model {self._model.name} and a checkpoint after {position.epoch} epochs"
            )
        self._restored: Restored = on_all_ranks(
            session,
            f"reading the checkpoint {self._place}",
            lambda: self._state.read(self._place, self._manifest),
            patiently=True,
        )
        set_initial_epoch(self._model, max(position.epoch, epochs) if stopped else position.epoch)
        if self._built:
            # Callbacks that act on an epoch's beginning must find the state of the end of the one before.
            self._restored.set_shared()
            self._restored.set_own()
            if not position.batch:
                self._resize()
        self._mute()

    def begin_callbacks(self) -> None:
        """Let the other callbacks continue; after all of them have begun."""
        notes = self._part.notes.get("callbacks", [])
        names, arrays = self._state.weight_names(), self._restored.own_arrays()
        if set_callbacks(self._others, notes, arrays, names) and self._state.session.world.rank == 0:
            logger.warning(
                "hvpipe: EarlyStopping begins anew, because the checkpoint %s does not have the weights of "
                "its best epoch. It may have been written without restore_best_weights.",
                self._place,
            )
        self._swapped = [callback for callback in self._others if getattr(callback, SWAPPED, False)]
        for callback in self._swapped if not self._built else ():  # it would find no averages yet
            setattr(callback, SWAPPED, False)

    def begin_epoch(self) -> None:
        """Continue with Python's random numbers of the epoch's beginning: a PyDataset is shuffled by them."""
        if self._manifest.position.batch and not self.begun:
            prefix = f"{OWN}{AT_EPOCH}"
            own = self._restored.own_arrays()
            set_python_state({n.removeprefix(prefix): v for n, v in own.items() if n.startswith(prefix)})

    def restore(self, iterator: Any) -> None:
        """Set all values, and bring the data to its position; collective. At the first batch."""
        self.begun = True
        self._state.prepare(batch_of(iterator))
        set_now = self._manifest.position.batch > 0 or not self._built
        if set_now:
            self._restored.set_shared()
        if not self._state.resume_data(self._manifest):
            self._read_over(iterator)
        self._restored.set_own()
        self._restored.drop()
        if set_now:
            for callback in self._swapped:  # it has swapped already, or could not, at the epoch's beginning
                swap_averages(callback)
            self._resize()

    def _resize(self) -> None:
        """Scale the learning rate, and tell the user's code, if the number of ranks has changed."""
        session, ranks = self._state.session, self._ranks
        # Ranks that were left after a loss have written as many parts as they were.
        before = int(self._part.notes.get("ranks", self._manifest.ranks))
        if before == ranks.size:
            return
        change = Resize(before, ranks.size, -1, ranks.rank, ())
        if self._state.shares_data:
            scale_learning_rate(session, self._model.optimizer, before, ranks.size, self._others)
        tell_resize(change)

    def _read_over(self, iterator: Any) -> None:
        # Where all ranks read the same data, their number does not matter.
        reading = self._ranks
        if not self._state.shares_data:
            reading = replace(reading, rank=0, size=self._manifest.ranks)
        self._reading = on_all_ranks(
            self._state.session,
            "reading over the batches before the checkpoint",
            lambda: resumed_reading(
                iterator,
                self._state.fit_call,
                self._length,
                self._manifest,
                reading,
                int(self._model.steps_per_execution),
            ),
            patiently=True,
        )

    def skips(self, steps: int) -> bool:
        """Return whether the next `steps` batches were trained on before the checkpoint."""
        if self._skipped >= self._reading.skipped:
            return False
        self._skipped += steps
        return True

    def iterator_for(self, iterator: Any) -> Any:
        """Return what a step reads from."""
        return iterator if self._reading.iterator is None else self._reading.iterator

    def end_epoch(self) -> None:
        """Give the other callbacks their hooks back."""
        for callback, name, before in self._own_hooks:
            vars(callback).pop(name, None)
            if before is not None:
                vars(callback)[name] = before
        self._own_hooks = []

    # --- The other callbacks -----------------------------------------------------------------------------

    def _mute(self) -> None:
        """Hide skipped batches from the other callbacks, which saw them before."""
        for callback in self._others:
            for name in _HOOKS:
                self._own_hooks.append((callback, name, vars(callback).get(name)))
                vars(callback)[name] = functools.partial(self._unless_skipped, getattr(callback, name))

    def _unless_skipped(self, hook: Callable[..., Any], batch: int, logs: Any = None) -> None:
        if batch >= self._reading.skipped:
            hook(batch, logs=logs)
