"""The hook in an optimizer: `apply` hands gradients to an overlap mode, which reduces and updates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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
from hvpipe.keras.data_parallel.step_findings import StepFindings, UpdateInGraph
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


def _misfit(findings: StepFindings) -> HvpipeError:
    return HvpipeError(
        "hvpipe plans a step from its graph before the step runs. This graph was traced while it ran (by a "
        "custom make_train_function, or in another device scope than before), and does not fit the plan. "
        'Use overlap="backward", which needs no plan beforehand. '
        f"Received: {findings}"
    )


class OptimizerHook:
    """Puts the engine between an optimizer's gradients and its update.

    A gradient's way, in four files:

        optimizer.apply -> OptimizerHook   optimizer_hook.py  puts gradients in the plan's order, announces
                        -> Overlap         overlap.py         says when to reduce and when to update
                        -> BucketReducer   bucket_reduce.py   calls the ops: announce, submit, collect
                        -> BucketUpdate    bucket_update.py   collects, and calls the optimizer's own update

    A step of `fit` is `begin`, any number of `apply`, `end`. `flush` comes before weights are read between
    steps. DistributedOptimizer only calls `apply`.

    Args:
        session: The ranks that reduce together.
        optimizer: A built Keras optimizer.
        variables: The variables that are expected to have gradients.
        overlap: The mode, an object that belongs to this hook only.
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
        self._options = replace(
            options,
            in_turn=overlap.in_turn,
            on_stream=overlap.on_stream,
            # Accumulated gradients and differences of weights are dense.
            slices=overlap.reduces_gradients and not optimizer.gradient_accumulation_steps,
        )
        self._marks = StepMarks(traced=session.settings.trace_path is not None)
        # All variables at once or none, so that a step is never half applied if a rank is lost in it.
        at_once = session.settings.elastic and not overlap.updates_in_next_step
        self._by_bucket = acts_by_variable(optimizer, variables) and not at_once
        self._guard = None if options.nonfinite == "ignore" else NonfiniteGuard(options.nonfinite, optimizer)
        self._plans: dict[tuple[tuple[int, ...], frozenset[int]], Buckets] = {}
        self._plan_for(variables)
        note_hooked(session, optimizer)
        self._in_step = False
        self._samples: Any = None
        self._graph: Any = None  # of the step
        self._update: UpdateInGraph | None = None  # of the step, if its plan must fit beforehand
        self._look: list[StepFindings] | None = None  # set while a step is traced for inspection
        self._ended_trace = False  # whether `apply` has ended that trace

    @property
    def variables(self) -> list[Any]:
        """The variables of the plan, in its order."""
        return self._buckets.reducer.variables

    def hook(self) -> None:
        """Replace `apply` on the optimizer instance. Its class, config and saved form stay as they are.

        From then on an update that is not between `begin` and `end` is refused.
        """
        self.optimizer.apply = self._apply_in_step
        if self._marks.traced:
            scale_loss = type(self.optimizer).scale_loss
            self.optimizer.scale_loss = lambda loss: self._marks.forward_ends(
                scale_loss(self.optimizer, loss)
            )

    def unhook(self) -> None:
        """Restore the optimizer's own methods, and free the buffers. Do not use the hook afterwards."""
        if self._overlap.rounds is not None:
            self._overlap.rounds.drop(self._buckets.reducer)
        for name in ("apply", "scale_loss"):
            vars(self.optimizer).pop(name, None)
        for buckets in self._plans.values():
            buckets.reducer.end()

    # --- A step ----------------------------------------------------------------------------------------

    def begin(self, samples: Any, data: Any) -> Any:
        """Start a step with a batch of `samples` (scalar tensor) on this rank; return its data."""
        self._samples = samples = tf.cast(samples, tf.float64)
        self._in_step, self.applied = True, False
        self._graph = tf.compat.v1.get_default_graph()
        self._update = None
        self._overlap.begin(self._buckets, samples)
        # On one thread, TensorFlow runs what became ready last. It would count samples after the forward, and
        # all ranks would wait for the announcement of the step.
        with tf.control_dependencies([samples]):
            data = with_first_tensor(data, tf.identity)
        return self._marks.step_begins(data)

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Stand in for `optimizer.apply`: reduce, and update when the overlap mode says so."""
        known = trained_variables(self.optimizer) if trainable_variables is None else trainable_variables
        variables = list(known)
        note_averaged(self._session)
        if not self._overlap.reduces_gradients:
            self.applied = True
            type(self.optimizer).apply(self.optimizer, grads, variables)
            return
        trained = [v for g, v in zip(grads, variables, strict=True) if g is not None]
        if not trained:
            raise HvpipeError(
                "Training needs at least one trainable variable with a gradient. "
                f"Received: None for all {len(variables)} gradients"
            )
        if self.applied and self._overlap.defers:
            raise HvpipeError(
                "This overlap allows one call of the optimizer in train_step; with several, use "
                'overlap="backward". Received: a second call in one step'
            )
        self.applied = True
        if not self._overlap.defers or tf.executing_eagerly():
            self._reduce_and_update(grads, variables, trained)
            return
        # `begin` has started this graph with a plan. If the plan does not fit, the graph is only inspected.
        is_last = self._overlap.updates_in_next_step
        nested = tf.compat.v1.get_default_graph() is not self._graph
        dense_tables = self._dense_tables(grads, variables)
        self._update = UpdateInGraph(self._graph, trained, is_last and nested, dense_tables)
        findings = self._update.findings(self.optimizer)
        if self.fits(findings):
            self._reduce_and_update(grads, variables, trained)
        elif nested:
            # The user's tf.function would keep this graph, which has no update: end its trace.
            if self._look is not None:
                self._look.append(findings)
                self._ended_trace = True
            raise _misfit(findings)
        if is_last:
            self._update.ends()

    def end(self) -> None:
        """End a step's graph. Raises HvpipeError if it does not fit the plan, unless it is only inspected."""
        findings = None if self._update is None else self._update.findings(self.optimizer)
        self._in_step, self._graph, self._update = False, None, None
        if findings is None:
            return
        if self._look is not None:
            self._look.append(findings)
        elif not self.fits(findings):
            raise _misfit(findings)

    def flush(self) -> None:
        """Run the updates that wait for the next step. Weights are then as after the last step."""
        if self._overlap.defers:
            self._overlap.finish(self._buckets)

    def check_readable(self) -> None:
        """Raise HvpipeError if the ranks' weights may differ."""
        if self._overlap.rounds is not None and self._overlap.rounds.open:
            raise HvpipeError(
                'With overlap="local" each rank has weights of its own between steps: read and set them when '
                "an epoch has ended, or call evaluate on all ranks first, which ends the round."
            )

    def compression_state(self) -> dict[str, Any]:
        """Return the variables of compression that a resumed training needs, by name."""
        return self._buckets.reducer.state()

    # --- Rounds of local steps, outside of any graph -----------------------------------------------------

    @property
    def between_rounds(self) -> bool:
        """Whether all ranks have just exchanged a record."""
        return self._overlap.rounds is None or self._overlap.rounds.steps == 0

    def begin_steps(self, counted: Callable[[], float]) -> None:
        """Prepare for steps; `counted` returns the samples that this rank has trained on."""
        if self._overlap.rounds is not None:
            self._overlap.rounds.begin_steps(self._buckets.reducer, counted())

    def end_steps(self, steps: int, counted: Callable[[], float]) -> None:
        """Count steps that have run; collective if a round ends with them."""
        if self._overlap.rounds is not None:
            self._overlap.rounds.end_steps(self._buckets.reducer, steps, counted())

    def complete_round(self, counted: Callable[[], float]) -> None:
        """Let all ranks have equal weights; collective."""
        rounds = self._overlap.rounds
        if rounds is not None and rounds.open:
            self._session.engine.agree(f"the end of a round after {rounds.steps} steps")
            rounds.complete(self._buckets.reducer, counted())

    def round_state(self) -> dict[str, Any]:
        """Return what `resume_round` needs, by name; empty if there are no rounds."""
        return {} if self._overlap.rounds is None else self._overlap.rounds.state()

    def resume_round(self, state: Mapping[str, Any], counted: Callable[[], float]) -> None:
        """Go on from a `round_state`; collective."""
        if self._overlap.rounds is not None and state:
            self._overlap.rounds.resume(self._buckets.reducer, state, counted())

    # --- The loss of ranks -----------------------------------------------------------------------------

    def forget_under_way(self) -> None:
        """Forget the gradients that are under way, which are lost with a rank."""
        self._overlap.forget()

    def updates(self) -> Any:
        """Return how many deferred updates are complete (scalar); None if none is left to the next step."""
        return self._overlap.updates()

    @property
    def step_counter(self) -> Any:
        """The variable that counts announced steps."""
        return self._buckets.reducer.step

    def look_for_nonfinite(self, step: int) -> None:
        """Note whether the gradients of the updates since the last look were finite, up to step `step`."""
        if self._guard is not None:
            self._guard.look(step)

    def tell_of_nonfinite(self) -> None:
        """Raise HvpipeError, or warn, if a look has found gradients that were not; collective."""
        if self._guard is not None:
            self._guard.tell(self._session)

    def hold(self) -> list[Any]:
        """Flush, and return the sums that belong to the next step; collective."""
        return self._overlap.hold(self._buckets)

    @property
    def steps(self) -> int:
        """How many steps were announced."""
        return int(self._buckets.reducer.step.numpy())

    def resume(self, sums: Sequence[Any], steps: int) -> None:
        """Continue after this many steps, with the sums that `hold` returned; collective if there are any."""
        self._buckets.reducer.step.assign(steps)
        self._overlap.resume(self._buckets, sums)

    # --- The plan --------------------------------------------------------------------------------------

    def look(self, trace: Callable[[], None]) -> list[StepFindings]:
        """Call `trace`, which traces steps without running them; return the findings about each step's graph.

        Return an empty list if the mode needs no plan beforehand, or if nothing was traced. If a graph's
        findings do not fit, it must not run, because it lacks the update.
        """
        if not self._overlap.defers:
            return []
        found: list[StepFindings] = []
        self._look, self._ended_trace = found, False
        try:
            trace()
        except Exception:
            # `apply` may have ended the trace of a nested graph that must not be kept. AutoGraph replaces
            # errors that pass through it, so their type does not tell.
            if not self._ended_trace:
                raise
        finally:
            self._look = None
        return found

    def fits(self, findings: StepFindings) -> bool:
        """Return whether a step can run with this hook's variables and overlap mode."""
        at_once = self._overlap.updates_in_next_step and findings.must_update_at_once
        return not at_once and not findings.dense_tables and findings.trains(self.variables)

    def _dense_tables(self, grads: Sequence[Any], variables: Sequence[Any]) -> frozenset[int]:
        """Return the tables that should not go through the host, because their gradients are dense.

        The same on all ranks, whose graphs are equal.
        """
        if self._options.tables_agreed:
            return frozenset()
        sliced = [v for g, v in zip(grads, variables, strict=True) if isinstance(g, tf.IndexedSlices)]
        return self._buckets.reducer.tables_on_host - frozenset(map(identity, sliced))

    def _plan_for(self, variables: Sequence[Any]) -> None:
        key = tuple(map(identity, variables)), self._options.tables
        if key not in self._plans:
            known = {identity(v): place for place, v in enumerate(trained_variables(self.optimizer))}
            places = tuple(known.get(identity(v), place) for place, v in enumerate(variables))
            options = replace(self._options, places=places)
            reducer = make_reducer(self._session, self.optimizer.name, variables, options)
            update = BucketUpdate(self.optimizer, reducer, self._by_bucket, self._marks, self._guard)
            self._plans[key] = Buckets(reducer, update)
        self._buckets = self._plans[key]

    def _replace(self, before: BucketReducer) -> None:
        """Let the present plan take the place of one that no step has used, whose buffers it frees."""
        with tf.init_scope():
            self._buckets.reducer.step.assign(before.step)
        self._plans = {key: each for key, each in self._plans.items() if each.reducer is not before}
        before.end()

    # --- Gradients -------------------------------------------------------------------------------------

    def _apply_in_step(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        if not self._in_step:
            raise applied_outside(self.optimizer)
        self.apply(grads, trainable_variables)

    def _reduce_and_update(
        self, grads: Sequence[Any], variables: Sequence[Any], trained: Sequence[Any]
    ) -> None:
        dense_tables = self._dense_tables(grads, variables)
        fits = StepFindings(tuple(trained)).trains(self._buckets.reducer.variables)
        if not fits:
            check_variables_are_known(self.optimizer, trained)
        if not fits or dense_tables:
            before = self._buckets.reducer
            self._options = replace(self._options, tables=self._options.tables - dense_tables)
            self._plan_for(before.variables if fits else trained)
            if dense_tables and not before.used:
                self._replace(before)
        if len(trained) < len(variables) and self._session.world.rank == 0:
            warn_of_empty_gradients(self.optimizer, grads, variables)
        buckets = self._buckets
        found = {identity(v): g for g, v in zip(grads, variables, strict=True) if g is not None}
        gradients = buckets.reducer.as_submitted([found[identity(v)] for v in buckets.reducer.variables])
        samples = one_sample(gradients) if self._samples is None else self._samples
        reduce_and_update = functools.partial(self._overlap.reduce_and_update, buckets)
        if self.optimizer.gradient_accumulation_steps:
            whole = [dense(gradient) for gradient in gradients]
            accumulate(self.optimizer, buckets, whole, samples, reduce_and_update)
        else:
            reduce_and_update(gradients, buckets.reducer.announce(samples))
