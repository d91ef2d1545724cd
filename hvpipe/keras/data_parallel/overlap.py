"""The overlap modes: when each bucket of gradients is reduced, and when its variables are updated.

Pictures show two steps; time goes to the right. `reduce` runs in the engine, the rest in TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import learning_rate_variable
from hvpipe.keras.data_parallel.bucket_reduce import BucketReducer, ReduceOptions, order_after
from hvpipe.keras.data_parallel.bucket_update import BucketUpdate
from hvpipe.keras.data_parallel.local_rounds import (
    LocalRounds,
    RoundOptions,
    Rounds,
    check_local,
    check_no_rounds,
    round_options,
)
from hvpipe.keras.data_parallel.step_findings import GraphInspection, StepFindings
from hvpipe.keras.gpu import on_the_host
from hvpipe.keras.initial_state import shared_slots


@dataclass(frozen=True)
class Buckets:
    """The gradient buckets of one list of variables: they are reduced, then updated."""

    reducer: BucketReducer
    update: BucketUpdate

    def submit(self, gradients: Sequence[Any], share: Any, **options: Any) -> list[Any]:
        """Submit this step's gradients to be reduced; return a token for each bucket."""
        self.update.note_own(gradients)
        return self.reducer.submit(share, gradients, **options)


@dataclass(frozen=True)
class OverlapOptions:
    """What only some modes use.

    Args:
        warmup_steps: Steps at the start of "stale" that update with their own gradients, and steps before
            "int8" and "powersgd" compress.
        rounds: Of "local".
        elastic: Whether ranks may be lost, so that no update may be left half applied.
    """

    warmup_steps: int = 0
    rounds: RoundOptions = field(default_factory=RoundOptions)
    elastic: bool = False


class Overlap:
    """Says what starts when in a training step. One object serves one hook in an optimizer."""

    exact: ClassVar[bool] = True
    """Whether weights are, bit for bit, those of "none"."""
    reduces_gradients: ClassVar[bool] = True
    """Whether gradients are reduced. If not, each rank updates with its own, and weights differ."""
    defers: ClassVar[bool] = False
    """Whether an update may wait for the next step."""
    to_readers: ClassVar[str] = ""
    """What to tell of callbacks (%s) that may read weights at batches."""

    buckets: Buckets
    """What is reduced and updated; set by `attach`."""

    def __init__(self, options: OverlapOptions = OverlapOptions()) -> None:
        self._options = options
        self.rounds = Rounds()
        """What is reduced between steps."""
        self.waits = False
        """Whether an update waits for the next step: `finish` must run before weights are read outside."""

    @property
    def reducer(self) -> BucketReducer:
        """What reduces the buckets."""
        return self.buckets.reducer

    # --- What the mode can be used for ------------------------------------------------------------------

    @classmethod
    def rounds_from(
        cls, name: str, every: int | None, learning_rate: float, momentum: float, warmup_steps: int
    ) -> RoundOptions:
        """Return the rounds that were asked for. Raises HvpipeError for wrong arguments."""
        check_no_rounds(name, every, learning_rate, momentum)
        return RoundOptions()

    @classmethod
    def check_options(cls, nonfinite: str, verify_every: int, sync_batch_norm: bool) -> None:
        """Raise HvpipeError for options that this mode rules out."""

    @classmethod
    def check_train_on_batch(cls) -> None:
        """Raise HvpipeError if this mode needs `fit`."""

    @classmethod
    def within_step(cls) -> type[Overlap]:
        """Return the mode with the same results that updates within the graph of the step."""
        return cls

    @classmethod
    def equal_slots(cls, optimizer: Any) -> list[Any]:
        """Return the optimizer's variables that are equal on all ranks."""
        return shared_slots(optimizer)

    @classmethod
    def own_weights(cls, model: Any) -> list[Any]:
        """Return the trainable weights that may differ between ranks at the end of a step."""
        return []

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise HvpipeError if this mode cannot train with the optimizer."""

    def reduce_options(self, options: ReduceOptions) -> ReduceOptions:
        """Return how this mode cuts and sends gradients."""
        return options

    @property
    def updates_piecewise(self) -> bool:
        """Whether a step may update one bucket after the other. If a rank is lost, some are left out."""
        return not self._options.elastic

    def attach(self, buckets: Buckets) -> None:
        """Reduce and update these buckets from now on."""
        self.buckets = buckets

    # --- In the graph of a step ---------------------------------------------------------------------------

    def begin(self, samples: Any) -> None:
        """Start a step's graph, before the forward. `samples` (scalar) is computed from the step's batch."""

    def apply(
        self, gradients: Sequence[Any], variables: Sequence[Any], reduce_and_update: Callable[[], None]
    ) -> None:
        """Take the gradients of a call of the optimizer.

        Args:
            gradients: A gradient or None for each variable.
            variables: The variables.
            reduce_and_update: Puts the gradients in the order of the plan, and calls the method below.
        """
        reduce_and_update()

    def reduce_and_update(self, gradients: Sequence[Any], share: Any) -> None:
        """Reduce this step's gradients and update as the mode says.

        Args:
            gradients: One for each variable of the buckets, from `BucketReducer.as_submitted`.
            share: The factor for this rank's gradients, from `BucketReducer.announce`.
        """
        raise NotImplementedError

    def end(self) -> None:
        """End a step's graph. Raises HvpipeError if it does not fit the plan, unless it is only inspected."""

    def inspect_trace(self, trace: Callable[[], None]) -> list[StepFindings]:
        """Call `trace`, which traces steps without running them; return the findings about each step's graph.

        Return an empty list if the mode needs no plan beforehand, or if nothing was traced. If a graph's
        findings do not fit, it must not run, because it lacks the update.
        """
        return []

    # --- Between steps ------------------------------------------------------------------------------------

    def ran(self) -> None:
        """Note that a step has run."""

    def finish(self) -> None:
        """Run the update that waits for the next step, eagerly. Weights are then as after the last step."""

    @property
    def owes_update(self) -> bool:
        """Whether the update of the last step waits, and would change if the optimizer did."""
        return False

    def hold(self) -> list[Any]:
        """Return the sums that wait because they belong to the next step; collective if there may be any."""
        return []

    def resume(self, steps: int, sums: Sequence[Any]) -> None:
        """Continue after this many steps, with the sums that `hold` returned; collective if there are any."""
        self.reducer.step.assign(steps)

    def forget(self) -> None:
        """Forget the gradients that are under way, which are lost with a rank."""

    def completed_updates(self) -> Any:
        """Return how many deferred updates are complete (scalar); None if none are deferred."""


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
    update_is_last: ClassVar[bool]
    """Whether the update comes after the step's graph, which therefore must not use weights after `apply`."""

    def __init__(self, options: OverlapOptions = OverlapOptions()) -> None:
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

    def __init__(self, options: OverlapOptions = OverlapOptions()) -> None:
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

    @property
    def owes_update(self) -> bool:
        return self.waits

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

    exact = False
    update_is_last = False

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
        if not self.waits or int(self._token.numpy()) == 0:
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


