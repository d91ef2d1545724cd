"""TraceAhead traces a train function before it runs, once, and the call uses that trace."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvpipe.keras.data_parallel.step_findings import GraphInspection
from hvpipe.keras.data_parallel.trace_ahead import TraceAhead


class Counted(keras.Sequential):
    """Counts the calls of its train_step from Python, which is one for each trace."""

    def __init__(self) -> None:
        super().__init__([keras.Input((4,)), keras.layers.Dense(3)])
        self.traces = 0

    def train_step(self, data: Any) -> Any:
        self.traces += 1
        x, y = data[:2]
        with tf.GradientTape() as tape:
            value = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(value, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": value}


def compiled(**options: Any) -> Counted:
    model = Counted()
    model.compile("sgd", keras.losses.MeanSquaredError(), **options)
    model.optimizer.build(model.trainable_variables)
    model.make_train_function()
    return model


def batch(samples: int) -> Any:
    return np.ones((samples, 4), np.float32), np.ones((samples, 3), np.float32), None


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_call_uses_the_trace_of_an_iterator(steps_per_execution: int) -> None:
    model = compiled(steps_per_execution=steps_per_execution)
    before = model.get_weights()
    iterator = iter(tf.data.Dataset.from_tensors(batch(8)[:2]).repeat())
    ahead = TraceAhead(model.train_function)
    ahead.trace(iterator)
    traces = model.traces
    assert traces > 0
    np.testing.assert_array_equal(model.get_weights()[0], before[0])  # nothing has run
    for _ in range(2):
        ahead.trace(iterator)
        model.train_function(iterator)
    assert model.traces == traces
    assert not np.array_equal(model.get_weights()[0], before[0])


def test_a_call_uses_the_trace_of_a_batch() -> None:
    model = compiled()
    ahead = TraceAhead(model.train_function)
    for samples in (8, 4, 8):
        ahead.trace([batch(samples)])
        traces = model.traces
        model.train_function(iter([batch(samples)]))
        assert model.traces == traces


def test_a_function_that_will_not_be_traced_is_not_traced_ahead() -> None:
    model = compiled(run_eagerly=True)
    TraceAhead(model.train_function).trace([batch(8)])
    assert model.traces == 0


@pytest.mark.parametrize("late", [False, True])
def test_what_a_graph_uses_after_the_update(late: bool) -> None:
    weight = keras.Variable(np.ones(2, np.float32), name="kernel")
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([weight])
    inspection = GraphInspection(update_is_last=True)

    def step() -> Any:
        inspection.begin()
        assert inspection.update_begins(optimizer, [weight], [weight], frozenset())
        weight.value.assign_add(tf.ones(2))
        inspection.update_ends()
        result = tf.convert_to_tensor(optimizer.learning_rate)  # no update changes the learning rate
        if late:
            result += weight.value.read_value()[0]
        inspection.end()
        return result

    (found,) = inspection.inspect_trace(tf.function(step, autograph=False).get_concrete_function)
    assert found.trains([weight])
    assert found.used_after_update == (("kernel",) if late else ())
    assert found.must_update_at_once is late
    assert found.fit([weight]) is not late
