"""Times calls of TensorFlow functions on this rank's device: warm, the median, less what any call takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvpipe.keras.split_gradient import FlatFunction

_WARM_UPS = 2
_EMPTY_CALLS = 30


class Stopwatch:
    """Medians of `repeats` calls in seconds; waits for the device before and after each."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self._on_gpu = bool(tf.config.list_logical_devices("GPU"))
        self._empty_s: dict[tuple[int, int], float] = {}
        self._held: object = None

    def time_s(self, call: Callable[[], object], *, given: int, made: int) -> float:
        """The seconds that `call` takes beyond the least that an empty function takes; at least 0.

        `given` and `made` are how many tensors its TensorFlow function takes and returns, on which the
        time of an empty one depends.
        """
        if (given, made) not in self._empty_s:
            self._empty_s[given, made] = self._time_empty_s(given, made)
        taken_s = statistics.median(self._times_s(call, self._repeats))
        return max(0.0, taken_s - self._empty_s[given, made])

    def _time_empty_s(self, given: int, made: int) -> float:
        values = [tf.constant(0.0)] * given

        def body(*values: Any) -> list[Any]:
            return [tf.identity(values[i % given]) if given else tf.constant(0.0) for i in range(made)]

        empty = FlatFunction(body, [tf.TensorSpec((), tf.float32)] * given)
        return min(self._times_s(lambda: empty(values), _EMPTY_CALLS))

    def _times_s(self, call: Callable[[], object], count: int) -> list[float]:
        taken_s = [self._once_s(call) for _ in range(_WARM_UPS + count)]
        self._held = None
        return taken_s[_WARM_UPS:]

    def _once_s(self, call: Callable[[], object]) -> float:
        self._wait()
        started_s = time.perf_counter()
        found = call()
        self._wait()
        taken_s = time.perf_counter() - started_s
        # What a call made is freed only when the next one has run. Else the allocator would give the memory
        # back each time, and its pages would be zeroed anew within the next call, as they are not in a step.
        self._held = found
        return taken_s

    def _wait(self) -> None:
        if self._on_gpu:
            tf.test.experimental.sync_devices()
