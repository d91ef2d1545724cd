"""Callbacks that keep ranks together: Horovod's broadcast and metric average, and two that stop all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import metrics_by_log
from hvpipe.keras.initial_state import settle, shared_slots, without_xla
from hvpipe.keras.variables import broadcast_variables, identity
from hvpipe.session import Session, current

_NUMBER = re.compile(r"(\d+)")


# --- For custom set-ups -----------------------------------------------------------------------------------


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts weights and optimizer state before the first batch, and switches `jit_compile` off.

    For a model that is compiled with a `DistributedOptimizer`. `data_parallel` already does both.

    Args:
        root_rank: The rank whose values all ranks get.
        device: Changes nothing; Horovod has it.
        local_variables: A variable, or several, that keep each rank's own values.

    Raises:
        HvpipeError: At the start of `fit`, if the model is not built.
        ValueError: If `local_variables` are not variables.

    Example:
        ```python
        model.compile(hk.DistributedOptimizer(keras.optimizers.Adam()), "mse")
        model.fit(dataset, callbacks=[hk.BroadcastGlobalVariablesCallback(0)])
        ```
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local: list[Any] = []
        several = isinstance(local_variables, (list, tuple, set))
        for variable in [] if local_variables is None else local_variables if several else [local_variables]:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Let a variable keep each rank's own value. Raises ValueError for anything else."""
        if not isinstance(var, (keras.Variable, tf.Variable)):
            raise ValueError(f"local_variables should be variables. Received: {var!r}")
        self._local.append(var)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        without_xla(current(), model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Send the weights of `root_rank`. Raises HvpipeError for a model that is not built."""
        if not self.model.built:
            raise HvpipeError(
                "BroadcastGlobalVariablesCallback needs a model that is built: give it an input shape, or "
                f"call it on a batch before fit. Received: model {self.model.name}, not built"
            )
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        everything = [*self.model.variables, *shared_slots(self.model.optimizer)]
        local = {identity(variable) for variable in self._local}
        broadcast_variables([v for v in everything if identity(v) not in local], self.root_rank)
        settle(self.model)


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages an epoch's logs over ranks; every rank counts the same.

    Put it before callbacks that read logs. `data_parallel` already averages them, weighted by samples.

    Args:
        device: Changes nothing; Horovod has it.

    Example:
        ```python
        model.fit(dataset, callbacks=[hk.MetricAverageCallback(), keras.callbacks.EarlyStopping("loss")])
        ```
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs:
            average_logs(current(), logs, 1.0, f"logs of epoch {epoch + 1}")


# --- Logs ---------------------------------------------------------------------------------------------------


def means_in_logs(model: Any) -> dict[str, tuple[float, float]]:
    """Return the sum and the sum of weights of each compiled metric that is a mean, by its name in logs."""
    return {
        name: (float(metric.total.numpy()), float(metric.count.numpy()))
        for name, metric in metrics_by_log(model).items()
        if isinstance(metric, keras.metrics.Mean)
        and type(metric).result is keras.metrics.Mean.result
        and metric.total.shape == metric.count.shape == ()
    }


def average_logs(
    session: Session,
    logs: MutableMapping[str, Any],
    samples: float,
    what: str,
    note: float = 0.0,
    means: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> list[float]:
    """Replace the numbers and arrays in `logs` with their means over ranks; collective.

    Args:
        session: The ranks to average over.
        logs: Values by name. Values that are neither numbers nor arrays stay as they are.
        samples: The weight of this rank's values, except means.
        what: Describes the logs, for the error if ranks are at different places.
        note: A number to exchange along with the logs.
        means: What `means_in_logs` returned when the logs were made. These count by their own weights, if
            that is so on all ranks.

    Returns:
        The `note` of every rank.
    """
    if session.world.size == 1:
        return [note]
    values = {
        name: found for name in sorted(logs, key=_by_number) if (found := _numbers(logs[name])) is not None
    }
    counts = [_count(value, means.get(name)) for name, value in values.items()]
    row = np.concatenate([[samples], counts, *(value.ravel() for value in values.values())])[None]
    # Keras increments the numbers in layer names, so they may differ between ranks.
    listed = [f"{_NUMBER.sub('#', name)}{list(v.shape) or ''}" for name, v in values.items()]
    notes = session.engine.agree(f"{what} ({', '.join(listed)})", note)
    everyone = session.engine.allgather(row)
    samples_of, counts_of, rest = np.split(everyone, [1, 1 + len(values)], axis=1)
    for number, (name, value) in enumerate(values.items()):
        theirs, rest = rest[:, : value.size], rest[:, value.size :]
        counted = counts_of[:, number]
        if counted.min() < 0 or counted.sum() == 0:
            counted = samples_of[:, 0]
        mean = np.average(theirs, axis=0, weights=counted if counted.sum() > 0 else None)
        logs[name] = mean.reshape(value.shape) if value.shape else float(mean[0])
    return notes


def _count(value: Any, mean: tuple[float, float] | None) -> float:
    """Return the weights in a value that is this mean; -1 if it is not."""
    if mean is None or value.shape:
        return -1.0
    total, count = mean
    return count if np.isclose(value, total / count if count else 0.0, rtol=1e-2, equal_nan=True) else -1.0


def _by_number(name: str) -> list[str | int]:
    """Return a key that sorts layer 9 before layer 10."""
    return [int(part) if part.isdigit() else part for part in _NUMBER.split(name)]


def _numbers(value: Any) -> Any:
    """Return a value as float64, or None if it is neither a number nor an array."""
    try:
        return np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return None


# --- Stopping -----------------------------------------------------------------------------------------------


class StopTogether(keras.callbacks.Callback):
    """The last callback: if one rank stops training at the start or end of an epoch, all ranks stop."""

    async_safe = True  # overrides no batch hook

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
        wish = float(self.model.stop_training)
        if any(self._session.run_section(lambda: self._session.engine.agree(what, wish))):
            self.model.stop_training = True


class StopTogetherAtBatches(StopTogether):
    """Also agrees after every batch, for callbacks that may stop training within an epoch."""

    async_safe = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._agree(f"whether to go on after batch {batch + 1} of epoch {self._epoch + 1}")


def stop_together(session: Session, callbacks: Iterable[Any]) -> StopTogether:
    """Return the callback to put after these, which may differ between ranks; collective."""
    stopping = any(stops_at_batches(callback) for callback in callbacks)
    anywhere = any(session.engine.agree("callbacks that may stop within an epoch", float(stopping)))
    return (StopTogetherAtBatches if anywhere else StopTogether)(session)


# --- Batch hooks of callbacks -----------------------------------------------------------------------------

_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def reads_at_batches(callback: Any) -> bool:
    """Return whether a callback may read weights between two steps.

    Of Keras' own callbacks, only LambdaCallback may, because it runs the user's functions. The others do not,
    or read weights through the model. A callback with `reads_weights = False` does not read them.
    """
    return bool(getattr(callback, "reads_weights", True)) and _runs_users_code_at_batches(callback)


def stops_at_batches(callback: Any) -> bool:
    """Return whether a callback may stop training within an epoch.

    Of Keras' own, TerminateOnNaN may. A callback with `stops_training = False` does not.
    """
    if not getattr(callback, "stops_training", True):
        return False
    return isinstance(callback, keras.callbacks.TerminateOnNaN) or _runs_users_code_at_batches(callback)


def _runs_users_code_at_batches(callback: Any) -> bool:
    if any(hook in vars(callback) for hook in _BATCH_HOOKS):
        return True
    hooks = (getattr(type(callback), hook) for hook in _BATCH_HOOKS)  # of a subclass, perhaps Keras' own
    return any(not str(getattr(hook, "__module__", "")).startswith("keras.") for hook in hooks)
