"""The losses that a pipeline is compiled with, as micro-batches that count by their samples need them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError

_MEANS = ("sum_over_batch_size", "mean")


class SumOfParts(keras.losses.Loss):
    """A loss that is a sum over the batch: a part that counts by n of N samples gives N / n times its sum.

    `samples` is the variable that holds N.
    """

    def __init__(self, loss: Any, samples: Any) -> None:
        super().__init__(name=loss.name, reduction="sum", dtype=loss.dtype)
        self._loss = loss
        self._samples = samples

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = self._loss(y_true, y_pred, sample_weight)
        return value * tf.cast(self._samples / tf.cast(tf.shape(y_pred)[0], tf.float32), value.dtype)


def by_parts(losses: Any, samples: Any) -> Any:
    """The losses that `compile` was given (any structure), for parts of a batch of `samples`.

    Raises HvpipeError for a reduction that parts of a batch cannot have by themselves.
    """
    return keras.tree.map_structure(lambda leaf: _by_parts(leaf, samples), losses)


def _by_parts(loss: Any, samples: Any) -> Any:
    reduction = getattr(loss, "reduction", "sum_over_batch_size")
    if reduction in _MEANS:
        return loss
    if reduction == "sum":
        return SumOfParts(loss, samples)
    raise HvpipeError(
        "A pipeline computes the loss of each micro-batch by itself, so the reduction of a loss should be "
        f"'sum_over_batch_size', 'mean' or 'sum'. Received: {loss.name} with reduction={reduction!r}"
    )
