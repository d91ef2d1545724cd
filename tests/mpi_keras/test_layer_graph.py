"""The graph of a model's layer calls does what the model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvpipe.keras.layer_graph import LayerGraph, layer_graph


def run(graph: LayerGraph, inputs: list[Any], training: bool) -> list[Any]:
    """The outputs of the calls, one after the other."""
    values = dict(zip(graph.inputs, inputs, strict=True))
    for call in graph.calls:
        made = call(values, training)
        values |= {number: x for (number, _), x in zip(call.writes, made, strict=True)}
    return [values[number] for number in graph.outputs]


def dropout(**how: Any) -> keras.Model:
    x = keras.Input((500,))
    return keras.Model(x, keras.layers.Dropout(0.5)(x, **how))


def nested(**how: Any) -> keras.Model:
    x = keras.Input((500,))
    return keras.Model(x, keras.Sequential([keras.Input((500,)), keras.layers.Dropout(0.5)])(x, **how))


def normalized(**how: Any) -> keras.Model:
    x = keras.Input((500,))
    return keras.Model(x, keras.layers.BatchNormalization()(x, **how))


@pytest.mark.parametrize("how", [{}, {"training": False}, {"training": True}], ids=str)
@pytest.mark.parametrize("build", [dropout, nested, normalized])
def test_training_mode_is_that_of_the_model_as_in_keras(
    build: Callable[..., keras.Model], how: dict[str, bool]
) -> None:
    """Dropout once stayed off in training: Keras notes its default, training=False, with the call."""
    model = build(**how)
    x = tf.constant(np.random.default_rng(0).normal(3.0, 2.0, (8, 500)), tf.float32)
    graph = layer_graph(model)
    for training in (False, True):
        changed = [
            bool(np.abs(np.asarray(y) - x).max() > 0.1)
            for y in (model(x, training=training), *run(graph, [x], training))
        ]
        assert changed == [training, training]
