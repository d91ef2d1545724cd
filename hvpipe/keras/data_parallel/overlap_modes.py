"""The overlap modes: when each bucket of gradients is reduced, and when its variables are updated.

Pictures show two steps; time goes to the right. `reduce` runs in the engine, the rest in TensorFlow. The mode
"local" is in local_rounds.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.bucket_reduce import ReduceOptions, order_after
from hvpipe.keras.data_parallel.local_rounds import LocalOverlap
from hvpipe.keras.data_parallel.overlap import Overlap, OverlapOptions
from hvpipe.keras.data_parallel.step_findings import GraphInspection, StepFindings
from hvpipe.keras.gpu import on_the_host


class NoOverlap(Overlap):
    """The linear baseline, "none": compute, reduce, update, one after the other.

    | forward | backward | reduce all | update all | forward | backward | reduce all | update all |
    """

    def reduce_options(self, options: ReduceOptions) -> ReduceOptions:
        return replace(options, on_stream=True)

    def reduce_and_update(self, gradients: Sequence[Any], share: Any) -> None:
        # All of backward comes before anything is sent.
        tokens = self.buckets.submit(gradients, share, after=lambda _: gradients)
        self.buckets.update.update_all(tokens)


class BackwardOverlap(Overlap):
    """Reduce during backward, "backward": each bucket is submitted as soon as backward has computed it.

    | forward | backward ........| update | forward | backward ........| update |
                  reduce  reduce   reduce               reduce  reduce   reduce
    """

    def reduce_options(self, options: ReduceOptions) -> ReduceOptions:
        return replace(options, on_stream=True)

    def reduce_and_update(self, gradients: Sequence[Any], share: Any) -> None:
        for done in self.buckets.update.update_submitted(self.buckets.submit(gradients, share)):
            order_after(done)


class _Deferring(Overlap):
    """A mode whose buckets may still be under way when the step's graph ends. It needs a plan beforehand."""

    defers = True
    to_readers = (
        "hvpipe: callback %s may read weights between steps, so every step is finished before it runs, and "
        "the overlap with the next step is lost. Set reads_weights = False on it if it neither reads weights "
        "nor changes the optimizer."
    )

    def __init__(self, options: OverlapOptions) -> None:
        super().__init__(options)
        self._applied = False  # in this step
        self._inspection = GraphInspection(self.update_is_last)
        with tf.init_scope(), on_the_host():
            # From the last submits into the next step; 0: nothing waits to be collected.
            self._token = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvpipe_token")

    def begin(self, samples: Any) -> None:
        self._applied = False
        self._inspection.begin()

    def apply(
        self, gradients: Sequence[Any], variables: Sequence[Any], reduce_and_update: Callable[[], None]
    ) -> None:
        if self._applied:
            raise HvpipeError(
                "This overlap allows one call of the optimizer in train_step; with several, use "
                'overlap="backward". Received: a second call in one step'
            )
        self._applied = True
        if tf.executing_eagerly():
            reduce_and_update()
            return
        trained = [v for g, v in zip(gradients, variables, strict=True) if g is not None]
        dense_tables = self.reducer.dense_tables(gradients, variables)
        # `begin` has started this graph with a plan. If the plan does not fit, the graph is only inspected.
        if self._inspection.update_begins(
            self.buckets.update.optimizer, self.reducer.variables, trained, dense_tables
        ):
            reduce_and_update()
        self._inspection.update_ends()

    def end(self) -> None:
        self._inspection.end()

    def inspect_trace(self, trace: Callable[[], None]) -> list[StepFindings]:
        return self._inspection.inspect_trace(trace)

    def ran(self) -> None:
        self.waits = True

    def finish(self) -> None:
        if not self.waits:
            return
        self.waits = False
        token = self._token.read_value()
        self.buckets.update.update_where_submitted(token)
        with on_the_host():
            self._token.assign(tf.zeros_like(token))

    def forget(self) -> None:
        """Collect nothing in the next step."""
        self.waits = False
        self._token.assign(0)


class StepOverlap(_Deferring):
    """Also reduce during the next forward, "step": a step begins with the update of the one before.

    | update, forward | backward ........| update, forward | backward ........|
          reduce  reduce  reduce  reduce reduce    reduce  reduce  reduce  reduce

    TensorFlow orders by data flow, so a layer's forward waits for its own variables only. The weights equal
    those of "none" bit for bit.
    """

    update_is_last = True

    def __init__(self, options: OverlapOptions) -> None:
        super().__init__(options)
        self._finished: list[Any] = []  # a scalar for each bucket of this step's graph: its update is done
        with tf.init_scope(), on_the_host():
            self._updates = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvpipe_updates")

    @classmethod
    def within_step(cls) -> type[Overlap]:
        return BackwardOverlap

    @property
    def updates_piecewise(self) -> bool:
        return True  # Elastic keeps what the update changes

    def begin(self, samples: Any) -> None:
        super().begin(samples)
        # Only if there is a batch: the call that reaches the end of the data runs the ops that need no data,
        # and may stop anywhere.
        with tf.control_dependencies([samples]):
            token = self._token.read_value()
        self._finished = self.buckets.update.update_where_submitted(token)
        # TensorFlow orders this after the read above, and before the assignment in `reduce_and_update`.
        with on_the_host():
            self._token.assign(tf.zeros_like(token))
            if self._options.elastic:  # only then: a GPU's host waits for this count
                with tf.control_dependencies(self._finished):
                    self._updates.assign_add(tf.cast(token > 0, tf.int64))

    def completed_updates(self) -> Any:
        """Return how many steps' updates the steps after them have completed (scalar)."""
        return self._updates.read_value()

    def reduce_and_update(self, gradients: Sequence[Any], share: Any) -> None:
        # A gradient may be ready before its bucket's update: a linear loss's gradient needs no weights.
        tokens = self.buckets.submit(gradients, share, after=lambda bucket: [self._finished[bucket]])
        with on_the_host():
            self._token.assign(tf.add_n(tokens))


