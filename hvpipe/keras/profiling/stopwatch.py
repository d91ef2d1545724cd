"""Times calls of TensorFlow functions on this rank's device: warm, less what any call takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvpipe.keras.graph.graph_pieces import FlatFunction

_WARM_UPS = 2
_EMPTY_CALLS = 30


@dataclass(frozen=True)
class Timed:
    """A call to be timed, and how many tensors its TensorFlow function takes and returns."""

    call: Callable[[], object]
    given: int
    made: int


class Stopwatch:
    """Times of `repeats` calls in seconds; waits for the device before and after each.

    All are what a call takes beyond the least that an empty function of as many tensors takes; at least 0.
    """

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self._on_gpu = bool(tf.config.list_logical_devices("GPU"))
        self._empty_s: dict[tuple[int, int], float] = {}
        self._held: object = None

    def time_s(self, timed: Timed) -> float:
        """The median of calls one after the other."""
        taken_s = statistics.median(self._times_s(timed.call, self._repeats))
        self._held = None
        return max(0.0, taken_s - self._time_empty_s(timed))

    def in_turn_s(self, several: Sequence[Timed]) -> list[float]:
        """The means of calls that are made in turn, again and again.

        Means, for these are what a step is made of: who is held up in every tenth call loses as much.
        """
        sums_s = [0.0] * len(several)
        for turn in range(_WARM_UPS + self._repeats):
            for place, timed in enumerate(several):
                taken_s = self._once_s(timed.call)
                sums_s[place] += taken_s if turn >= _WARM_UPS else 0.0
        self._held = None
        means_s = [total_s / self._repeats for total_s in sums_s]
        return [max(0.0, s - self._time_empty_s(timed)) for s, timed in zip(means_s, several, strict=True)]

    def _time_empty_s(self, timed: Timed) -> float:
        given, made = timed.given, timed.made
        if (given, made) not in self._empty_s:
            values = [tf.constant(0.0)] * given

            def body(*values: Any) -> list[Any]:
                return [tf.identity(values[i % given]) if given else tf.constant(0.0) for i in range(made)]

            empty = FlatFunction(body, [tf.TensorSpec((), tf.float32)] * given)
            self._empty_s[given, made] = min(self._times_s(lambda: empty(values), _EMPTY_CALLS))
        return self._empty_s[given, made]

    def _times_s(self, call: Callable[[], object], count: int) -> list[float]:
        return [self._once_s(call) for _ in range(_WARM_UPS + count)][_WARM_UPS:]

    def _once_s(self, call: Callable[[], object]) -> float:
        self._wait()
        started_s = time.perf_counter()
        found = call()
        self._wait()
        taken_s = time.perf_counter() - started_s
        # What a call made is freed only when the next one has run, as what a step makes is freed in another.
        self._held = found
        return taken_s

    def _wait(self) -> None:
        if self._on_gpu:
            tf.test.experimental.sync_devices()
