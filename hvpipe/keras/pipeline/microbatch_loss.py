"""The compiled losses, for micro-batches: their weighted sum is the loss of the batch.

A step adds up the losses of the micro-batches, each weighted by its share of the batch's samples. For a mean
over all entries this gives the batch's loss. Sums, and means over unmasked entries, are scaled so that they
also add up to the batch's loss.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras import compat
from hvpipe.keras.pipeline.loss_entries import entries_of

_REDUCTIONS = ("sum_over_batch_size", "mean", "sum")
# Keras losses that return one number for a batch, whatever their reduction, unless an axis is given.
_WHOLE_BATCH_LOSSES = ("dice", "tversky", "circle")


class MicrobatchLoss(compat.CompileLoss):
    """The losses that a model is compiled with, for micro-batches.

    Attributes:
        samples: The variable that holds the batch's samples.
        entries: For losses that leave entries out, by the loss's index: a variable with the number of the
            batch's entries that count. Without one, a micro-batch's loss is divided by its own count.
    """

    _flat_losses: Any

    def __init__(self, compiled: compat.CompileLoss, samples: Any) -> None:
        """Take over the losses of `compiled`.

        Raises:
            HvpipeError: A loss has a reduction that micro-batches cannot compute separately, or compares the
                samples of a batch with each other.
        """
        losses = compat.user_losses(compiled)
        for loss in keras.tree.flatten(losses):
            _check_reduction(loss)
            _check_is_mean(loss)
        super().__init__(losses, compat.user_loss_weights(compiled), output_names=compiled.output_names)
        self.samples = samples
        self.entries: dict[int, Any] = {}

    def build(self, y_true: Any, y_pred: Any) -> None:
        super().build(y_true, y_pred)
        scaled = [_ScaledLoss(self, index, one.loss) for index, one in enumerate(self._flat_losses)]
        self._flat_losses = [
            one._replace(loss=loss) for one, loss in zip(self._flat_losses, scaled, strict=True)
        ]
        # Keras has a metric for each loss if there are several.
        if self._metrics:
            names = [metric.name for metric in self._metrics]
            self._metrics[:] = [
                _MeanOverBatches(name, loss) for name, loss in zip(names, scaled, strict=True)
            ]


class _ScaledLoss:
    """One loss of a micro-batch. `share` is the micro-batch's share of the samples in the latest call."""

    def __init__(self, whole: MicrobatchLoss, index: int, loss: Any) -> None:
        self._whole = whole
        self._index = index
        self._loss = loss
        self.share: Any = None

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = self._loss(y_true, y_pred, sample_weight)
        samples = tf.shape(keras.tree.flatten(y_true)[0])[0]  # outputs may have time in their first axis
        wide = tf.float64 if value.dtype == tf.float64 else tf.float32
        self.share = tf.cast(samples, wide) / tf.cast(self._whole.samples, wide)
        if getattr(self._loss, "reduction", None) == "sum":
            return value / tf.cast(self.share, value.dtype)
        entries = self._whole.entries.get(self._index)
        if entries is None:
            return value
        here = entries_of(self._loss, y_true, compat.get_keras_mask(y_pred))
        part = tf.math.divide_no_nan(tf.cast(here, wide), tf.cast(entries, wide))
        return value * tf.cast(part / self.share, value.dtype)


class _MeanOverBatches(keras.metrics.Mean):
    """The mean of a loss over batches, updated with the losses of micro-batches."""

    def __init__(self, name: str, loss: _ScaledLoss) -> None:
        super().__init__(name=name)
        self._loss = loss

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        super().update_state(values, self._loss.share)


def _check_reduction(loss: Any) -> None:
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    if reduction not in _REDUCTIONS:
        raise HvpipeError(
            "A pipeline computes the loss of each micro-batch separately, so the reduction of a loss should "
            f"be 'sum_over_batch_size', 'mean' or 'sum'. Received: {loss.name} with reduction={reduction!r}"
        )


def _check_is_mean(loss: Any) -> None:
    """Raise HvpipeError for the few losses of Keras that are not means over samples."""
    is_name = isinstance(loss, str) and loss.lower() in _WHOLE_BATCH_LOSSES
    found = keras.losses.get(loss) if is_name else loss
    function = getattr(found, "fn", found)
    name = getattr(function, "__name__", "")
    if function is not getattr(keras.losses, name, None) or name not in _WHOLE_BATCH_LOSSES:
        return
    axis = getattr(found, "axis", None)
    axes = (axis,) if isinstance(axis, int) else axis
    if name != "circle" and axes is not None and 0 not in axes:
        return
    why, received = (
        ("circle compares the samples of a batch with each other.", "")
        if name == "circle"
        else (f"For {name}, pass axis=(1, 2, 3), the axes of a sample.", f" with axis={axis}")
    )
    raise HvpipeError(
        "A pipeline computes the loss of each micro-batch separately, so it should be a mean over samples. "
        f"{why} Received: {name}{received}"
    )
