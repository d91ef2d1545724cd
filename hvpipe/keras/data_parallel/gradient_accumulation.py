"""Gradient accumulation: micro-steps add up on each rank, and the last of them reduces and updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvpipe.keras.compat import gradient_accumulators, is_last_micro_step
from hvpipe.keras.data_parallel.overlap import Buckets
from hvpipe.keras.variables import check_not_overwritten, native


def accumulate(
    optimizer: Any,
    buckets: Buckets,
    gradients: Sequence[Any],
    samples: Any,
    reduce_and_update: Callable[[Sequence[Any], Any], None],
) -> None:
    """Add gradients up as Keras does: every `gradient_accumulation_steps`-th call updates with their mean.

    Each micro-step is weighted by its share of all ranks' samples before it is added. So the ranks' sums add
    up to the sum of one rank with the whole batch.

    Args:
        optimizer: One with `gradient_accumulation_steps`.
        buckets: Of the variables that have gradients. Their reducer announces every micro-step.
        gradients: This micro-step's, a dense tensor for each of these variables.
        samples: This rank's samples in the micro-step (scalar).
        reduce_and_update: Called with accumulated gradients and their factor, at the last micro-step.

    Raises:
        HvpipeError: For variables of float8 layers, whose gradients have no sum.
    """
    reducer, variables = buckets.reducer, buckets.reducer.variables
    check_not_overwritten(variables, "An optimizer with gradient_accumulation_steps")
    with tf.control_dependencies([samples]):
        boundary = is_last_micro_step(optimizer)
    share = reducer.announce(samples, reduces=boundary)
    weighted = [gradient * tf.cast(share, gradient.dtype) for gradient in gradients]
    accumulators = [native(accumulator) for accumulator in gradient_accumulators(optimizer, variables)]

    def at_boundary() -> Any:
        # `apply` unscales its gradients, but not the accumulators. It adds the two, so the accumulators must
        # be empty when the reduced sum comes back.
        unscale = optimizer.loss_scale_factor or 1.0
        totals = [g + a.read_value() * unscale for g, a in zip(weighted, accumulators, strict=True)]
        with tf.control_dependencies(totals):
            for accumulator in accumulators:
                accumulator.assign(tf.zeros_like(accumulator))
        reduce_and_update(totals, tf.constant(1.0, tf.float64))
        return tf.constant(0)

    def between() -> Any:
        buckets.update.apply_all(weighted)
        return tf.constant(0)

    tf.cond(boundary, at_boundary, between)
