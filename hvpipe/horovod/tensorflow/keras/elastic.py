"""The names of `horovod.tensorflow.keras.elastic`."""

from __future__ import annotations

from typing import Any

from hvpipe.horovod.tensorflow.elastic import TensorFlowKerasState, run
from hvpipe.keras.horovod_callbacks import StateCallback

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """State of a Keras model, its optimizer and plain values; see TensorFlowKerasState."""

    def __init__(self, model: Any, optimizer: Any = None, **values: Any) -> None:
        super().__init__(model, optimizer, **values)


class CommitStateCallback(StateCallback):
    """Commits the state every `batches_per_commit` batches, and at the end of each epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self._every = batches_per_commit
        self._left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self._left = self._every

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            self.state.commit()
            self._left = self._every

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(StateCallback):
    """Keeps `state.batch`; at the end of an epoch it is 0."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(StateCallback):
    """Keeps `state.epoch`, the number of finished epochs."""

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._initial = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._initial = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._initial + epoch + 1
