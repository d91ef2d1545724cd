"""When hvpipe sends gradients: while backward still computes others, or after all of backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf

import hvpipe
from hvpipe.keras.data_parallel import backward_order
from hvpipe.keras.data_parallel.overlap_modes import OVERLAPS
from training import CLASSES, FEATURES, assert_same_bits, compiled, fit, my_batches, parallel, state_of


class Watch:
    """Records whether gradients were sent before backward ended. Waits up to `patience_s` for them."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.seen: list[bool] = []
        self.graph: Any = None  # the graph of the step
        self._sent = 0.0

    def forward(self) -> None:
        self._sent = hvpipe.counters()["bytes_sent"]

    def backward(self) -> None:
        end_s = time.monotonic() + self.patience_s
        while hvpipe.counters()["bytes_sent"] == self._sent and time.monotonic() < end_s:
            time.sleep(0.005)
        self.seen.append(hvpipe.counters()["bytes_sent"] > self._sent)


def beside(call: Callable[[], None], tensor: Any) -> Any:
    """Return the tensor after calling `call`. Only data dependencies order this op, as with hvpipe's ops."""

    def hand_on(value: Any) -> Any:
        call()
        return value

    found = tf.numpy_function(hand_on, [tensor], tensor.dtype, stateful=False)
    return tf.ensure_shape(found, tensor.shape)


class Watched(keras.layers.Layer):
    """Passes its inputs through. In backward, it passes the gradient on once the watch has finished."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def call(self, inputs: Any) -> Any:
        self.watch.graph = tf.compat.v1.get_default_graph()

        @tf.custom_gradient
        def watched(tensor: Any) -> Any:
            return beside(self.watch.forward, tensor), lambda upstream: beside(self.watch.backward, upstream)

        return watched(inputs)


def operations_of(graph: Any) -> list[str]:
    """Return the types of all operations of a step, including those in functions, given any of its graphs."""
    while getattr(graph, "outer_graph", None) is not None and hasattr(graph.outer_graph, "outer_graph"):
        graph = graph.outer_graph
    whole = graph.as_graph_def()
    nodes = [whole.node, *(function.node_def for function in whole.library.function)]
    return [node.op for among in nodes for node in among]


@pytest.mark.older_tensorflow
@pytest.mark.parametrize("overlap", [name for name, mode in OVERLAPS.items() if mode.reduces_gradients])
def test_gradients_are_sent_during_backward(overlap: str) -> None:
    """The last layer's gradients are sent before the first layer's exist.

    The step calls no Python for this.
    """
    if hvpipe.size() == 1:
        pytest.skip("nothing travels")
    overlapped = overlap != "none"
    watch = Watch(patience_s=60.0 if overlapped else 1.0)

    def build() -> keras.Model:
        layers = [keras.layers.Dense(8), Watched(watch), keras.layers.Dense(CLASSES)]
        return keras.Sequential([keras.Input((FEATURES,)), *layers])

    model = parallel(compiled(build), overlap)  # kept alive: its graphs hold weak references to each other
    fit(model, my_batches(1))
    assert watch.seen == [overlapped]
    operations = operations_of(watch.graph)
    assert {"HvpipeBeginStep", "HvpipeSubmit", "HvpipeCollect"} <= set(operations)
    # Both come from this test.
    assert [kind for kind in operations if "PyFunc" in kind] == ["PyFuncStateless"] * 2


def needs(gradient: Any, other: Any) -> bool:
    """Return whether the operation of a gradient comes after that of the other."""
    seen, left = set(), [gradient.op]
    while left:
        operation = left.pop()
        if operation not in seen:
            seen.add(operation)
            left += [*(each.op for each in operation.inputs), *operation.control_inputs]
    return other.op in seen


def test_on_one_thread_backward_waits_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: no bucket was sent before backward had nearly ended."""

    def gradients(threads: int) -> Sequence[Any]:
        monkeypatch.setattr(backward_order, "threads", lambda: threads)
        with tf.Graph().as_default(), tf.GradientTape() as tape:
            kernels, x = [tf.ones((3, 3)) for _ in range(4)], tf.ones((2, 3))
            tape.watch(kernels)
            for kernel in kernels:
                x = tf.nn.relu(x @ kernel)
            found = tape.gradient(x, kernels)
            backward_order.order_backward([[each] for each in found])
        return found[::-1]

    last, third, second, _first = gradients(threads=1)
    assert needs(third, last)
    assert needs(second, third)
    last, third, second, _first = gradients(threads=2)
    assert not needs(third, last)
    assert not needs(second, third)


def convolutions() -> keras.Model:
    """Build what TensorFlow merges in backward: kernels with biases, batch norms with activations."""
    x = inputs = keras.Input((FEATURES,))
    x = keras.layers.Reshape((FEATURES, 1, 1))(x)
    for _ in range(3):
        y = keras.layers.Conv2D(4, (3, 1), padding="same")(x)
        y = keras.layers.Activation("relu")(keras.layers.BatchNormalization()(y))
        x = keras.layers.Add()([x, y])
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.Flatten()(x)))


@pytest.mark.older_tensorflow
def test_that_order_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with a kernel and its bias in two buckets, the graph had a cycle once they were merged."""
    states = []
    for overlap, threads in (("none", 2), ("backward", 1), ("step", 1)):
        monkeypatch.setattr(backward_order, "threads", lambda threads=threads: threads)
        model = parallel(compiled(convolutions), overlap, bucket_bytes=100)
        fit(model, my_batches(4))
        states.append(state_of(model))
    for state in states[1:]:
        assert_same_bits(states[0], state)
