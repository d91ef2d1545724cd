"""The hook in an optimizer: `apply` hands gradients to an overlap mode, which reduces and updates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import check_variables_are_known, trained_variables, warn_of_empty_gradients
from hvpipe.keras.data_parallel.bucket_reduce import BucketReducer, ReduceOptions, dense, one_sample
from hvpipe.keras.data_parallel.bucket_update import BucketUpdate, acts_by_variable
from hvpipe.keras.data_parallel.compressed_reduce import make_reducer
from hvpipe.keras.data_parallel.gradient_accumulation import accumulate
from hvpipe.keras.data_parallel.nonfinite import NonfiniteGuard
from hvpipe.keras.data_parallel.overlap import Buckets, Overlap
from hvpipe.keras.data_parallel.shards import with_first_tensor
from hvpipe.keras.data_parallel.step_findings import StepFindings
from hvpipe.keras.data_parallel.step_marks import StepMarks
from hvpipe.keras.training_alone import note_averaged, note_hooked
from hvpipe.keras.variables import identity
from hvpipe.session import Session


def applied_outside(optimizer: Any) -> HvpipeError:
    """Return the error for a custom loop that updates with the optimizer of a data_parallel model."""
    return HvpipeError(
        "data_parallel reduces gradients in fit and train_on_batch. In a custom loop, wrap the optimizer "
        "in hvpipe.keras.DistributedOptimizer, without data_parallel. "
        f"Received: an update by {optimizer.name} outside of them"
    )


class OptimizerHook:
    """Puts the engine between an optimizer's gradients and its update.

    A gradient's way, in four files:

        optimizer.apply -> OptimizerHook   optimizer_hook.py  puts gradients in the plan's order, announces
                        -> Overlap         overlap_modes.py   says when to reduce and when to update
                        -> BucketReducer   bucket_reduce.py   calls the ops: announce, submit, collect
                        -> BucketUpdate    bucket_update.py   collects, and calls the optimizer's own update

    A step of `fit` is `begin`, any number of `apply`, `end`. DistributedOptimizer only calls `apply`.

    Args:
        session: The ranks that reduce together.
        optimizer: A built Keras optimizer.
        variables: The variables that are expected to have gradients.
        overlap: The mode, an object that belongs to this hook only. Between steps the caller asks it itself.
        options: How gradients are cut into buckets and sent.
    """

    def __init__(
        self,
        session: Session,
        optimizer: Any,
        variables: Sequence[Any],
        overlap: Overlap,
        options: ReduceOptions,
    ) -> None:
        overlap.check_optimizer(optimizer)
        self.optimizer = optimizer
        self.applied = False
        """Whether this step has called `apply`."""
        self._session = session
        self._overlap = overlap
        accumulates = bool(optimizer.gradient_accumulation_steps)  # into dense tensors
        self._options = overlap.reduce_options(replace(options, slices=not accumulates))
        self._marks = StepMarks(traced=session.settings.trace_path is not None)
        self._by_bucket = acts_by_variable(optimizer, variables) and overlap.updates_piecewise
        self._guard = None if options.nonfinite == "ignore" else NonfiniteGuard(options.nonfinite, optimizer)
        self._plans: dict[tuple[tuple[int, ...], frozenset[int]], Buckets] = {}
        self._plan_for(variables)
        note_hooked(session, optimizer)
        self._in_step = True  # also before `hook`: a loop of the script calls `apply` at any time
        self._samples: Any = None

    @property
    def variables(self) -> list[Any]:
        """The variables of the plan, in its order."""
        return self._overlap.reducer.variables

    def hook(self) -> None:
        """Replace `apply` on the optimizer instance. Its class, config and saved form stay as they are.

        From then on an update that is not between `begin` and `end` is refused.
        """
        self._in_step = False
        self.optimizer.apply = self.apply
        if self._marks.traced:
            scale_loss = type(self.optimizer).scale_loss
            self.optimizer.scale_loss = lambda loss: self._marks.forward_ends(
                scale_loss(self.optimizer, loss)
            )

    def unhook(self) -> None:
        """Restore the optimizer's own methods, and free the buffers. Do not use the hook afterwards."""
        self._overlap.rounds.drop()
        self._overlap.free()
        for name in ("apply", "scale_loss"):
            vars(self.optimizer).pop(name, None)
        for buckets in self._plans.values():
            buckets.reducer.end()

    # --- A step ----------------------------------------------------------------------------------------

    def begin(self, samples: Any, data: Any) -> Any:
        """Start a step with a batch of `samples` (scalar tensor) on this rank; return its data."""
        self._samples = samples = tf.cast(samples, tf.float64)
        self._in_step, self.applied = True, False
        self._overlap.begin(samples)
        # On one thread, TensorFlow runs what became ready last. It would count samples after the forward, and
        # all ranks would wait for the announcement of the step.
        with tf.control_dependencies([samples]):
            data = with_first_tensor(data, tf.identity)
        return self._marks.step_begins(data)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Stand in for `optimizer.apply`: reduce, and update when the overlap mode says so."""
        if not self._in_step:
            raise applied_outside(self.optimizer)
        known = trained_variables(self.optimizer) if trainable_variables is None else trainable_variables
        variables = list(known)
        note_averaged(self._session)
        if all(gradient is None for gradient in grads):
            raise HvpipeError(
                "Training needs at least one trainable variable with a gradient. "
                f"Received: None for all {len(variables)} gradients"
            )
        self._overlap.apply(grads, variables, functools.partial(self._reduce_and_update, grads, variables))
        self.applied = True

    def end(self) -> None:
        """End a step's graph. Raises HvpipeError if it does not fit the plan, unless it is only inspected."""
        self._in_step = False
        self._overlap.end()

    # --- NaN and Inf -----------------------------------------------------------------------------------

    def look_for_nonfinite(self, step: int) -> None:
        """Note whether the gradients of the updates since the last look were finite, up to step `step`."""
        if self._guard is not None:
            self._guard.look(step)

    def tell_of_nonfinite(self) -> None:
        """Raise HvpipeError, or warn, if a look has found gradients that were not; collective."""
        if self._guard is not None:
            self._guard.tell(self._session)

    # --- The plan --------------------------------------------------------------------------------------

    def _plan_for(self, variables: Sequence[Any]) -> None:
        key = tuple(map(identity, variables)), self._options.tables
        if key not in self._plans:
            known = {identity(v): place for place, v in enumerate(trained_variables(self.optimizer))}
            places = tuple(known.get(identity(v), place) for place, v in enumerate(variables))
            options = replace(self._options, places=places)
            reducer = make_reducer(self._session, self.optimizer.name, variables, options)
            update = BucketUpdate(self.optimizer, reducer, self._by_bucket, self._marks, self._guard)
            self._plans[key] = Buckets(reducer, update)
        self._overlap.attach(self._plans[key])

    def _replace(self, before: BucketReducer) -> None:
        """Let the present plan take the place of one that no step has used, whose buffers it frees."""
        with tf.init_scope():
            self._overlap.reducer.step.assign(before.step)
        self._plans = {key: each for key, each in self._plans.items() if each.reducer is not before}
        before.end()

    # --- Gradients -------------------------------------------------------------------------------------

    def _reduce_and_update(self, grads: Sequence[Any], variables: Sequence[Any]) -> None:
        trained = [v for g, v in zip(grads, variables, strict=True) if g is not None]
        before = self._overlap.reducer
        dense_tables = before.dense_tables(grads, variables)
        fits = StepFindings(tuple(trained)).trains(before.variables)
        if not fits:
            check_variables_are_known(self.optimizer, trained)
        if not fits or dense_tables:
            self._options = replace(self._options, tables=self._options.tables - dense_tables)
            self._plan_for(before.variables if fits else trained)
            if dense_tables and not before.used:
                self._replace(before)
        if len(trained) < len(variables) and self._session.world.rank == 0:
            warn_of_empty_gradients(self.optimizer, grads, variables)
        buckets = self._overlap.buckets
        found = {identity(v): g for g, v in zip(grads, variables, strict=True) if g is not None}
        gradients = buckets.reducer.as_submitted([found[identity(v)] for v in buckets.reducer.variables])
        samples = one_sample(gradients) if self._samples is None else self._samples
        if self.optimizer.gradient_accumulation_steps:
            whole = [dense(gradient) for gradient in gradients]
            accumulate(self.optimizer, buckets, whole, samples, self._overlap.reduce_and_update)
        else:
            self._overlap.reduce_and_update(gradients, buckets.reducer.announce(samples))
