"""Times warm calls of TensorFlow functions on this rank's device, minus the overhead of a call."""

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
class TimedCall:
    """A call to time, and how many tensors its TensorFlow function takes and returns."""

    call: Callable[[], object]
    inputs: int
    outputs: int


class Stopwatch:
    """Times `repeats` calls, in seconds; waits for the device before and after each.

    From each time it subtracts the shortest time of an empty function with the same number of tensors. No
    result is below 0.
    """

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self._on_gpu = bool(tf.config.list_logical_devices("GPU"))
        self._empty_s: dict[tuple[int, int], float] = {}
        self._latest_result: object = None
        self.spread = 0.0
        """The slowest turn of `in_turn_s` minus the fastest, over the median; of the longest calls."""
        self._longest_s = 0.0

    def time_s(self, timed: TimedCall) -> float:
        """Return the median time of consecutive calls."""
        taken_s = statistics.median(self._times_s(timed.call, self._repeats))
        self._latest_result = None
        return max(0.0, taken_s - self._time_empty_s(timed))

    def in_turn_s(self, several: Sequence[TimedCall]) -> list[float]:
        """Return the mean time of each call when the calls are made in turn, `repeats` times.

        These are means because a step is their sum: a call that is delayed every tenth time adds to it.
        """
        turns_s = [[self._once_s(timed.call) for timed in several] for _ in range(_WARM_UPS + self._repeats)][
            _WARM_UPS:
        ]
        self._latest_result = None
        whole_s = [sum(of_turn_s) for of_turn_s in turns_s]
        if (usual_s := statistics.median(whole_s)) > self._longest_s:
            self.spread, self._longest_s = (max(whole_s) - min(whole_s)) / usual_s, usual_s
        means_s = [sum(of_call_s) / self._repeats for of_call_s in zip(*turns_s, strict=True)]
        return [max(0.0, s - self._time_empty_s(timed)) for s, timed in zip(means_s, several, strict=True)]

    def _time_empty_s(self, timed: TimedCall) -> float:
        inputs, outputs = timed.inputs, timed.outputs
        if (inputs, outputs) not in self._empty_s:
            values = [tf.constant(0.0)] * inputs

            def body(*values: Any) -> list[Any]:
                return [
                    tf.identity(values[i % inputs]) if inputs else tf.constant(0.0) for i in range(outputs)
                ]

            empty = FlatFunction(body, [tf.TensorSpec((), tf.float32)] * inputs)
            self._empty_s[inputs, outputs] = min(self._times_s(lambda: empty(values), _EMPTY_CALLS))
        return self._empty_s[inputs, outputs]

    def _times_s(self, call: Callable[[], object], count: int) -> list[float]:
        return [self._once_s(call) for _ in range(_WARM_UPS + count)][_WARM_UPS:]

    def _once_s(self, call: Callable[[], object]) -> float:
        self._wait()
        started_s = time.perf_counter()
        found = call()
        self._wait()
        taken_s = time.perf_counter() - started_s
        # Keep the result until the next call has run, as a step's tensors are freed in the next step.
        self._latest_result = found
        return taken_s

    def _wait(self) -> None:
        if self._on_gpu:
            tf.test.experimental.sync_devices()
