"""Update: an optimizer applies reduced gradients by bucket, or all at once if the bits would differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.keras.compat import (
    METHODS_ONCE_PER_STEP,
    step_count,
    trained_variables,
    update_variables,
)
from hvpipe.keras.data_parallel.bucket_reduce import BucketReducer
from hvpipe.keras.data_parallel.nonfinite import NonfiniteGuard
from hvpipe.keras.data_parallel.same_bits import graph_optimizer_off, kept_whole
from hvpipe.keras.data_parallel.step_marks import StepMarks
from hvpipe.keras.gpu import on_the_host
from hvpipe.keras.variables import identity, native
from hvpipe.plan.buckets import Bucket

_ALL = -1  # in place of the number of a bucket


class BucketUpdate:
    """Collects the gradients that a `reducer` has reduced, and updates its variables with an optimizer."""

    def __init__(
        self,
        optimizer: Any,
        reducer: BucketReducer,
        by_bucket: bool,
        marks: StepMarks,
        guard: NonfiniteGuard | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._reducer = reducer
        self._guard = guard
        self._by_bucket = by_bucket and not (guard is not None and guard.waits_for_all)
        self._marks = marks
        self._functions: dict[int, Any] = {}  # of one bucket each by its number, and of all (_ALL)

    def note_own(self, gradients: Sequence[Any]) -> None:
        """Let the guard, if there is one, note whether NaN or Inf comes from this rank's gradients."""
        if self._guard is not None:
            self._guard.note_own(gradients)

    def update_where_submitted(self, token: Any) -> list[Any]:
        """Collect and update all buckets if `token` (int64 scalar) is above 0.

        Each bucket's update is a separate branch in the graph, so a layer's forward waits only for its own
        variables.

        Returns:
            A scalar for each bucket. It is computed once the bucket's update is done or skipped.
        """
        tokens = [token] * len(self._reducer.plan.buckets)
        return self._update_each(tokens, _where_submitted, lambda number: ())

    def update_submitted(self, tokens: Sequence[Any]) -> list[Any]:
        """Collect and update each bucket of this step, and return as `update_where_submitted`.

        No token goes from a GPU to the host: that would wait for the backward, and keep all later operations.
        """
        after = functools.partial(self._reducer.collected_after, tokens=tokens)
        return self._update_each(tokens, lambda token, update: update(), after)

    def _update_each(
        self,
        tokens: Sequence[Any],
        run: Callable[[Any, Callable[[], Any]], Any],
        after: Callable[[int], Sequence[Any]],
    ) -> list[Any]:
        """Collect and update each bucket, or all at once; return a scalar for each bucket.

        Args:
            tokens: A token for each bucket.
            run: Called with a token and an update, which it runs or skips.
            after: `after(bucket)` returns the tensors that the collect of this bucket waits for.
        """
        plan = self._reducer.plan
        done: list[Any] = [None] * len(plan.buckets)
        if not self._by_bucket:
            with tf.control_dependencies(tokens):
                together = functools.partial(self._collect_and_update_all, tokens)
                done = [run(tokens[0], together)] * len(done)
            self._marks.keep(done[:1])
            return done
        for number, bucket in plan.by_need():
            update = functools.partial(self._collect_and_update, number, bucket, tokens[number])
            with tf.control_dependencies(after(number)):
                done[number] = run(tokens[number], update)
        with tf.control_dependencies(tokens):
            run(tokens[0], self._count_step)
        self._marks.keep(done)
        return done

    def update_all(self, tokens: Sequence[Any]) -> None:
        """Update all variables after all gradients are reduced."""
        variables = self._reducer.variables
        with tf.control_dependencies(tokens):
            reduced = self._reducer.collect_all(tokens)
        with tf.control_dependencies(reduced):
            self._if_finite(_ALL, variables, [tf.identity(g) for g in reduced])
        if self._marks.traced:
            last = self._reducer.plan.by_need()[-1][1].name
            self._marks.keep([self._done(variables, last)])

    def apply_all(self, gradients: Sequence[Any]) -> None:
        """Call the `apply` of the optimizer's class with a gradient for each of the reducer's variables."""
        self._as_written(_ALL, self._reducer.variables, gradients)

    def _collect_and_update(self, number: int, bucket: Bucket, token: Any) -> Any:
        variables = self._reducer.members(bucket)
        # Weight decay needs no gradient, but must not come before the gradient.
        with tf.control_dependencies([token]):
            self._if_finite(number, variables, self._reducer.collect(number, token))
        return self._done(variables, bucket.name)

    def _collect_and_update_all(self, tokens: Sequence[Any]) -> Any:
        variables = self._reducer.variables
        self._if_finite(_ALL, variables, self._reducer.collect_all(tokens))
        return self._done(variables, self._reducer.plan.buckets[0].name)

    def _if_finite(self, number: int, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Update with reduced gradients, unless a guard keeps them from the variables."""
        if self._guard is None:
            self._as_written(number, variables, gradients)
            return

        def skip() -> None:
            # Accumulation counts micro-steps by it, and its sums start again.
            if self.optimizer.gradient_accumulation_steps:
                count_step(self.optimizer)

        update = functools.partial(self._as_written, number, variables, gradients)
        self._guard.if_finite(number, variables, gradients, update, skip)

    def _as_written(self, number: int, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Update with bucket `number` or _ALL so that the last bit does not depend on the overlap.

        All graphs, and eager code after them, call the same function, so it is traced once.
        """
        function = self._functions.get(number)
        apply = apply_all if number == _ALL else apply_some
        if function is None and tf.executing_eagerly():
            apply(self.optimizer, gradients, variables)
            return
        if function is None:
            function = kept_whole(lambda gradients: apply(self.optimizer, gradients, variables))
        with graph_optimizer_off():
            concrete = function.get_concrete_function(list(gradients))
            concrete(list(gradients))
        # An optimizer that keeps a tensor of this graph and uses it here must be traced again elsewhere.
        if not any(map(tf.is_symbolic_tensor, concrete.captured_inputs)):
            self._functions[number] = function

    def _count_step(self) -> Any:
        count_step(self.optimizer)
        return tf.constant(0.0)

    def _done(self, variables: Sequence[Any], bucket: str) -> Any:
        """Return a scalar that waits for the variables' update: control dependencies order the reads."""
        reads = [native(v).read_value() for v in variables]
        # A number that was read: TensorFlow would replace the mark of a constant by a constant.
        with tf.control_dependencies(reads):
            done = tf.cast(tf.reduce_sum(tf.reshape(reads[-1], [-1])[:1]), tf.float32)
        return self._marks.updated(done, bucket)


def _where_submitted(token: Any, update: Callable[[], Any]) -> Any:
    with on_the_host():
        submitted = token > 0
    return tf.cond(submitted, update, lambda: tf.constant(0.0))


# --- What an optimizer does with gradients ----------------------------------------------------------------


def acts_by_variable(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Return whether updating some variables now and others later gives the same bits as all at once.

    An optimizer that overrides one of METHODS_ONCE_PER_STEP may act once per step: Nadam multiplies a
    running product, LossScaleOptimizer checks all gradients.
    """
    kind, base = type(optimizer), keras.optimizers.Optimizer
    overridden = any(
        getattr(kind, name, None) is not getattr(base, name, None) for name in METHODS_ONCE_PER_STEP
    )
    needs_all = optimizer.global_clipnorm or optimizer.use_ema or optimizer.gradient_accumulation_steps
    overwritten = any(getattr(v, "overwrite_with_gradient", False) for v in variables)
    return not (overridden or needs_all or overwritten)


def apply_all(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Call the `apply` of the optimizer's class, whatever replaced it on the instance."""
    missing = _without_gradient(optimizer, variables)
    grads, trained = [*gradients, *[None] * len(missing)], [*variables, *missing]
    type(optimizer).apply(optimizer, grads, trained)


def _without_gradient(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the other variables of a MultiOptimizer, which must be given all of its variables."""
    several = getattr(keras.optimizers, "MultiOptimizer", ())  # not in Keras 3.12
    if not isinstance(getattr(optimizer, "inner_optimizer", optimizer), several):
        return []
    given = {identity(v) for v in variables}
    return [v for v in trained_variables(optimizer) if identity(v) not in given]


def apply_some(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Do the part of `apply` that concerns these variables: unscale, clip, decay, update, constrain.

    Only for an optimizer that `acts_by_variable`. Call `count_step` once per step afterwards.
    """

    scale = optimizer.loss_scale_factor
    with keras.name_scope(optimizer.name, caller=optimizer):
        unscaled = list(gradients) if scale is None else [gradient / scale for gradient in gradients]
        update_variables(optimizer, unscaled, variables)
        for variable in variables:
            if getattr(variable, "constraint", None) is not None:
                variable.assign(variable.constraint(variable))


def count_step(optimizer: Any) -> None:
    """Count a step, the last thing that `apply` does."""
    step_count(optimizer).assign_add(1)
