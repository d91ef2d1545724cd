"""The callbacks that `data_parallel` adds before and after the user's in `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

Logs = dict[str, Any] | None


class FinishAtEpochEnd(keras.callbacks.Callback):
    """The first callback: runs pending updates, so that the other callbacks see the last step's weights.

    Args:
        flush: Runs the pending updates.
        end_epoch: `end_epoch(epoch, logs)` flushes, and averages statistics and logs over ranks.
    """

    async_safe = True  # overrides no batch hook

    def __init__(self, flush: Callable[[], None], end_epoch: Callable[[int, Logs], None]) -> None:
        super().__init__()
        self.flush = flush
        self._end_epoch = end_epoch
        self._averaged: dict[str, Any] = {}  # the logs of the last epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._end_epoch(epoch, logs)
        self._averaged = dict(logs or {})

    def on_train_end(self, logs: Logs = None) -> None:
        self.flush()
        if logs is not None:  # this rank's own, from before they were averaged
            logs.update(self._averaged)


class FinishAtEveryBatch(FinishAtEpochEnd):
    """The first callback if a user's callback may read weights at batches: also flushes after every batch."""

    async_safe = False

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.flush()


class StartTogether(keras.callbacks.Callback):
    """The last callback: if earlier ones loaded or set weights on some ranks, all ranks take rank 0's state.

    Args:
        begin_fit: Compares the ranks at the start of `fit`.
        begin_epoch: `begin_epoch(epoch)` compares them at the start of an epoch.
    """

    async_safe = True  # overrides no batch hook

    def __init__(self, begin_fit: Callable[[], None], begin_epoch: Callable[[int], None]) -> None:
        super().__init__()
        self._begin_fit = begin_fit
        self._begin_epoch = begin_epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        self._begin_fit()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._begin_epoch(epoch)
