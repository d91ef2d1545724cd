"""Marks of a training step in the trace: its start, the end of its forward, and its updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvpipe.keras import ops
from hvpipe.keras.data_parallel.shards import with_first_tensor
from hvpipe.keras.gpu import on_the_host


class StepMarks:
    """Puts marks into a step's graph if the run is traced, and nothing otherwise.

    Grappler removes an op whose result nobody uses, so the marks end in an assignment to a variable.
    """

    def __init__(self, traced: bool) -> None:
        self.traced = traced
        if traced:
            with tf.init_scope():
                self._kept = tf.Variable(0.0, dtype=tf.float32, trainable=False, name="hvpipe_marks")

    def step_begins(self, data: Any) -> Any:
        """Return the batch; its first tensor passes through a mark."""
        if not self.traced:
            return data
        with on_the_host():
            return with_first_tensor(data, lambda tensor: ops.mark(tensor, "begin"))

    def forward_ends(self, loss: Any) -> Any:
        """Return the loss, passed through a mark."""
        if not self.traced:
            return loss
        loss = ops.mark(loss, "forward")
        # No gradient needs the loss's value, so without this use grappler would remove the mark.
        self._kept.assign(tf.cast(tf.reduce_sum(loss), tf.float32))
        return loss

    def updated(self, done: Any, bucket: str) -> Any:
        """Return `done` (float32 scalar), passed through the mark for the update of a bucket."""
        return ops.mark(done, f"update {bucket}") if self.traced else done

    def keep(self, marked: Sequence[Any]) -> None:
        """Use these marked scalars, so that grappler keeps their marks."""
        if self.traced and marked:
            self._kept.assign(tf.add_n(list(marked)))
