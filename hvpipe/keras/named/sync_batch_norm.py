"""BatchNormalization with the statistics of the whole batch: of all ranks together."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from hvpipe.keras.compat import layers_in, own_moments, replace_moments, restore_moments
from hvpipe.keras.named.ops import OPS, allreduce
from hvpipe.session import current


def moments_over_ranks(inputs: Any, axes: list[int], mask: Any = None) -> tuple[Any, Any]:
    """Return mean and variance of the inputs of all ranks, which may have batches of different sizes.

    Args:
        inputs: This rank's inputs, of a floating-point type.
        axes: The axes to reduce.
        mask: Which inputs count, with one axis less; None if all do.

    Returns:
        Mean and variance, with one number for each channel. Their gradients reach the inputs of all ranks.
    """
    if mask is None:
        counted = tf.ones_like(inputs)
    else:
        counted = tf.cast(tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(inputs)), inputs.dtype)
    count, total = _summed([tf.reduce_sum(counted, axes), tf.reduce_sum(inputs * counted, axes)], "sums")
    count = tf.maximum(count, 1)
    mean = total / count
    kept = tf.reshape(
        mean, [1 if axis in axes else tf.shape(inputs)[axis] for axis in range(inputs.shape.rank)]
    )
    # A second exchange, because the mean of squares minus the square of the mean loses digits.
    (squares,) = _summed([tf.reduce_sum(tf.square(inputs - kept) * counted, axes)], "squares")
    return mean, squares / count


def _summed(tensors: list[Any], name: str) -> list[Any]:
    return allreduce(tensors, OPS["sum"], (1.0, 1.0), 0, f"batch_norm.{name}")


@keras.saving.register_keras_serializable("hvpipe")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """BatchNormalization whose statistics in training are those of the batches of all ranks together.

    n ranks with a batch of b normalise as one rank does with a batch of n * b. It exchanges two small sums of
    each layer in the forward, and two in the backward. All ranks call the layers in the same order.

    Args:
        fused: False; Horovod has it.
        **options: Those of `keras.layers.BatchNormalization`, except `synchronized`.

    Raises:
        ValueError: For `fused=True`.

    Example:
        ```python
        x = hk.SyncBatchNormalization()(x)
        ```
    """

    def __init__(self, fused: bool = False, **options: Any) -> None:
        options.pop("synchronized", None)
        if fused:
            raise ValueError(f"SyncBatchNormalization cannot be fused. Received: fused={fused!r}")
        super().__init__(**options)

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()
        config.pop("synchronized", None)
        return config

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        return _synchronized_moments(self, inputs, mask)


def normalise_over_ranks(model: Any) -> None:
    """Let all BatchNormalization layers of a model use the statistics of all ranks' batches in training."""
    for layer in layers_in(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            replace_moments(layer, functools.partial(_synchronized_moments, layer))


def normalise_alone(model: Any) -> None:
    """Undo `normalise_over_ranks`."""
    for layer in layers_in(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            restore_moments(layer)


def _synchronized_moments(layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
    if current().world.size == 1:
        return own_moments(layer, inputs, mask)
    channel = layer.axis % len(inputs.shape)
    axes = [axis for axis in range(len(inputs.shape)) if axis != channel]
    return moments_over_ranks(inputs, axes, mask)
