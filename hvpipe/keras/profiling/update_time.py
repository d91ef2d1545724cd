"""What an optimizer's update of weights takes, measured on variables like them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvpipe.keras.profiling.footprint import Slots, weight_bytes
from hvpipe.keras.profiling.stopwatch import Stopwatch, Timed

_LARGE_BYTES = 32 << 20
"""More than caches hold, as the weights of a stage are."""

_SMALL, _COLUMNS = 16, 256


class UpdateTime:
    """A line through the updates of one large variable and of small ones: so long a variable, and a byte."""

    def __init__(self, optimizer: Slots, model_bytes: int, stopwatch: Stopwatch) -> None:
        self._variable_s = self._byte_s = 0.0
        if model_bytes == 0:
            return
        rows = max(1, min(model_bytes, _LARGE_BYTES) // (4 * _COLUMNS))
        small_s = _time_s(optimizer, [[_COLUMNS]] * _SMALL, stopwatch)
        self._variable_s = small_s / _SMALL
        large_s = _time_s(optimizer, [[rows, _COLUMNS]], stopwatch)
        self._byte_s = max(0.0, large_s - self._variable_s) / (4 * _COLUMNS * rows)

    def of(self, operation: Any) -> float:
        """Seconds for the trained weights of a layer; 0 for what is none."""
        count = len(operation.trainable_variables) if isinstance(operation, keras.Layer) else 0
        return count * self._variable_s + weight_bytes(operation) * self._byte_s


def _time_s(slots: Slots, shapes: list[list[int]], stopwatch: Stopwatch) -> float:
    """Seconds of an update as a pipeline makes it: sums of gradients are read, and given to the optimizer."""
    variables = [keras.Variable(tf.zeros(shape), name=f"weight_{i}") for i, shape in enumerate(shapes)]
    sums = [tf.Variable(tf.zeros(shape), trainable=False) for shape in shapes]
    optimizer = slots.new_optimizer()
    try:
        optimizer.build(variables)
        apply = tf.function(lambda *found: optimizer.apply(list(found), variables), autograph=False)
        call = Timed(lambda: apply(*[gradient.read_value() for gradient in sums]), 0, 0)
        return stopwatch.in_turn_s([call])[0]
    except (TypeError, ValueError):
        # An optimizer for weights of certain layers alone: its updates count as nothing.
        return 0.0
