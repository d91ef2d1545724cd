"""Callbacks as in Horovod: learning-rate schedules by epoch, a checkpoint of the best model, kept state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras

from hvpipe.errors import HvpipeError
from hvpipe.session import current


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)` between two epochs.

    Args:
        initial_lr: The learning rate at multiplier 1.
        multiplier: A function of the epoch, or a constant c, which stands for c ** (epoch - start_epoch).
        start_epoch: The first epoch that it changes.
        end_epoch: The first epoch that it no longer changes; None: no end.
        staircase: Whether the rate changes once an epoch. If not, it changes at every batch, and `multiplier`
            gets a fraction as its epoch.
        momentum_correction: Whether the momentum is scaled with the rate for the first batch after a change
            (Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2). Only under `run_eagerly=True`:
            otherwise Keras traces the momentum as a constant.
        steps_per_epoch: Batches in an epoch; None to take it from `fit`.

    Raises:
        HvpipeError: Without `initial_lr`; and during `fit`, if it does not know the steps of an epoch.
    """

    reads_weights = False
    stops_training = False

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise HvpipeError("initial_lr should be a number. Received: initial_lr=None")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = math.inf if end_epoch is None else end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self.finish_update: Callable[[], None] = lambda: None
        """Runs the update of the step before, if that waits for the next step; `data_parallel` sets it."""
        self._epoch = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.staircase or self.steps_per_epoch is not None:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise HvpipeError(
                f"{type(self).__name__} needs steps_per_epoch=, because fit does not know how many steps an "
                "epoch has. Received: steps_per_epoch=None"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self.start_epoch <= self._epoch < self.end_epoch:
            return
        if self.staircase and batch == 0:
            self._set(self._epoch)
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(self._epoch + batch / self.steps_per_epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._momentum is not None:
            self.model.optimizer.momentum = self._momentum
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        self.finish_update()
        old, new = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        momentum = getattr(optimizer, "momentum", None)
        # Keras' momentum is a number that is part of the traced step, so only an eager step can correct it.
        if self.momentum_correction and momentum and old > 0 and self.model.run_eagerly:
            self._momentum = float(momentum)
            optimizer.momentum = self._momentum * new / old


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` over the first epochs.

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017.

    Args:
        initial_lr: The learning rate after the warm-up.
        warmup_epochs: How many epochs it takes.
        momentum_correction: As for `LearningRateScheduleCallback`.
        steps_per_epoch: Batches in an epoch; None to take it from `fit`.
        verbose: 1 to print a line on rank 0 at the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            size = current().world.size
            assert self.steps_per_epoch is not None
            after_this_batch = epoch + 1 / self.steps_per_epoch
            return (after_this_batch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if epoch == self.end_epoch - 1 and self.verbose > 0 and current().world.rank == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """A ModelCheckpoint of the best model. Set its `filepath` before `fit`, as Horovod's estimators do.

    Without one, it writes `best.keras`, or `best.weights.h5` if it saves weights only.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
    ) -> None:
        super().__init__(
            filepath or ("best.weights.h5" if save_weights_only else "best.keras"),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )


class StateCallback(keras.callbacks.Callback):
    """Base of the callbacks that keep an elastic state."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


def load_model(filepath: Any, custom_objects: Any = None) -> Any:
    """Load a model with Keras."""
    return keras.models.load_model(filepath, custom_objects=custom_objects)
