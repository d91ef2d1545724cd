"""What layers add to the loss by themselves, in the parts of a batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf


def added_losses(operation: Any) -> list[Any]:
    """What the call just made has added with `add_loss`."""
    if not isinstance(operation, keras.Layer):
        return []
    return [loss for layer in operation._flatten_layers() for loss in layer._losses]


@functools.cache
def _keras_divides_activities() -> bool:
    """Whether Keras divides an activity regularizer's loss by the samples; older versions do not."""
    with tf.init_scope():
        layer = keras.layers.Identity(activity_regularizer=keras.regularizers.L1(1.0), name="asked")
        layer(tf.ones((2, 1)))
        return float(layer.losses[0]) == 1.0


@contextlib.contextmanager
def scaled_activities(layers: Sequence[Any], share_of: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Where Keras takes the sum over samples of what activities cost, let a part's make up for its share."""
    if _keras_divides_activities():
        yield
        return
    given = {
        layer: layer.activity_regularizer
        for outer in layers
        for layer in outer._flatten_layers()
        if layer.activity_regularizer is not None
    }

    def scaled(regularizer: Any) -> Callable[[Any], Any]:
        def cost(output: Any) -> Any:
            loss = regularizer(output)
            return loss / share_of(output, loss.dtype) if output.shape.rank else loss

        return cost

    try:
        for layer, regularizer in given.items():
            layer.activity_regularizer = scaled(regularizer)
        yield
    finally:
        for layer, regularizer in given.items():
            layer.activity_regularizer = regularizer
