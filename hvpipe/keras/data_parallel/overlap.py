"""The overlap modes: when each bucket of gradients is reduced, and when its variables are updated.

Pictures show two steps; time goes to the right. `reduce` runs in the engine, the rest in TensorFlow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.bucket_reduce import BucketReducer, order_after
from hvpipe.keras.data_parallel.bucket_update import BucketUpdate
from hvpipe.keras.data_parallel.local_rounds import LocalRounds, RoundOptions
from hvpipe.keras.gpu import on_the_host


@dataclass(frozen=True)
class Buckets:
    """The gradient buckets of one list of variables: they are reduced, then updated."""

    reducer: BucketReducer
    update: BucketUpdate

    def submit(self, gradients: Sequence[Any], share: Any, **options: Any) -> list[Any]:
        """Submit this step's gradients to be reduced; return a token for each bucket."""
        self.update.note_own(gradients)
        return self.reducer.submit(share, gradients, **options)

    def update_where_submitted(self, token: Any) -> list[Any]:
        """Collect and update all buckets if `token` (int64 scalar) is above 0. Return a scalar for each."""
        return self.update.update_where_submitted([token] * len(self.reducer.plan.buckets))


@dataclass(frozen=True)
class OverlapOptions:
    """What only some modes use.

    Args:
        warmup_steps: Steps at the start of "stale" that update with their own gradients, and steps before
            "int8" and "powersgd" compress.
        rounds: Of "local".
        counts_updates: Whether "step" counts complete updates, for elastic jobs. A GPU's host waits for that.
    """

    warmup_steps: int = 0
    rounds: RoundOptions = field(default_factory=RoundOptions)
    counts_updates: bool = False


class Overlap:
    """Says what starts when in a training step. One object serves one optimizer."""

    defers: ClassVar[bool] = False
    """Whether gradients may wait for the next step: `finish` must run before weights are read outside."""
    updates_in_next_step: ClassVar[bool] = False
    """Whether the update comes after the step's graph, which therefore must not use weights after `apply`."""
    in_turn: ClassVar[bool] = False
    """Whether buckets are reduced in the order of the plan instead of by urgency."""
    on_stream: ClassVar[bool] = False
    """Whether a step needs all sums before it goes on, so that a GPU may wait for them, not the host."""
    exact: ClassVar[bool] = True
    """Whether weights are, bit for bit, those of "none"."""
    reduces_gradients: ClassVar[bool] = True
    """Whether gradients are reduced. If not, each rank updates with its own, and weights differ."""
    rounds: LocalRounds | None = None
    """What is reduced between steps, if gradients are not."""

    def __init__(self, options: OverlapOptions = OverlapOptions()) -> None:
        self._options = options

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise HvpipeError if this mode cannot train with the optimizer."""

    def begin(self, buckets: Buckets, samples: Any) -> None:
        """Start a step's graph, before the forward. `samples` (scalar) is computed from the step's batch."""

    def reduce_and_update(self, buckets: Buckets, gradients: Sequence[Any], share: Any) -> None:
        """Reduce this step's gradients and update as the mode says.

        Args:
            buckets: The buckets of the variables that have gradients.
            gradients: One for each variable, from `BucketReducer.as_submitted`.
            share: The factor for this rank's gradients, from `BucketReducer.announce`.
        """
        raise NotImplementedError

    def finish(self, buckets: Buckets) -> None:
        """Run the updates that wait for the next step, eagerly."""

    def forget(self) -> None:
        """Forget the gradients that are under way, which are lost with a rank."""

    def updates(self) -> Any:
        """Return how many deferred updates are complete (scalar); None if none are deferred."""

    def hold(self, buckets: Buckets) -> list[Any]:
        """Finish as far as it changes no result; return the sums that the next step will update with.

        There are such sums where an update belongs to the next step. Collective then.
        """
        self.finish(buckets)
        return []

    def resume(self, buckets: Buckets, sums: Sequence[Any]) -> None:
        """Let the next step update with these sums, as `hold` returned them; collective if there are any."""


class NoOverlap(Overlap):
    """The linear baseline, "none": compute, reduce, update, one after the other.

    | forward | backward | reduce all | update all | forward | backward | reduce all | update all |
    """

    on_stream = True

    def reduce_and_update(self, buckets: Buckets, gradients: Sequence[Any], share: Any) -> None:
        # All of backward comes before anything is sent.
        tokens = buckets.submit(gradients, share, after=lambda _: gradients)
        buckets.update.update_all(tokens)


class BackwardOverlap(Overlap):
    """Reduce during backward, "backward": each bucket is submitted as soon as backward has computed it.

    | forward | backward ........| update | forward | backward ........| update |
                  reduce  reduce   reduce               reduce  reduce   reduce
    """

    on_stream = True

    def reduce_and_update(self, buckets: Buckets, gradients: Sequence[Any], share: Any) -> None:
        for done in buckets.update.update_submitted(buckets.submit(gradients, share)):
            order_after(done)


class _Deferring(Overlap):
    """A mode whose buckets may still be under way when the step's graph ends."""

    defers = True

    def __init__(self, options: OverlapOptions = OverlapOptions()) -> None:
        super().__init__(options)
        with tf.init_scope(), on_the_host():
            # From the last submits into the next step; 0: nothing waits to be collected.
            self._token = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvpipe_token")

    def finish(self, buckets: Buckets) -> None:
        token = self._token.read_value()
        buckets.update_where_submitted(token)
        with on_the_host():
            self._token.assign(tf.zeros_like(token))

    def forget(self) -> None:
        """Collect nothing in the next step."""
        self._token.assign(0)


