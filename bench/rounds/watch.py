"""Times the steps of a rank, alike for every system."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

from bench.rounds import meter
from bench.rounds.record import RankRound


class StepWatch:
    """Is told of the start of a run, the end of each step, and the end of draining.

        begin  step ... step   begin(timed)  step ... step  drained
                               |<----------- timed -------------->|

    The timed part begins with a run of its own, with nothing left over from earlier steps, or after
    `open_after` steps of a run. `at_window` is called just before it begins. Evaluations do not count.
    """

    at_window: Callable[[], None] | None = None
    helper: int | None = None  # a process whose CPU time counts as this rank's

    def __init__(self, open_after: int | None = None) -> None:
        self._open_after = open_after
        self._last_s = 0.0
        self._done = 0
        self._paused_s = 0.0
        self._began_s = self._ended_s = self._host_share = 0.0
        self._first: meter.Reading | None = None
        self._last: meter.Reading | None = None
        self.first_step_s = 0.0
        self.step_s: list[float] = []
        self.loss: list[float] = []
        self.accuracy: list[float] = []

    def begin(self, timed: bool = False) -> None:
        """Note the start of a run, before its first step."""
        if timed:
            self._open()
        self._last_s = time.monotonic()

    def step(self) -> None:
        now_s = time.monotonic()
        took_s, self._last_s = now_s - self._last_s, now_s
        self._done += 1
        if self._done == 1:
            self.first_step_s = took_s
        if self._first is not None:
            self.step_s.append(took_s)
        elif self._done == self._open_after:
            self._open()

    def epoch(self, evaluate: Callable[[], tuple[float, float]]) -> None:
        """After an epoch's last step, keep the loss and accuracy that `evaluate` returns."""
        began_s = time.monotonic()
        loss, accuracy = evaluate()
        self.loss.append(loss)
        self.accuracy.append(accuracy)
        taken_s = time.monotonic() - began_s
        self._paused_s += taken_s
        self._last_s += taken_s

    def drained(self) -> None:
        """Note that nothing is left to do after the last step."""
        self._ended_s = time.monotonic()
        self._last = meter.read(self.helper)
        self._host_share = psutil.cpu_percent() / 100

    def _open(self) -> None:
        if self.at_window is not None:
            self.at_window()
        psutil.cpu_percent()  # the next call measures from here
        self._first = meter.read(self.helper)
        self._paused_s = 0.0  # evaluations before the timed part do not count
        self._began_s = self._last_s = time.monotonic()

    def rank_round(self) -> RankRound:
        assert self._first is not None
        assert self._last is not None
        timed_s = self._ended_s - self._began_s
        return RankRound(
            step_s=[round(each, 6) for each in self.step_s],
            wall_s=(timed_s - self._paused_s) / len(self.step_s),
            cpu_share=(self._last.cpu_s - self._first.cpu_s) / timed_s,
            peak_bytes=self._last.peak_bytes,
            sent_bytes=(self._last.sent_bytes - self._first.sent_bytes) // len(self.step_s),
            first_step_s=self.first_step_s,
            host_share=round(self._host_share, 3),
            loss=self.loss,
            accuracy=self.accuracy,
        )


def fit_callback(
    keras: Any, watch: StepWatch, evaluate: Callable[[], tuple[float, float]] | None, *, timed: bool
) -> Any:
    """Return a Keras callback that reports the steps of a `fit` to a watch, and epochs with `evaluate`."""

    class Watching(keras.callbacks.Callback):  # type: ignore[misc]
        # For hvpipe: it need not finish a step first, nor ask all ranks after each step whether to stop.
        reads_weights = False
        stops_training = False

        begun = False

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not self.begun:
                watch.begin(timed)
            self.begun = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            watch.step()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if evaluate is not None:
                watch.epoch(evaluate)

    return Watching()
