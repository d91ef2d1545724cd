"""Times the steps of a rank, and reads what its process has used, alike for every system."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from bench.rounds.record import RankRound

_ADAPTERS = Path("/sys/class/net")


def cpu_s(helper: int | None = None) -> float:
    """Return the seconds of CPU time of this process so far, with those of a `helper` process."""
    used = psutil.Process(helper).cpu_times() if helper is not None else None
    return time.process_time() + (used.user + used.system if used else 0.0)


def peak_bytes() -> int:
    """Return the peak of resident memory since this program began, as the kernel counts; 0 without /proc."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def sent_bytes(adapters: Path = _ADAPTERS) -> int:
    """Return the bytes that left this host (or network namespace) since it started, with protocol headers.

    These are bytes over TCP/IP. The kernel does not count InfiniBand or shared memory. Where there are
    network adapters only they count, because bonds, bridges and tunnels send through them.
    """
    counted = psutil.net_io_counters(pernic=True, nowrap=False)
    sent = {name: each.bytes_sent for name, each in counted.items() if name != "lo"}
    physical = [name for name in sent if (adapters / name / "device").exists()]
    return sum(sent[name] for name in physical or sent)


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
        self._done = 0  # steps
        self._last_s = self._paused_s = self._taken_s = self._cpu_s = self._host_share = 0.0
        self._began_s: float | None = None  # when the timed part began
        self._sent_bytes = self._peak_bytes = 0
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
        if self._began_s is not None:
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
        assert self._began_s is not None
        self._taken_s = time.monotonic() - self._began_s
        self._cpu_s = cpu_s(self.helper) - self._cpu_s
        self._sent_bytes, self._peak_bytes = sent_bytes() - self._sent_bytes, peak_bytes()
        self._host_share = psutil.cpu_percent() / 100

    def _open(self) -> None:
        if self.at_window is not None:
            self.at_window()
        psutil.cpu_percent()  # the next call measures from here
        self._cpu_s, self._sent_bytes = cpu_s(self.helper), sent_bytes()
        self._paused_s = 0.0  # evaluations before the timed part do not count
        self._began_s = self._last_s = time.monotonic()

    def rank_round(self) -> RankRound:
        return RankRound(
            step_s=[round(each, 6) for each in self.step_s],
            wall_s=(self._taken_s - self._paused_s) / len(self.step_s),
            cpu_share=self._cpu_s / self._taken_s,
            peak_bytes=self._peak_bytes,
            sent_bytes=self._sent_bytes // len(self.step_s),
            first_step_s=self.first_step_s,
            host_share=round(self._host_share, 3),
            loss=self.loss,
            accuracy=self.accuracy,
        )


def fit_callback(
    keras: Any, watch: StepWatch, evaluate: Callable[[], tuple[float, float]] | None, *, timed: bool
) -> Any:
    """Return a Keras callback that reports the steps of a `fit` to a watch, and epochs with `evaluate`."""

    class Watching(keras.callbacks.Callback):
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
