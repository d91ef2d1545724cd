"""The losses that a pipeline is compiled with, for the parts of a batch.

A step adds up the losses of a batch's parts, each weighted by its samples. Of a mean over all entries that
gives the batch's. A sum, and a mean over what masks leave, are scaled so that it does for them too.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask
from keras.src.trainers.compile_utils import CompileLoss

from hvpipe.errors import HvpipeError
from hvpipe.keras.pipeline.loss_entries import entries_of

_REDUCTIONS = ("sum_over_batch_size", "mean", "sum")
# Functions of Keras's that make one number of a batch (unless an axis says otherwise).
_OF_A_BATCH = ("dice", "tversky", "circle")


class LossOfParts(CompileLoss):
    """What a model is compiled with, `compiled`, for parts of a batch.

    `samples` is the variable that holds the batch's samples. `entries` are those that hold how many of its
    entries count in a loss, by the loss's place, for losses that leave some out; where there is none, a part
    takes its own for typical. Raises HvpipeError for a reduction that parts cannot have by themselves, and
    for losses of Keras's that compare a batch's samples with each other.
    """

    _flat_losses: Any

    def __init__(self, compiled: CompileLoss, samples: Any) -> None:
        for loss in keras.tree.flatten(compiled._user_loss):
            _check_reduction(loss)
            _check_is_mean(loss)
        super().__init__(compiled._user_loss, compiled._user_loss_weights, output_names=compiled.output_names)
        self.samples = samples
        self.entries: dict[int, Any] = {}

    def build(self, y_true: Any, y_pred: Any) -> None:
        super().build(y_true, y_pred)
        parts = [_LossOfPart(self, place, one.loss) for place, one in enumerate(self._flat_losses)]
        self._flat_losses = [
            one._replace(loss=part) for one, part in zip(self._flat_losses, parts, strict=True)
        ]
        # Keras tracks each where there are several.
        if self._metrics:
            names = [metric.name for metric in self._metrics]
            self._metrics[:] = [_MeanOfParts(name, part) for name, part in zip(names, parts, strict=True)]


class _LossOfPart:
    """One loss of a part. `share` is the part's, of the batch's samples, when it was last called."""

    def __init__(self, whole: LossOfParts, place: int, loss: Any) -> None:
        self._whole = whole
        self._place = place
        self._loss = loss
        self.share: Any = None

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = self._loss(y_true, y_pred, sample_weight)
        samples = tf.shape(keras.tree.flatten(y_pred)[0])[0]
        wide = tf.float64 if value.dtype == tf.float64 else tf.float32
        self.share = tf.cast(samples, wide) / tf.cast(self._whole.samples, wide)
        if getattr(self._loss, "reduction", None) == "sum":
            return value / tf.cast(self.share, value.dtype)
        entries = self._whole.entries.get(self._place)
        if entries is None:
            return value
        here = entries_of(self._loss, y_true, get_keras_mask(y_pred))
        part = tf.math.divide_no_nan(tf.cast(here, wide), tf.cast(entries, wide))
        return value * tf.cast(part / self.share, value.dtype)


class _MeanOfParts(keras.metrics.Mean):
    """The mean of a loss over batches, of which it is given parts."""

    def __init__(self, name: str, part: _LossOfPart) -> None:
        super().__init__(name=name)
        self._part = part

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        super().update_state(values, self._part.share)


def _check_reduction(loss: Any) -> None:
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    if reduction not in _REDUCTIONS:
        raise HvpipeError(
            "A pipeline computes the loss of each micro-batch by itself, so the reduction of a loss should "
            f"be 'sum_over_batch_size', 'mean' or 'sum'. Received: {loss.name} with reduction={reduction!r}"
        )


def _check_is_mean(loss: Any) -> None:
    """Of Keras's losses a few are no means over samples, whatever their reduction says."""
    found = keras.losses.get(loss) if isinstance(loss, str) and loss.lower() in _OF_A_BATCH else loss
    function = getattr(found, "fn", found)
    name = getattr(function, "__name__", "")
    if function is not getattr(keras.losses, name, None) or name not in _OF_A_BATCH:
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
        "A pipeline computes the loss of each micro-batch by itself, so it should be a mean over samples. "
        f"{why} Received: {name}{received}"
    )
