"""The steps of `fit` on all ranks: the train function, and hvpipe's additions inside a step."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.collectives.sync_batch_norm import normalise_over_ranks
from hvpipe.keras.compat import trained_variables
from hvpipe.keras.data_parallel.bucket_reduce import ReduceOptions, tables_of
from hvpipe.keras.data_parallel.compressed_reduce import check_compressible
from hvpipe.keras.data_parallel.elastic import Elastic
from hvpipe.keras.data_parallel.nonfinite import guarded_alone
from hvpipe.keras.data_parallel.optimizer_hook import OptimizerHook, applied_outside
from hvpipe.keras.data_parallel.overlap import BackwardOverlap, Overlap, OverlapOptions
from hvpipe.keras.data_parallel.samples import SampleCounter, SamplesIn
from hvpipe.keras.data_parallel.shards import batch_of, fingerprint_of
from hvpipe.keras.data_parallel.step_findings import StepFindings
from hvpipe.keras.data_parallel.trace_ahead import TraceAhead
from hvpipe.keras.data_parallel.untrained_state import UntrainedState
from hvpipe.keras.data_parallel.verify import equal_on_all_ranks, tell_of_unaveraged, verify_equal
from hvpipe.keras.gpu import on_the_host
from hvpipe.keras.initial_state import build_state, start_equal, warn_of_own_batches, without_xla
from hvpipe.keras.instance_methods import InstanceMethods
from hvpipe.keras.training_alone import step_of, tell_of_optimizers
from hvpipe.keras.variables import identity
from hvpipe.plan.compression import compression_named
from hvpipe.session import Session

logger = logging.getLogger("hvpipe")

_MOST_PLANS = 3  # one from the model, one from its graph's findings, a third for another batch shape


class TrainSteps:
    """Stands in for a model's `make_train_function`, `train_step` and `test_step`, and hooks its optimizer.

    Args:
        session: The ranks that train together.
        model: A Keras model.
        methods: The model's own methods.
        overlap: The mode that was asked for.
        overlap_options: What only some modes use. `warmup_steps` also delays int8 and PowerSGD.
        options: How gradients are cut into buckets and sent.
        samples_in: Counts the samples of a batch.
        verify_every: After how many steps to compare weights over ranks; 0: never.
        sync_batch_norm: Whether BatchNormalization layers normalise by the batches of all ranks.
    """

    def __init__(
        self,
        session: Session,
        model: Any,
        methods: InstanceMethods,
        overlap: type[Overlap],
        overlap_options: OverlapOptions,
        options: ReduceOptions,
        samples_in: SamplesIn,
        verify_every: int = 0,
        sync_batch_norm: bool = False,
    ) -> None:
        self.session = session
        self.model = model
        self.overlap = overlap
        """The mode in use: "backward" if the model's train_step rules out the "step" that was asked for."""
        self.ready = False
        """Whether the ranks have started with equal state."""
        self.untrained = UntrainedState(session, model)
        """What layers keep and no gradient trains."""
        # A single rank may use XLA, which reaches no variable on another device than the model's.
        with contextlib.nullcontext() if session.world.size == 1 else on_the_host():
            self.train_counter, self.test_counter = SampleCounter(samples_in), SampleCounter(samples_in)
        self.samples_in = samples_in
        """Counts the samples of a batch."""
        self._methods = methods
        self._overlap_options = overlap_options
        self._options = options
        self._hook: OptimizerHook | None = None
        self._refusing: Any = None  # the optimizer that refuses updates until the first step hooks it
        self._pending = False  # whether updates wait for the next step
        self.between_steps = threading.RLock()
        """Held by a step, and by whoever finishes its update; another thread may read weights in `fit`."""
        # To continue from: sums, steps, the state of rounds and of compression.
        self._held: tuple[Sequence[Any], int, Mapping[str, Any], Mapping[str, Any]] | None = None
        self._compression = compression_named(options.compression)
        self._compresses = False  # whether the hook compresses
        self._dense_tables: frozenset[int] = frozenset()  # by `identity`, as in StepFindings
        self._times_prepared = 0
        self._steps_seen = 0
        self._steps_run = 0  # those before a resume included
        self._steps_before = 0  # a resume
        self._verify_every = verify_every
        self._on_purpose: set[int] = set()  # what `train_step` updates inside `alone`, by `identity`
        self.compares_next = True
        """Whether to look for weights that nobody averages after the next step: the first one of a `fit`."""
        self.sync_batch_norm = sync_batch_norm
        """Whether layers normalise over all ranks, until `detach`."""
        self._guarded: Any = None  # the optimizer of a single rank whose `apply` has a guard
        session.sample_counters.append(self.train_counter)
        survives = session.settings.elastic and session.world.size > 1
        self.elastic = Elastic(session, model, self) if survives else None
        """Lets steps survive the loss of ranks; None if that was not asked for."""
        # Of the first batch. If it is equal on all ranks, they probably read the same data.
        with on_the_host():
            self._fingerprint = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="hvpipe_batch")

    def flush(self) -> None:
        """Run the updates that wait for the next step. Not collective: the gradients have been sent.

        Raises:
            HvpipeError: If the ranks' weights may differ, in a round of "local".
        """
        if self._hook is not None:
            self._hook.check_readable()
        self._run_pending()

    def finish_update(self) -> None:
        """Run the update that "step" leaves to the next step, before something that it depends on changes."""
        if self.overlap.updates_in_next_step:
            self.flush()

    def complete(self) -> None:
        """Flush, and let all ranks have equal weights; collective."""
        if self._hook is not None:
            self._hook.complete_round(self.train_counter.total)
        self.flush()
        self._look_for_nonfinite()

    def _look_for_nonfinite(self) -> None:
        """Between two steps, after a flush: report NaN and Inf; collective."""
        if self._hook is not None:
            self._hook.look_for_nonfinite(self._steps_run)
            self._hook.tell_of_nonfinite()

    def _run_pending(self) -> None:
        if self.elastic is not None:
            self.elastic.flush(self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:  # nor in a step: its data may come from code that uses the model
            return
        with self.between_steps:
            pending, self._pending = self._pending, False
            if pending and self._hook is not None:
                self._hook.flush()

    def hold(self) -> tuple[list[Any], int]:
        """Finish the step as far as it changes no result, between two steps; collective.

        Returns:
            The sums of gradients that the next step will update with ("stale"), and the steps so far.
        """
        if self._hook is None:
            return [], 0
        if self.elastic is not None:
            self.flush()
        sums: list[Any] = []
        with self.between_steps:
            if self._pending:
                sums = self._hook.hold()
                self._pending = bool(sums)
        self._look_for_nonfinite()
        return sums, self._hook.steps

    def round_state(self) -> dict[str, Any]:
        """Return the state of the rounds of "local" on this rank, by name, between two rounds."""
        return {} if self._hook is None else self._hook.round_state()

    def compression_state(self) -> dict[str, Any]:
        """Return the variables of compression that a resumed training needs, by name."""
        return {} if self._hook is None else self._hook.compression_state()

    def resume(
        self,
        sums: Sequence[Any],
        steps: int,
        round_state: Mapping[str, Any],
        compression: Mapping[str, Any],
    ) -> None:
        """Let the next step continue from what `hold` and `round_state` returned, on all ranks.

        `compression` has values for variables of `compression_state`. If one does not fit, the variable keeps
        its first value.
        """
        self._held = (sums, steps, round_state, compression)

    def _resume_held(self) -> None:
        if self._held is None or self._hook is None:
            return
        (sums, steps, round_state, compression), self._held = self._held, None
        self._hook.resume(sums, steps)
        self._hook.resume_round(round_state, self.train_counter.total)
        for name, variable in self._hook.compression_state().items():
            if name in compression and compression[name].shape == tuple(variable.shape):
                variable.assign(compression[name])
        self._steps_run = steps
        self._steps_before = steps - self._steps_seen
        self._pending = self._pending or bool(sums)

    def unhook(self) -> None:
        """Run pending updates, forget a round of "local", and restore the optimizer's own methods."""
        self._end_refusal()
        self._run_pending()
        if self._hook is not None:
            self._hook.unhook()
        self._end_guard()

    def refuse_outside(self) -> None:
        """Let the model's optimizer refuse updates until the first step hooks it.

        In a loop outside of `fit` the ranks' weights would drift apart. A DistributedOptimizer reduces there
        too, so it may update.
        """
        self._end_refusal()
        optimizer = getattr(self.model, "optimizer", None)
        if isinstance(optimizer, keras.optimizers.Optimizer) and "apply" not in vars(optimizer):
            optimizer.apply = self._refuse
            self._refusing = optimizer

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise applied_outside(self._refusing)

    def _end_refusal(self) -> None:
        if self._refusing is not None and vars(self._refusing).get("apply") == self._refuse:
            vars(self._refusing).pop("apply")
        self._refusing = None

    def _end_guard(self) -> None:
        if self._guarded is not None:
            vars(self._guarded).pop("apply", None)
        self._guarded = None

    # --- The loss of ranks --------------------------------------------------------------------------------

    @property
    def between_rounds(self) -> bool:
        """Whether all ranks have just exchanged a record: always, except within a round of "local"."""
        return self._hook is None or self._hook.between_rounds

    @property
    def waits(self) -> bool:
        """Whether an update waits for the next step."""
        return self._pending and self.overlap.defers

    @waits.setter
    def waits(self, value: bool) -> None:
        self._pending = value

    @property
    def updates_piecewise(self) -> bool:
        """Whether an update may be half applied when a rank is lost."""
        return self.overlap.updates_in_next_step and not self._is_eager

    @property
    def _is_eager(self) -> bool:
        return bool(self.model.run_eagerly or tf.config.functions_run_eagerly())

    def updates(self) -> Any:
        """Return how many deferred updates are complete (scalar); None if none is left to the next step."""
        return None if self._hook is None else self._hook.updates()

    def counting_variables(self) -> list[Any]:
        """Return the variables that count steps and samples."""
        hook = self._hook
        return [self.train_counter.variable, *([] if hook is None else [hook.step_counter])]

    def forget_under_way(self) -> None:
        """Forget the gradients that are under way, which are lost with a rank."""
        self._pending = False
        if self._hook is not None:
            self._hook.forget_under_way()

    def count_from(self, done: int) -> None:
        """Go on after this many steps: a rank that failed in the last of them has not counted it."""
        self._steps_seen = done
        self._steps_run = self._steps_before + done

    # --- The train function -------------------------------------------------------------------------------

    def make_train_function(self, force: bool = False) -> Any:
        """Stand in for `model.make_train_function`: prepare, plan and time what Keras' function does."""
        model = self.model
        if model.train_function is not None and not force:
            return model.train_function
        without_xla(self.session, model)
        self._methods.own("make_train_function")(force=True)
        inner = model.train_function
        if self.elastic is not None:
            model.train_function = self._timed(self.elastic.around(self._planned(inner)))
        else:
            alone = self.session.world.size == 1
            model.train_function = self._timed(self._alone(inner) if alone else self._planned(inner))
        self.ready = False
        return model.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Stand in for `model.make_test_function`: XLA cannot reach the counter, which is on the host."""
        without_xla(self.session, self.model)
        return self._methods.own("make_test_function")(force=force)

    def _planned(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return a train function that makes the ranks equal, and plans each new graph before it runs."""
        function, ahead = inner, TraceAhead(inner)
        planned_by: int | None = None  # which `prepare`

        def train_function(iterator: Any) -> Any:
            nonlocal function, ahead, planned_by
            if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                # Tracing must not use a generator up.
                iterator = list(itertools.islice(iterator, self.model.steps_per_execution))
            self.prepare(batch_of(iterator))
            self._end_warm_up()
            if planned_by not in (None, self._times_prepared):  # its graph holds a plan that was replaced
                function = self._make_anew()
                ahead = TraceAhead(function)
            planned_by = self._times_prepared
            for _ in range(_MOST_PLANS):
                if self._plan(ahead, iterator):
                    break
                function = self._make_anew()
                ahead = TraceAhead(function)
            else:
                raise HvpipeError(
                    "train_step should have gradients for the same variables whenever it is traced. "
                    f"Received: different variables in each of {_MOST_PLANS} traces"
                )
            self._resume_held()  # only now is the plan certain
            assert self._hook is not None
            self._hook.begin_steps(self.train_counter.total)
            logs = self._run(function, iterator)
            self._hook.end_steps(int(self.model.steps_per_execution), self.train_counter.total)
            self._steps_seen += 1
            if self._steps_seen == 1:
                self._warn_of_equal_batches()
            self._check_step()
            return logs

        return train_function

    def _check_step(self) -> None:
        """After a step: look for NaN and Inf, and compare the ranks if it is time to."""
        assert self._hook is not None
        before = self._steps_run - int(self.model.steps_per_execution)
        self._hook.tell_of_nonfinite()
        if self.compares_next and self.overlap.exact and self.session.world.size > 1:
            self.hold()
            tell_of_unaveraged(self.session, self.model, self._equal())
        self.compares_next = False
        every = self._verify_every
        if every and self._steps_run // every > before // every:
            self.hold()
            verify_equal(self.session, self._equal(), self._steps_run)

    def on_purpose(self) -> list[Any]:
        """Return the variables that only an update inside `alone` trains."""
        averaged = set() if self._hook is None else set(map(identity, self._hook.variables))
        own = self._on_purpose - averaged
        return [v for v in self.model.variables if identity(v) in own] if own else []

    def _equal(self) -> list[Any]:
        return equal_on_all_ranks(self.model, self.on_purpose())

    def _alone(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return the train function of a single rank, which only needs a guard, if any."""
        if self._options.nonfinite == "ignore":
            return inner
        self._end_guard()
        self._guarded = self.model.optimizer
        return guarded_alone(self._options.nonfinite, self.model, inner, self.session)

    def _run(self, function: Callable[..., Any], iterator: Any) -> Any:
        """Call the train function, which runs pending updates first, and return the logs.

        If it fails in a step that this rank can neither complete nor repeat, all ranks end with an error.
        """
        with self.between_steps:
            return self._run_alone(function, iterator)

    def _run_alone(self, function: Callable[..., Any], iterator: Any) -> Any:
        begun, waited = self.session.engine.steps_begun(), self._pending
        self._pending = False
        try:
            logs = function(iter(iterator) if isinstance(iterator, list) else iterator)
        except Exception as error:
            self._pending = waited
            if not isinstance(error, (StopIteration, tf.errors.OutOfRangeError)):
                # TensorFlow cancels what else the graph was doing, such as the updates of the step before.
                updating = waited and self.overlap.defers
                if updating or self.session.engine.steps_begun() > begun:
                    self.session.engine.fail_in_step(f"{type(error).__name__}: {error}")
            raise
        except BaseException:
            self._pending = True  # Ctrl-C, which Python raises once the graph has run
            raise
        self._pending = True
        if self.elastic is not None:
            self.elastic.ran()
        self._steps_run += int(self.model.steps_per_execution)
        # The call has updated with the gradients of the step before, if that is left to the next step. Now,
        # because another thread may run this step's update next.
        assert self._hook is not None
        self._hook.look_for_nonfinite(self._steps_run - (1 if self.overlap.defers else 0))
        return logs

    def _timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        durations_s = self.session.step_durations_s
        last_s = [0.0]

        def train_function(iterator: Any) -> Any:
            begun_s = time.monotonic()
            logs = inner(iterator)
            ended_s = time.monotonic()
            # From one end to the next, so that waiting for input counts, but not the pause between epochs.
            steps = self.model.steps_per_execution
            since_s = last_s[0] if last_s[0] > begun_s - (ended_s - begun_s) else begun_s
            durations_s.extend([(ended_s - since_s) / steps] * steps)
            last_s[0] = ended_s
            return logs

        return train_function

    # --- The plan -----------------------------------------------------------------------------------------

    def prepare(self, batch: Any) -> None:
        """Start from rank 0's state, and hook the optimizer, unless that is done; collective.

        `batch` is one, or the spec of one. A single rank only builds the model and its optimizer.
        """
        if self.ready:
            return
        if self.session.world.size == 1 and self.elastic is None:
            build_state(self.model, batch)
            return
        start_equal(self.session, self.model, batch)
        self.untrained.check()
        self.untrained.start()
        if self.sync_batch_norm:  # only now do all layers exist
            normalise_over_ranks(self.model)
        warn_of_own_batches(self.session, self.model)
        self._hook_optimizer(self._expected_variables())
        self.ready = True
        self._times_prepared += 1

    def _expected_variables(self) -> list[Any]:
        """Return what the first step probably trains: the variables that the optimizer was built for."""
        trainable = self.model.trainable_variables
        known = set(map(identity, trained_variables(self.model.optimizer)))
        return [v for v in trainable if identity(v) in known] or list(trainable)

    def _warms_up(self) -> bool:
        steps = self._steps_run if self._held is None else self._held[1]
        return self._compression is not None and steps < self._overlap_options.warmup_steps

    def _end_warm_up(self) -> None:
        """Compress from the first step after the warm-up on: with other buckets, so in a new graph."""
        if self._hook is None or self._compression is None or self._compresses or self._warms_up():
            return
        steps = self._hook.steps
        self._hook_optimizer(self._hook.variables)
        self._hook.resume((), steps)
        self._times_prepared += 1

    def _plan(self, ahead: TraceAhead, iterator: Any) -> bool:
        """Trace the call's step. If its graph does not fit the plan, plan anew and return False."""
        hook = self._hook
        assert hook is not None
        misfit = next((f for f in hook.look(lambda: ahead.trace(iterator)) if not hook.fits(f)), None)
        if misfit is None:
            return True
        if self.overlap.updates_in_next_step and misfit.must_update_at_once:
            self.overlap = BackwardOverlap
            self._warn_of_early_use(misfit)
        self._dense_tables |= misfit.dense_tables
        # The same variables keep their order: the buckets depend on it, and with them the last bits.
        self._hook_optimizer(hook.variables if misfit.trains(hook.variables) else misfit.trained)
        return False

    def _make_anew(self) -> Any:
        """Return a new train function of the model's own, in place of one with a graph that must not run."""
        installed = self.model.train_function
        self._methods.own("make_train_function")(force=True)
        made, self.model.train_function = self.model.train_function, installed
        return made

    def _hook_optimizer(self, variables: Sequence[Any]) -> None:
        """Hook the model's optimizer for variables that are expected to have gradients."""
        self._run_pending()
        self._look_for_nonfinite()
        self._end_refusal()
        if self._hook is not None:
            self._hook.unhook()
        if not variables:
            raise HvpipeError(
                "Training needs at least one trainable variable. "
                f"Received: model {self.model.name} without any"
            )
        self._check_rounds()
        # Eager steps have no graph to move an update into. The weights are the same.
        overlap = BackwardOverlap if self._is_eager and self.overlap.updates_in_next_step else self.overlap
        check_compressible(self.model.optimizer, self._options.compression)
        self._compresses = self._compression is not None and not self._warms_up()
        exact = self._compression is not None and not self._compresses
        compression = None if exact else self._options.compression
        tables = tables_of(self.model) - self._dense_tables
        options = replace(self._options, tables=tables, compression=compression)
        self._hook = OptimizerHook(
            self.session, self.model.optimizer, variables, overlap(self._overlap_options), options
        )
        self._hook.hook()

    def _check_rounds(self) -> None:
        """Raise HvpipeError if a round of "local" would end within a call of the train function."""
        every, steps = self._overlap_options.rounds.every, int(self.model.steps_per_execution)
        if not self.overlap.reduces_gradients and every % steps:
            raise HvpipeError(
                "every should be a multiple of steps_per_execution. "
                f"Received: every={every} with steps_per_execution={steps}"
            )

    def _warn_of_early_use(self, findings: StepFindings) -> None:
        if self.session.world.rank == 0:
            logger.warning(
                "hvpipe: train_step of model %s may use weights after the optimizer's update, which "
                'overlap="step" would do in the next step: overlap="backward" is used instead. Received: %s',
                self.model.name,
                findings,
            )

    def _warn_of_equal_batches(self) -> None:
        prints = self.session.engine.agree("fingerprint of the first batch", float(self._fingerprint.numpy()))
        if self.session.world.rank == 0 and len(set(prints)) == 1:
            warnings.warn(
                "All ranks read the same first batch: they would all train on the same data. Give each rank "
                "its own part, for example with hvpipe.keras.shard(dataset).",
                stacklevel=2,
            )

    # --- Inside a step ------------------------------------------------------------------------------------

    def counted_train_step(self, data: Any) -> Any:
        """Stand in for `model.train_step` on a single rank."""
        self.train_counter.add(data)
        return self._methods.own("train_step")(data)

    def train_step(self, data: Any) -> Any:
        """Stand in for `model.train_step`: run pending updates first, then reduce gradients."""
        assert self._hook is not None
        first = self.train_counter.is_new()
        with on_the_host():
            self._fingerprint.assign(
                tf.cond(first, lambda: fingerprint_of(data), lambda: self._fingerprint.read_value())
            )
        samples = self.train_counter.add(data)
        data = self._hook.begin(samples, data)
        reductions = self.session.announcements
        with step_of(self.session, self.model) as step:
            logs = self._methods.own("train_step")(data)
        if self.session.announcements == reductions and not self._hook.applied:
            raise HvpipeError(
                "train_step should update with the optimizer given to compile, or with others wrapped in "
                "hvpipe.keras.DistributedOptimizer; otherwise the ranks' weights drift apart. "
                f"Received: train_step of {type(self.model).__name__}, which reduces no gradient"
            )
        self._on_purpose |= set(map(identity, step.on_purpose))
        if step.found:
            tell_of_optimizers(self.session, self.model, step.found)
        self._hook.end()
        return logs

    def test_step(self, data: Any) -> Any:
        """Stand in for `model.test_step`."""
        self.test_counter.add(data)
        return self._methods.own("test_step")(data)
