"""The updates of a model: hooks its optimizer with a plan that fits its steps, and finishes what waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import trained_variables
from hvpipe.keras.data_parallel.bucket_reduce import ReduceOptions, tables_of
from hvpipe.keras.data_parallel.compressed_reduce import check_compressible
from hvpipe.keras.data_parallel.optimizer_hook import OptimizerHook, applied_outside
from hvpipe.keras.data_parallel.overlap import Overlap, OverlapOptions
from hvpipe.keras.data_parallel.step_findings import StepFindings
from hvpipe.keras.variables import identity
from hvpipe.plan.compression import compression_named
from hvpipe.session import Session, run_directly

logger = logging.getLogger("hvpipe")


class PlannedUpdates:
    """Hooks the optimizer of a model, and keeps what is under way between its steps.

    Args:
        session: The ranks that train together.
        model: A Keras model.
        overlap: The mode that was asked for.
        overlap_options: What only some modes use. `warmup_steps` also delays int8 and PowerSGD.
        options: How gradients are cut into buckets and sent.
        counted: Returns the samples that this rank has trained on.
    """

    def __init__(
        self,
        session: Session,
        model: Any,
        overlap: type[Overlap],
        overlap_options: OverlapOptions,
        options: ReduceOptions,
        counted: Callable[[], float],
    ) -> None:
        self.overlap = overlap
        """The mode in use: "backward" if the model's train_step rules out the "step" that was asked for."""
        self.mode = Overlap(overlap_options)
        """The mode of the hook; before the first step one that does nothing."""
        self.hook: OptimizerHook | None = None
        """The hook in the optimizer, from the first step on."""
        self.plans = 0
        """How often the optimizer was hooked. A graph holds the plan with which it was traced."""
        self.ready = False
        """Whether the ranks have started with equal state."""
        self.calls = 0
        """Calls of the train function that have run."""
        self.steps = 0
        """Steps that have run, those before a resume included."""
        self.between_steps = threading.RLock()
        """Held by a step, and by whoever finishes its update; another thread may read weights in `fit`."""
        self.run_flush: Callable[[Callable[[], None]], None] = run_directly
        """Runs an update that waits. An elastic job repeats it if a rank is lost."""
        self.on_ran: Callable[[], None] = lambda: None
        """Called when TensorFlow has run a step."""
        self._session = session
        self._model = model
        self._overlap_options = overlap_options
        self._options = options
        self._counted = counted
        self._refusing: Any = None  # the optimizer that refuses updates until the first step hooks it
        # To continue from: sums, steps, the state of rounds and of compression.
        self._held: tuple[Sequence[Any], int, Mapping[str, Any], Mapping[str, Any]] | None = None
        self._steps_before = 0  # a resume
        self._compression = compression_named(options.compression)
        self._compresses = False  # whether the hook compresses
        self._dense_tables: frozenset[int] = frozenset()  # by `identity`, as in StepFindings

    # --- Between steps ------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Run the update that waits for the next step. Not collective: the gradients have been sent.

        Raises:
            HvpipeError: If the ranks' weights may differ, in a round of "local".
        """
        self.mode.rounds.check_readable()
        self._finish()

    def _finish(self) -> None:
        if self.mode.waits:  # never in a step: its data may come from code that uses the model
            self.run_flush(self._finish_between_steps)

    def _finish_between_steps(self) -> None:
        with self.between_steps:
            self.mode.finish()

    def finish_update(self) -> None:
        """Run the update that "step" leaves to the next step, before something that it depends on changes."""
        if self.mode.update_is_last:
            self._finish()

    def complete(self) -> None:
        """Flush, and let all ranks have equal weights; collective."""
        self.mode.rounds.complete(self._counted)
        self._finish()
        self._look_for_nonfinite()

    def hold(self) -> tuple[list[Any], int]:
        """Finish the step as far as it changes no result, between two steps; collective.

        Returns:
            The sums of gradients that the next step will update with ("stale"), and the steps so far.
        """
        if self.hook is None:
            return [], 0
        self.finish_update()
        with self.between_steps:
            sums = self.mode.hold()
        self._look_for_nonfinite()
        return sums, self._announced()

    def _look_for_nonfinite(self) -> None:
        """After a flush: tell of NaN and Inf; collective."""
        if self.hook is not None:
            self.hook.look_for_nonfinite(self.steps)
            self.hook.tell_of_nonfinite()

    def _announced(self) -> int:
        return int(self.mode.reducer.step.numpy())

    def compression_state(self) -> dict[str, Any]:
        """Return the variables of compression that a resumed training needs, by name."""
        return {} if self.hook is None else self.mode.compression_state()

    def resume(
        self,
        sums: Sequence[Any],
        steps: int,
        round_state: Mapping[str, Any],
        compression: Mapping[str, Any],
    ) -> None:
        """Let the next step continue from what `hold` and `Rounds.state` returned, on all ranks.

        `compression` has values for variables of `compression_state`. If one does not fit, the variable keeps
        its first value.
        """
        self._held = (sums, steps, round_state, compression)

    def resume_held(self) -> None:
        """Continue from what `resume` was given, if that has not been done; collective."""
        if self._held is None:
            return
        (sums, steps, round_state, compression), self._held = self._held, None
        self.mode.resume(steps, sums)
        self.mode.rounds.resume(round_state, self._counted)
        for name, variable in self.mode.compression_state().items():
            if name in compression and compression[name].shape == tuple(variable.shape):
                variable.assign(compression[name])
        self.steps = steps
        self._steps_before = steps - self.calls

    def ran(self) -> None:
        """Note that TensorFlow has run a call of the train function."""
        assert self.hook is not None
        self.mode.ran()
        self.on_ran()
        self.calls += 1
        self.steps += int(self._model.steps_per_execution)
        # The call has updated with the gradients of the step before, if that is left to the next step. Now,
        # because another thread may run this step's update next.
        self.hook.look_for_nonfinite(self.steps - int(self.mode.waits))

    def count_from(self, calls: int) -> None:
        """Go on after these calls, of one step each: a rank that failed in the last has not counted it."""
        self.calls = calls
        self.steps = self._steps_before + calls

    # --- The hook -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Hook the optimizer for what the first step probably trains: what the optimizer was built for."""
        trainable = self._model.trainable_variables
        known = set(map(identity, trained_variables(self._model.optimizer)))
        self._hook_optimizer([v for v in trainable if identity(v) in known] or list(trainable))
        self.ready = True

    def fit(self, trace: Callable[[], None]) -> bool:
        """Call `trace`, which traces a step. If its graph does not fit, plan anew and return False."""
        hook = self.hook
        assert hook is not None
        misfit = next((f for f in self.mode.inspect_trace(trace) if not f.fit(hook.variables)), None)
        if misfit is None:
            return True
        if misfit.must_update_at_once:
            within = self.overlap.within_step()
            if within is not self.overlap:
                self.overlap = within
                self._session.trained_with["overlap"] = "backward"
            self._warn_of_early_use(misfit)
        self._dense_tables |= misfit.dense_tables
        # The same variables keep their order: the buckets depend on it, and with them the last bits.
        self._hook_optimizer(hook.variables if misfit.trains(hook.variables) else misfit.trained)
        return False

    def end_warm_up(self) -> None:
        """Compress from the first step after the warm-up on: with other buckets, so in a new graph."""
        if self.hook is None or self._compression is None or self._compresses or self._warms_up():
            return
        steps = self._announced()
        self._hook_optimizer(self.hook.variables)
        self.mode.resume(steps, ())

    def _warms_up(self) -> bool:
        """Return whether gradients are not compressed yet. Differences of weights always are."""
        steps = self.steps if self._held is None else self._held[1]
        compresses = self._compression is not None and self.overlap.reduces_gradients
        return compresses and steps < self._overlap_options.warmup_steps

    def _hook_optimizer(self, variables: Sequence[Any]) -> None:
        """Hook the model's optimizer for variables that are expected to have gradients."""
        self._finish()
        self._look_for_nonfinite()
        self._end_refusal()
        if self.hook is not None:
            self.hook.unhook()
        model, optimizer = self._model, self._model.optimizer
        if not variables:
            raise HvpipeError(
                f"Training needs at least one trainable variable. Received: model {model.name} without any"
            )
        # Eager steps have no graph to move an update into. The weights are the same.
        eager = bool(model.run_eagerly or tf.config.functions_run_eagerly())
        mode = (self.overlap.within_step() if eager else self.overlap)(self._overlap_options)
        if mode.reduces_gradients:
            check_compressible(optimizer, self._options.compression)
        self._compresses = self._compression is not None and not self._warms_up()
        exact = self._compression is not None and not self._compresses
        compression = None if exact else self._options.compression
        tables = tables_of(model) - self._dense_tables
        options = replace(self._options, tables=tables, compression=compression)
        hook = OptimizerHook(self._session, optimizer, variables, mode, options)
        try:
            mode.rounds.check_length(int(model.steps_per_execution))
        except HvpipeError:
            hook.unhook()
            raise
        self.hook, self.mode = hook, mode
        hook.hook()
        self.plans += 1

    def unhook(self) -> None:
        """Run the update that waits, forget a round of "local", and restore the optimizer's own methods."""
        self._end_refusal()
        self._finish()
        if self.hook is not None:
            self.hook.unhook()

    def _warn_of_early_use(self, findings: StepFindings) -> None:
        if self._session.world.rank == 0:
            logger.warning(
                "hvpipe: train_step of model %s may use weights after the optimizer's update, which "
                'overlap="step" would do in the next step: overlap="backward" is used instead. Received: %s',
                self._model.name,
                findings,
            )

    def refuse_outside(self) -> None:
        """Let the model's optimizer refuse updates until the first step hooks it.

        In a loop outside of `fit` the ranks' weights would drift apart. A DistributedOptimizer reduces there
        too, so it may update.
        """
        self._end_refusal()
        optimizer = getattr(self._model, "optimizer", None)
        if isinstance(optimizer, keras.optimizers.Optimizer) and "apply" not in vars(optimizer):
            optimizer.apply = self._refuse
            self._refusing = optimizer

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise applied_outside(self._refusing)

    def _end_refusal(self) -> None:
        if self._refusing is not None and vars(self._refusing).get("apply") == self._refuse:
            vars(self._refusing).pop("apply")
        self._refusing = None