class LocalOverlap(Overlap):
    """Reduce once in a round of steps, "local": each rank updates with its own gradients.

    | step | step | step | step | correct | step | step | step | step | correct |
                          reduce ...................        reduce ..............

    The results differ from "none" (DaSGD: Zhou et al., 2020); local_rounds.py says what is reduced.

    Each rank's optimizer keeps its own state and its own `iterations`, which schedules follow. Nothing makes
    them equal: all ranks take the same number of steps, which `LocalRounds.complete` checks. A step that only
    one rank skips, because its loss scale overflows, stays missing in that rank's `iterations`.
    """

    exact = reduces_gradients = False
    to_readers = (
        'hvpipe: callback %s may read weights between steps. With overlap="local" these are the rank\'s own, '
        "and the model's methods refuse to read them within a round. Set reads_weights = False on it if it "
        "reads none."
    )

    @classmethod
    def rounds_from(
        cls, name: str, every: int | None, learning_rate: float, momentum: float, warmup_steps: int
    ) -> RoundOptions:
        return round_options(every, learning_rate, momentum, warmup_steps)

    @classmethod
    def check_options(cls, nonfinite: str, verify_every: int, sync_batch_norm: bool) -> None:
        check_local(nonfinite, verify_every, sync_batch_norm)

    @classmethod
    def check_train_on_batch(cls) -> None:
        raise HvpipeError(
            'overlap="local" needs fit: train_on_batch averages logs over ranks at every call. '
            "Received: a call of train_on_batch"
        )

    @classmethod
    def equal_slots(cls, optimizer: Any) -> list[Any]:
        rate = learning_rate_variable(getattr(optimizer, "inner_optimizer", optimizer))
        return [v for v in optimizer.variables if v is rate]

    @classmethod
    def own_weights(cls, model: Any) -> list[Any]:
        return list(model.trainable_variables)

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise HvpipeError if the optimizer averages weights (use_ema): each rank would average its own."""
        if any(part.use_ema for part in parts_of(optimizer)):
            raise HvpipeError(
                'overlap="local" needs an optimizer without use_ema: each rank would average its own '
                f"weights. Received: an optimizer {optimizer.name} with use_ema=True"
            )

    def reduce_options(self, options: ReduceOptions) -> ReduceOptions:
        return replace(options, slices=False)  # differences of weights are dense

    def attach(self, buckets: Buckets) -> None:
        super().attach(buckets)
        self.rounds = LocalRounds(self._options.rounds, buckets.reducer)

    def apply(
        self, gradients: Sequence[Any], variables: Sequence[Any], reduce_and_update: Callable[[], None]
    ) -> None:
        optimizer = self.buckets.update.optimizer
        type(optimizer).apply(optimizer, gradients, variables)


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
