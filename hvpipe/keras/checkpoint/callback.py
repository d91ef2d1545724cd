"""`Checkpoint`: the callback that saves training in the background, and resumes it at the exact batch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras

from hvpipe.checkpoints.every import parse_every
from hvpipe.checkpoints.folder import folder_path
from hvpipe.errors import HvpipeError
from hvpipe.keras.checkpoint.checkpointed_fit import CheckpointedFit, CheckpointOptions
from hvpipe.keras.checkpoint.state_of import training_state

Logs = dict[str, Any] | None


class Checkpoint(keras.callbacks.Callback):
    """Saves training while it goes on, and resumes it where the last complete checkpoint ends.

    Start an interrupted script again, without changes: `fit` continues after the last batch that the newest
    checkpoint has. On the same number of ranks the result is the same, bit for bit, as if training had never
    stopped. Pass it on all ranks, with a folder that all of them see.

    A step waits only while the state is copied. A thread writes it, each rank its own part, and the last file
    makes it complete. An interruption at any moment leaves the checkpoint before. A damaged checkpoint is
    noticed by its checksums and set aside, and training resumes from the one before it.

    After SIGTERM, to any rank or to `hvpipe run`, all ranks finish the step, write a checkpoint and exit with
    code 75.

    Args:
        folder: A folder for the checkpoints of this training, and of nothing else.
        every: How often: a number of steps, or text like "500steps", "1epoch", "30s", "10min", "2h".
        keep: How many complete checkpoints to keep, at least 1.

    Raises:
        HvpipeError: For other arguments. In `fit`: if the model is not one of `data_parallel` or
            `pipeline_parallel`, `fit` has another Checkpoint, the folder cannot be written, its checkpoints
            are all damaged, or are of another model.

    Example:
        ```python
        model = hk.data_parallel(model)
        checkpoint = hk.Checkpoint("run1", every="10min")
        model.fit(hk.shard(dataset), epochs=90, callbacks=[checkpoint])
        ```
    """

    async_safe = False
    reads_weights = False  # it finishes the step itself when it writes
    stops_training = False  # it ends the process, on all ranks together

    def __init__(self, folder: str | os.PathLike[str], every: int | str = "10min", keep: int = 3) -> None:
        super().__init__()
        if not isinstance(keep, int) or keep < 1:
            raise HvpipeError(f"keep should be a whole number of at least 1. Received: keep={keep!r}")
        self._options = CheckpointOptions(folder_path(folder), parse_every(every), keep)
        self._running = _Running()
        self.at_epoch_ends = _AtEpochEnds(self._running, self._options.folder)

    def on_train_begin(self, logs: Logs = None) -> None:
        callbacks = training_state(self.model).fit_call.callbacks
        _check_alone(callbacks)
        others = [c for c in callbacks if not isinstance(c, (Checkpoint, _AtEpochEnds))]
        self._running.fit = CheckpointedFit(self._options, self.model, others)
        self._running.fit.begin(self.params)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        assert self._running.fit is not None
        self._running.fit.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        assert self._running.fit is not None
        self._running.fit.at_boundary()

    def on_test_begin(self, logs: Logs = None) -> None:
        if self._running.fit is not None:
            self._running.fit.leave_steps()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        assert self._running.fit is not None
        self._running.fit.leave_steps()


def _check_alone(callbacks: Iterable[Any]) -> None:
    folders = [str(c.at_epoch_ends.folder) for c in callbacks if isinstance(c, Checkpoint)]
    if len(folders) > 1:
        raise HvpipeError(
            "fit should get one hvpipe.keras.Checkpoint: each would resume the training. For more files, "
            f"use keras.callbacks.ModelCheckpoint. Received: one each for {', '.join(folders)}"
        )


class _Running:
    """The `fit` that runs, for both parts of a Checkpoint."""

    def __init__(self) -> None:
        self.fit: CheckpointedFit | None = None

    def take(self) -> CheckpointedFit | None:
        """Return the running `fit`, and forget it, because it is ending."""
        fit, self.fit = self.fit, None
        return fit


class _AtEpochEnds(keras.callbacks.Callback):
    """The part of Checkpoint that runs after all other callbacks."""

    async_safe = True  # overrides no batch hook

    def __init__(self, running: _Running, folder: Path) -> None:
        super().__init__()
        self._running, self.folder = running, folder

    def on_train_begin(self, logs: Logs = None) -> None:
        assert self._running.fit is not None
        self._running.fit.begin_callbacks()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        assert self._running.fit is not None
        self._running.fit.end_epoch(epoch)

    def on_train_end(self, logs: Logs = None) -> None:
        fit = self._running.take()
        assert fit is not None
        fit.end()

    def abandon(self) -> None:
        """Leave a `fit` that ends with an exception."""
        fit = self._running.take()
        if fit is not None:
            fit.leave_model()

    def lose(self, ranks: Iterable[int]) -> int:
        """Complete the checkpoint under way, if it needs nothing of ranks that are lost.

        Args:
            ranks: The ranks that are lost.

        Returns:
            How many steps are done.
        """
        return 0 if self._running.fit is None else self._running.fit.lose(ranks)

    @property
    def runs(self) -> bool:
        """Whether a `fit` runs."""
        return self._running.fit is not None

    def save_replicas(self) -> int | None:
        """Write a checkpoint of a pipeline on the remaining ranks, if they have all stages; collective.

        Returns:
            The step of the checkpoint; None if a part of the state is lost.
        """
        return None if self._running.fit is None else self._running.fit.save_replicas()
