"""The steps of `fit` on all ranks: the train function, and hvpipe's additions inside a step."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.bucket_reduce import ReduceOptions
from hvpipe.keras.data_parallel.nonfinite import guarded_alone
from hvpipe.keras.data_parallel.optimizer_hook import OptimizerHook
from hvpipe.keras.data_parallel.overlap import Overlap, OverlapOptions
from hvpipe.keras.data_parallel.planned_updates import PlannedUpdates
from hvpipe.keras.data_parallel.samples import SampleCounter, SamplesIn
from hvpipe.keras.data_parallel.shards import batch_of, fingerprint_of
from hvpipe.keras.data_parallel.trace_ahead import PlannedFunction
from hvpipe.keras.data_parallel.untrained_state import UntrainedState
from hvpipe.keras.data_parallel.verify import equal_on_all_ranks, tell_of_unaveraged, verify_equal
from hvpipe.keras.gpu import on_the_host
from hvpipe.keras.initial_state import build_state, start_equal, warn_of_own_batches, without_xla
from hvpipe.keras.instance_methods import InstanceMethods
from hvpipe.keras.named.sync_batch_norm import normalise_over_ranks
from hvpipe.keras.training_alone import step_of, tell_of_optimizers
from hvpipe.keras.variables import identity
from hvpipe.session import Session

TrainFunction = Callable[[Any], Any]
"""Takes an iterator over batches, and returns logs."""


class TrainSteps:
    """Stands in for a model's `make_train_function`, `train_step` and `test_step`.

    Args:
        session: The ranks that train together.
        model: A Keras model.
        methods: The model's own methods.
        overlap: The mode that was asked for.
        overlap_options: What only some modes use.
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
        self.untrained = UntrainedState(session, model)
        """What layers keep and no gradient trains."""
        # A single rank may use XLA, which reaches no variable on another device than the model's.
        self._alone = session.world.size == 1
        with contextlib.nullcontext() if self._alone else on_the_host():
            self.train_counter, self.test_counter = SampleCounter(samples_in), SampleCounter(samples_in)
        self.samples_in = samples_in
        """Counts the samples of a batch."""
        self.updates = PlannedUpdates(
            session, model, overlap, overlap_options, options, self.train_counter.total
        )
        """The updates of the steps."""
        self.around: Callable[[TrainFunction], TrainFunction] = lambda function: function
        """Returns a train function with what an elastic job adds to each call."""
        self._methods = methods
        self._nonfinite = options.nonfinite
        self._verify_every = verify_every
        self._on_purpose: set[int] = set()  # what `train_step` updates inside `alone`, by `identity`
        self.compares_next = True
        """Whether to look for weights that nobody averages after the next step: the first one of a `fit`."""
        self.sync_batch_norm = sync_batch_norm
        """Whether layers normalise over all ranks, until `detach`."""
        self._guarded: Any = None  # the optimizer of a single rank whose `apply` has a guard
        session.sample_counters.append(self.train_counter)
        # Of the first batch. If it is equal on all ranks, they probably read the same data.
        with on_the_host():
            self._fingerprint = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="hvpipe_batch")

    def unhook(self) -> None:
        """Run the update that waits, and restore the optimizer's own methods."""
        self.updates.unhook()
        self._end_guard()

    def _end_guard(self) -> None:
        if self._guarded is not None:
            vars(self._guarded).pop("apply", None)
        self._guarded = None

    # --- The train function -------------------------------------------------------------------------------

    def make_train_function(self, force: bool = False) -> Any:
        """Stand in for `model.make_train_function`: prepare, plan and time what Keras' function does."""
        model = self.model
        if model.train_function is not None and not force:
            return model.train_function
        without_xla(self.session, model)
        self._methods.own("make_train_function")(force=True)
        inner = model.train_function
        inner = self._guarded_alone(inner) if self._alone else self.around(self._planned(inner))
        model.train_function = self._timed(inner)
        self.updates.ready = False
        return model.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Stand in for `model.make_test_function`: XLA cannot reach the counter, which is on the host."""
        without_xla(self.session, self.model)
        return self._methods.own("make_test_function")(force=force)

    def _planned(self, inner: TrainFunction) -> TrainFunction:
        """Return a train function that makes the ranks equal, and plans each new graph before it runs."""
        updates, counted = self.updates, self.train_counter.total
        planned = PlannedFunction(inner, self._make_anew, updates)

        def train_function(iterator: Any) -> Any:
            if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                # Tracing must not use a generator up.
                iterator = list(itertools.islice(iterator, self.model.steps_per_execution))
            self.prepare(batch_of(iterator))
            updates.end_warm_up()
            function = planned.fitted(iterator)
            updates.resume_held()  # only now is the plan certain
            rounds = updates.mode.rounds
            rounds.begin_steps(counted)
            with updates.between_steps:
                logs = self._run_locked(function, iterator)
            rounds.end_steps(int(self.model.steps_per_execution), counted)
            if updates.calls == 1:
                self._warn_of_equal_batches()
            self._check_step()
            return logs

        return train_function

    def _check_step(self) -> None:
        """After a step: look for NaN and Inf, and compare the ranks if it is time to."""
        updates, hook = self.updates, self._hook
        before = updates.steps - int(self.model.steps_per_execution)
        hook.tell_of_nonfinite()
        if self.compares_next and updates.overlap.exact and self.session.world.size > 1:
            updates.hold()
            tell_of_unaveraged(self.session, self.model, self._equal())
        self.compares_next = False
        every = self._verify_every
        if every and updates.steps // every > before // every:
            updates.hold()
            verify_equal(self.session, self._equal(), updates.steps)

    def on_purpose(self) -> list[Any]:
        """Return the variables that only an update inside `alone` trains."""
        hook = self.updates.hook
        averaged = set() if hook is None else set(map(identity, hook.variables))
        own = self._on_purpose - averaged
        return [v for v in self.model.variables if identity(v) in own] if own else []

    def _equal(self) -> list[Any]:
        return equal_on_all_ranks(self.model, self.on_purpose())

    def _guarded_alone(self, inner: TrainFunction) -> TrainFunction:
        """Return the train function of a single rank, which only needs a guard, if any."""
        if self._nonfinite == "ignore":
            return inner
        self._end_guard()
        self._guarded = self.model.optimizer
        return guarded_alone(self._nonfinite, self.model, inner, self.session)

    def _run_locked(self, function: TrainFunction, iterator: Any) -> Any:
        """Call the train function, which runs a waiting update first, and return the logs.

        If it fails in a step that this rank can neither complete nor repeat, all ranks end with an error.
        """
        mode, engine = self.updates.mode, self.session.engine
        begun = engine.steps_begun()
        waited, mode.waits = mode.waits, False
        try:
            logs = function(iter(iterator) if isinstance(iterator, list) else iterator)
        except Exception as error:
            mode.waits = waited
            # TensorFlow cancels what else the graph was doing, such as the updates of the step before.
            under_way = waited or engine.steps_begun() > begun
            if under_way and not isinstance(error, (StopIteration, tf.errors.OutOfRangeError)):
                engine.fail_in_step(f"{type(error).__name__}: {error}")
            raise
        except BaseException:
            mode.ran()  # Ctrl-C, which Python raises once the graph has run
            raise
        self.updates.ran()
        return logs

    def _timed(self, inner: TrainFunction) -> TrainFunction:
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

    def prepare(self, batch: Any) -> None:
        """Start from rank 0's state, and hook the optimizer, unless that is done; collective.

        `batch` is one, or the spec of one. A single rank only builds the model and its optimizer.
        """
        if self.updates.ready:
            return
        if self._alone:
            build_state(self.model, batch)
            return
        start_equal(self.session, self.model, batch)
        self.untrained.check()
        self.untrained.start()
        if self.sync_batch_norm:  # only now do all layers exist
            normalise_over_ranks(self.model)
        warn_of_own_batches(self.session, self.model)
        self.updates.start()

    def _make_anew(self) -> TrainFunction:
        """Return a new train function of the model's own, in place of one with a graph that must not run."""
        installed = self.model.train_function
        self._methods.own("make_train_function")(force=True)
        made: TrainFunction = self.model.train_function
        self.model.train_function = installed
        return made

    def _warn_of_equal_batches(self) -> None:
        prints = self.session.engine.agree("fingerprint of the first batch", float(self._fingerprint.numpy()))
        if self.session.world.rank == 0 and len(set(prints)) == 1:
            warnings.warn(
                "All ranks read the same first batch: they would all train on the same data. Give each rank "
                "its own part, for example with hvpipe.keras.shard(dataset).",
                stacklevel=2,
            )

    # --- Inside a step ------------------------------------------------------------------------------------

    @property
    def _hook(self) -> OptimizerHook:
        assert self.updates.hook is not None
        return self.updates.hook

    def counted_train_step(self, data: Any) -> Any:
        """Stand in for `model.train_step` on a single rank."""
        self.train_counter.add(data)
        return self._methods.own("train_step")(data)

    def train_step(self, data: Any) -> Any:
        """Stand in for `model.train_step`: run pending updates first, then reduce gradients."""
        hook = self._hook
        first = self.train_counter.is_new()
        with on_the_host():
            self._fingerprint.assign(
                tf.cond(first, lambda: fingerprint_of(data), lambda: self._fingerprint.read_value())
            )
        samples = self.train_counter.add(data)
        data = hook.begin(samples, data)
        reductions = self.session.announcements
        with step_of(self.session, self.model) as step:
            logs = self._methods.own("train_step")(data)
        if self.session.announcements == reductions and not hook.applied:
            raise HvpipeError(
                "train_step should update with the optimizer given to compile, or with others wrapped in "
                "hvpipe.keras.DistributedOptimizer; otherwise the ranks' weights drift apart. "
                f"Received: train_step of {type(self.model).__name__}, which reduces no gradient"
            )
        self._on_purpose |= set(map(identity, step.on_purpose))
        if step.found:
            tell_of_optimizers(self.session, self.model, step.found)
        hook.end()
        return logs

    def test_step(self, data: Any) -> Any:
        """Stand in for `model.test_step`."""
        self.test_counter.add(data)
        return self._methods.own("test_step")(data)
