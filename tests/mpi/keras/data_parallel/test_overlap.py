"""When hvpipe sends gradients: while backward still computes others, or after all of backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

import hvpipe
from hvpipe.keras.data_parallel.overlap import OVERLAPS
from training import CLASSES, FEATURES, compiled, fit, my_batches, parallel


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