class StaleOverlap(_Deferring):
    """Reduce during the whole next step, "stale": update with the gradients of the step before.

    | forward | backward | update t-1 | forward | backward | update t |
      reduce t-1 ........               reduce t ..........

    The results differ from "none" (Pipe-SGD: Li et al., NeurIPS 2018), except in the first `warmup_steps`
    steps, which update with their own gradients at once.
    """

    exact = compresses = False

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise HvpipeError for gradient accumulation and for a LossScaleOptimizer."""
        if optimizer.gradient_accumulation_steps:
            raise HvpipeError(
                'overlap="stale" needs an update at every step: use another overlap with accumulation. '
                "Received: an optimizer with "
                f"gradient_accumulation_steps={optimizer.gradient_accumulation_steps}"
            )
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise HvpipeError(
                'overlap="stale" needs unscaled gradients: it would unscale the gradients of one step by the '
                "scale of the next. Use another overlap, or the policy mixed_bfloat16. "
                f"Received: optimizer {optimizer.name}, a LossScaleOptimizer"
            )

    def reduce_options(self, options: ReduceOptions) -> ReduceOptions:
        # The next step collects all of this step's buckets. Urgent ones would delay the previous step's
        # buckets and its update.
        return replace(options, in_turn=True)

    def reduce_and_update(self, gradients: Sequence[Any], share: Any) -> None:
        update = self.buckets.update
        with tf.control_dependencies([share]):
            before = self._token.read_value()
        finished = update.update_where_submitted(before)
        tokens = self.buckets.submit(gradients, share, after=lambda bucket: [finished[bucket]])
        with on_the_host():
            token = tf.add_n(tokens)
            warming_up = self.reducer.step <= self._options.warmup_steps

        def finish_now() -> Any:
            with tf.control_dependencies(update.update_where_submitted(token)), on_the_host():
                return tf.zeros_like(token)

        self._token.assign(tf.cond(warming_up, finish_now, lambda: tf.identity(token)))

    def hold(self) -> list[Any]:
        """Read the sums that the next step will update with, and give them back; collective."""
        if not self.waits or int(self._token.numpy()) == 0:  # 0: a step of the warm-up
            self.waits = False
            return []
        tokens = [self._token.read_value()] * len(self.reducer.plan.buckets)
        sums = [tf.identity(total) for total in self.reducer.collect_all(tokens)]
        self._submit_again(sums)
        return sums

    def resume(self, steps: int, sums: Sequence[Any]) -> None:
        """Continue after this many steps, and update with these sums in the next one; collective."""
        super().resume(steps, sums)
        if sums:
            self._submit_again(sums)
            self.waits = True

    def _submit_again(self, sums: Sequence[Any]) -> None:
        """Let the next step update with these sums. Rank 0's count; collective.

        They are reduced once more: the other ranks add -0.0, which changes no bit of any number.
        """
        reducer = self.reducer
        first = reducer.rank == 0
        mine = [
            _sum_of(v, total if first else None) for v, total in zip(reducer.variables, sums, strict=True)
        ]
        reducer.announce(tf.constant(1.0, tf.float64))
        reducer.step.assign_sub(1)
        tokens = reducer.submit(tf.constant(1.0, tf.float64), mine)
        with on_the_host():
            self._token.assign(tf.add_n(tokens))


def _sum_of(variable: Any, total: Any) -> Any:
    """Return a saved sum in its variable's type, or -0.0 everywhere."""
    dtype = tf.as_dtype(variable.dtype)
    if total is None:
        return tf.fill(variable.shape, tf.cast(-0.0, dtype))
    found = tf.convert_to_tensor(total)
    return tf.bitcast(found, dtype) if found.dtype.is_integer else found


OVERLAPS: dict[str, type[Overlap]] = {
    "none": NoOverlap,
    "backward": BackwardOverlap,
    "step": StepOverlap,
    "stale": StaleOverlap,
    "local": LocalOverlap,
}
"""The modes by the name that users give."""


def overlap_named(name: str) -> type[Overlap]:
    """Return the mode with this name. Raises HvpipeError if the name is unknown."""
    if name not in OVERLAPS:
        wanted = ", ".join(map(repr, OVERLAPS))
        raise HvpipeError(f"overlap should be one of {wanted}. Received: overlap={name!r}")
    return OVERLAPS[name]
