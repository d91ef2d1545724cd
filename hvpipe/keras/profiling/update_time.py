"""The time of an optimizer's update, measured on variables like a model's weights."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvpipe.keras.profiling.footprint import OptimizerSlots, trained_variables, weight_bytes
from hvpipe.keras.profiling.stopwatch import Stopwatch, TimedCall
from hvpipe.keras.training_alone import alone

_LARGE_BYTES = 32 << 20
"""More than caches hold, as in a stage's weights."""

_SMALL, _COLUMNS = 16, 256


class UpdateTime:
    """Seconds per variable and per byte: a line through updates of one large variable and of small ones."""

    def __init__(self, optimizer: OptimizerSlots, model_bytes: int, stopwatch: Stopwatch) -> None:
        """Measure the line, unless the model has no trained weights (`model_bytes` is 0)."""
        self._variable_s = self._byte_s = 0.0
        if model_bytes == 0:
            return
        rows = max(1, min(model_bytes, _LARGE_BYTES) // (4 * _COLUMNS))
        small_s = _time_s(optimizer, [[_COLUMNS]] * _SMALL, stopwatch)
        self._variable_s = small_s / _SMALL
        large_s = _time_s(optimizer, [[rows, _COLUMNS]], stopwatch)
        self._byte_s = max(0.0, large_s - self._variable_s) / (4 * _COLUMNS * rows)

    def of(self, operation: Any) -> float:
        """Return the seconds for a layer's trained weights; 0 for other operations."""
        return len(trained_variables(operation)) * self._variable_s + weight_bytes(operation) * self._byte_s


def _time_s(slots: OptimizerSlots, shapes: list[list[int]], stopwatch: Stopwatch) -> float:
    """Return the seconds of a pipeline's update: read the sums of gradients, and apply them."""
    variables = [keras.Variable(tf.zeros(shape), name=f"weight_{i}") for i, shape in enumerate(shapes)]
    sums = [tf.Variable(tf.zeros(shape), trainable=False) for shape in shapes]
    optimizer = slots.new_optimizer()
    try:
        optimizer.build(variables)
        apply = tf.function(lambda *found: optimizer.apply(list(found), variables), autograph=False)
        call = TimedCall(lambda: apply(*[gradient.read_value() for gradient in sums]), 0, 0)
        with alone():
            return stopwatch.in_turn_s([call])[0]
    except (TypeError, ValueError):
        # An optimizer for the weights of particular layers only: its updates count as 0 s.
        return 0.0