class StepOverlap(_Deferring):
    """Also reduce during the next forward, "step": a step begins with the update of the one before.

    | update, forward | backward ........| update, forward | backward ........|
          reduce  reduce  reduce  reduce reduce    reduce  reduce  reduce  reduce

    TensorFlow orders by data flow, so a layer's forward waits for its own variables only. The weights equal
    those of "none" bit for bit.
    """

    updates_in_next_step = True

    def __init__(self, options: OverlapOptions = OverlapOptions()) -> None:
        super().__init__(options)
        self._finished: list[Any] = []  # a scalar for each bucket of this step's graph: its update is done
        with tf.init_scope(), on_the_host():
            self._updates = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvpipe_updates")

    def begin(self, buckets: Buckets, samples: Any) -> None:
        # Only if there is a batch: the call that reaches the end of the data runs the ops that need no data,
        # and may stop anywhere.
        with tf.control_dependencies([samples]):
            token = self._token.read_value()
        self._finished = buckets.update_where_submitted(token)
        # TensorFlow orders this after the read above, and before the assignment in `reduce_and_update`.
        with on_the_host():
            self._token.assign(tf.zeros_like(token))
            if self._options.counts_updates:
                with tf.control_dependencies(self._finished):
                    self._updates.assign_add(tf.cast(token > 0, tf.int64))

    def updates(self) -> Any:
        """Return how many steps' updates the steps after them have completed (scalar)."""
        return self._updates.read_value()

    def reduce_and_update(self, buckets: Buckets, gradients: Sequence[Any], share: Any) -> None:
        # A gradient may be ready before its bucket's update: a linear loss's gradient needs no weights.
        tokens = buckets.submit(gradients, share, after=lambda bucket: [self._finished[bucket]])
        with on_the_host():
            self._token.assign(tf.add_n(tokens))


class StaleOverlap(_Deferring):
    """Reduce during the whole next step, "stale": update with the gradients of the step before.

    | forward | backward | update t-1 | forward | backward | update t |
      reduce t-1 ........               reduce t ..........

    The results differ from "none" (Pipe-SGD: Li et al., NeurIPS 2018), except in the first `warmup_steps`
    steps, which update with their own gradients at once.
    """

    exact = False
    # The next step collects all of this step's buckets. Urgent ones would delay the previous step's buckets
    # and its update.
    in_turn = True

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

    def reduce_and_update(self, buckets: Buckets, gradients: Sequence[Any], share: Any) -> None:
        with tf.control_dependencies([share]):
            before = self._token.read_value()
        finished = buckets.update_where_submitted(before)
        tokens = buckets.submit(gradients, share, after=lambda bucket: [finished[bucket]])
        with on_the_host():
            token = tf.add_n(tokens)
            warming_up = buckets.reducer.step <= self._options.warmup_steps

        def finish_now() -> Any:
            with tf.control_dependencies(buckets.update_where_submitted(token)), on_the_host():
                return tf.zeros_like(token)

        self._token.assign(tf.cond(warming_up, finish_now, lambda: tf.identity(token)))

    def hold(self, buckets: Buckets) -> list[Any]:
        """Read the sums that the next step will update with, and give them back; collective."""
        if int(self._token.numpy()) == 0:
            return []
        tokens = [self._token.read_value()] * len(buckets.reducer.plan.buckets)
        sums = [tf.identity(total) for total in buckets.reducer.collect_all(tokens)]
        self.resume(buckets, sums)
        return sums

    def resume(self, buckets: Buckets, sums: Sequence[Any]) -> None:
        """Let the next step update with these sums; collective. Rank 0's count.

        They are reduced once more: the other ranks add -0.0, which changes no bit of any number.
        """
        if not sums:
            return
        first = buckets.reducer.rank == 0
        variables = buckets.reducer.variables
        mine = [_sum_of(v, total if first else None) for v, total in zip(variables, sums, strict=True)]
        buckets.reducer.announce(tf.constant(1.0, tf.float64))
        buckets.reducer.step.assign_sub(1)
        tokens = buckets.reducer.submit(tf.constant(1.0, tf.float64), mine)
        with on_the_host():
            self._token.assign(tf.add_n(tokens))


class LocalOverlap(Overlap):
    """Reduce once in a round of steps, "local": each rank updates with its own gradients.

    | step | step | step | step | correct | step | step | step | step | correct |
                          reduce ...................        reduce ..............

    The results differ from "none" (DaSGD: Zhou et al., 2020); local_rounds.py says what is reduced.

    Each rank's optimizer keeps its own state and its own `iterations`, which schedules follow. Nothing makes
    them equal: all ranks take the same number of steps, which `OptimizerHook.complete_round` checks. A step
    that only one rank skips, because its loss scale overflows, stays missing in that rank's `iterations`.
    """

    exact = reduces_gradients = False

    def __init__(self, options: OverlapOptions = OverlapOptions()) -> None:
        super().__init__(options)
        self.rounds = LocalRounds(options.rounds)

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise HvpipeError if the optimizer averages weights (use_ema): each rank would average its own."""
        if any(part.use_ema for part in parts_of(optimizer)):
            raise HvpipeError(
                'overlap="local" needs an optimizer without use_ema: each rank would average its own '
                f"weights. Received: an optimizer {optimizer.name} with use_ema=True"
            )


def parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizers inside a MultiOptimizer, or the optimizer itself, without its loss scale."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(getattr(inner, "optimizers", [inner]))


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
