"""Callbacks: what `data_parallel` adds to `fit`, and the ones that Horovod's users know."""

from __future__ import annotations

import re
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from hvpipe.comm.horovod_arguments import check_other_arguments
from hvpipe.errors import HvpipeError
from hvpipe.keras.initial_state import broadcast_model, without_xla
from hvpipe.session import Session, current

if TYPE_CHECKING:
    from hvpipe.keras.data_parallel.model import DataParallel

_NUMBER = re.compile(r"(\d+)")


def average_logs(
    session: Session, logs: MutableMapping[str, Any], samples: float, what: str, note: float = 0.0
) -> list[float]:
    """Replace the numbers and arrays in `logs` by their means over ranks, by `samples` here; collective.

    Returns every rank's `note`, which travels along.
    """
    if session.world.size == 1:
        return [note]
    values = {
        name: found for name in sorted(logs, key=_in_parts) if (found := _numbers(logs[name])) is not None
    }
    row = np.concatenate([[samples], *(value.ravel() for value in values.values())])[None]
    # Names of layers hold numbers that Keras counts up, which need not be the same on all ranks.
    told = [f"{_NUMBER.sub('#', name)}{list(v.shape) or ''}" for name, v in values.items()]
    notes = session.engine.agree(f"{what} ({', '.join(told)})", note)
    everyone = session.engine.allgather(row)
    weights = everyone[:, 0] / everyone[:, 0].sum() if everyone[:, 0].sum() > 0 else None
    means = np.average(everyone[:, 1:], axis=0, weights=weights)
    for name, value in values.items():
        mean, means = means[: value.size], means[value.size :]
        logs[name] = mean.reshape(value.shape) if value.shape else float(mean[0])
    return notes


def _in_parts(name: str) -> list[str | int]:
    """A name so that layers 9 and 10 stay in this order."""
    return [int(part) if part.isdigit() else part for part in _NUMBER.split(name)]


def _numbers(value: Any) -> Any:
    """As float64; None where that is not possible."""
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return None


class EpochEnd(keras.callbacks.Callback):
    """First of the callbacks: finishes the updates, so that the others see the weights of the last step."""

    async_safe = True  # overrides nothing that runs at batches

    def __init__(self, state: DataParallel) -> None:
        super().__init__()
        self._state = state
        self._averaged: dict[str, Any] = {}  # the logs of the last epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.end_epoch(epoch, logs)
        self._averaged = dict(logs or {})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._state.flush()
        if logs is not None:  # this rank's own, from before they were averaged
            logs.update(self._averaged)


class FinishBeforeBatchCallbacks(EpochEnd):
    """Also finishes the updates at the end of every batch, for callbacks of the user that may look then."""

    async_safe = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.flush()


class StartTogether(keras.callbacks.Callback):
    """Last of the callbacks: what others have loaded or set by now on some ranks, all go on with."""

    async_safe = True  # overrides nothing that runs at batches

    def __init__(self, state: DataParallel) -> None:
        super().__init__()
        self._state = state

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._state.begin_fit()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._state.begin_epoch(epoch)


class StopTogether(keras.callbacks.Callback):
    """Last of the callbacks: where one stops training at an epoch's begin or end, all ranks stop."""

    async_safe = True  # overrides nothing that runs at batches

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._agree(f"whether to stop with the first batch of epoch {epoch + 1}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._agree(f"whether to go on after epoch {epoch + 1}")

    def _agree(self, what: str) -> None:
        if any(self._session.engine.agree(what, float(self.model.stop_training))):
            self.model.stop_training = True


class StopTogetherAtBatches(StopTogether):
    """Also agrees after every batch, for callbacks that may stop training within an epoch."""

    async_safe = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._agree(f"whether to go on after batch {batch + 1} of epoch {self._epoch + 1}")


def stop_together(session: Session, callbacks: Iterable[Any]) -> StopTogether:
    """The one to put last behind these callbacks, which may differ from rank to rank; collective."""
    stopping = any(stops_at_batches(callback) for callback in callbacks)
    anywhere = any(session.engine.agree("callbacks that may stop within an epoch", float(stopping)))
    return (StopTogetherAtBatches if anywhere else StopTogether)(session)


_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def reads_at_batches(callback: Any) -> bool:
    """Whether a callback may look at the weights between two steps.

    Keras's own do not, or ask the model for them, but for a LambdaCallback, which runs the user's
    functions; a callback says that it does not with `reads_weights = False`.
    """
    return bool(getattr(callback, "reads_weights", True)) and _runs_users_code_at_batches(callback)


def stops_at_batches(callback: Any) -> bool:
    """Whether a callback may stop training within an epoch.

    Of Keras's own, TerminateOnNaN may; a callback says that it does not with `stops_training = False`.
    """
    if not getattr(callback, "stops_training", True):
        return False
    return isinstance(callback, keras.callbacks.TerminateOnNaN) or _runs_users_code_at_batches(callback)


def _runs_users_code_at_batches(callback: Any) -> bool:
    if any(hook in vars(callback) for hook in _BATCH_HOOKS):
        return True
    kind, base = type(callback), keras.callbacks.Callback
    if kind.__module__.startswith("keras."):
        return False
    return any(getattr(kind, hook) is not getattr(base, hook) for hook in _BATCH_HOOKS)


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the root's weights and optimizer state before the first batch; switches `jit_compile` off.

    For custom set-ups; `data_parallel` does both by itself.
    """

    def __init__(self, root_rank: int = 0, **others: Any) -> None:
        super().__init__()
        check_other_arguments("BroadcastGlobalVariablesCallback", others)
        self.root_rank = root_rank

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        without_xla(current(), model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not self.model.built:
            raise HvpipeError(
                "BroadcastGlobalVariablesCallback wants a model that is built: give it an input shape, or "
                f"call it on a batch before fit. Received: model {self.model.name}, not built"
            )
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        broadcast_model(self.model, self.model.optimizer.variables, self.root_rank)


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the logs of an epoch over ranks, each counting the same; put it before those that read logs.

    For custom set-ups; `data_parallel` does it by itself, and by sample count.
    """

    def __init__(self, **others: Any) -> None:
        super().__init__()
        check_other_arguments("MetricAverageCallback", others)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs:
            average_logs(current(), logs, 1.0, f"logs of epoch {epoch + 1}")
