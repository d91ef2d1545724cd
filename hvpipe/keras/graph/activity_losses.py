"""Losses that layers add to a model (`add_loss`, activity regularizers), scaled for micro-batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.keras import compat


def may_add_losses(layers: Sequence[Any]) -> bool:
    """Return whether any layer may add a loss: it has an activity regularizer, or is a custom layer."""
    return any(
        getattr(layer, "activity_regularizer", None) is not None
        or not type(layer).__module__.startswith("keras.")
        for outer in layers
        for layer in compat.layers_in(outer)
    )


def added_losses(operation: Any) -> list[Any]:
    """Return the losses that the latest call of a layer has added with `add_loss`."""
    if not isinstance(operation, keras.Layer):
        return []
    return [loss for layer in compat.layers_in(operation) for loss in compat.own_added_losses(layer)]


@functools.cache
def _keras_divides_activities() -> bool:
    """Return whether Keras divides an activity regularizer's loss by the samples; older versions do not."""
    with tf.init_scope():
        layer = keras.layers.Identity(activity_regularizer=keras.regularizers.L1(1.0), name="asked")
        layer(tf.ones((2, 1)))
        return float(layer.losses[0]) == 1.0


@contextlib.contextmanager
def scaled_activities(layers: Sequence[Any], share_of: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Scale activity regularizers, if Keras sums their losses over samples instead of averaging.

    Args:
        layers: The layers to change while the context is open.
        share_of: Returns a tensor's share of the batch's samples, in a dtype.
    """
    if _keras_divides_activities():
        yield
        return
    given = {
        layer: layer.activity_regularizer
        for outer in layers
        for layer in compat.layers_in(outer)
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
