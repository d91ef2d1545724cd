"""The steps of `fit` on all ranks: the train function, and what is added inside of it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.bucket_reducer import tables_of
from hvpipe.keras.data_parallel.overlap import OverlappedOptimizer, applied_outside
from hvpipe.keras.data_parallel.shards import SampleCounter, batch_of, fingerprint_of, first_leaf
from hvpipe.keras.gpu import on_the_host
from hvpipe.keras.initial_state import start_equal, without_xla
from hvpipe.keras.instance_methods import InstanceMethods
from hvpipe.session import Session

logger = logging.getLogger("hvpipe")


class TrainSteps:
    """Stands in for a model's `make_train_function`, `train_step` and `test_step`; hooks its optimizer.

    `methods` holds the model's own; `make_optimizer` makes an OverlappedOptimizer of an optimizer, variables
    and `overlap`. `ready` says whether the ranks have started equal, `overlap` what is in use: "backward"
    where a train_step rules out the "step" that was asked for.
    """

    def __init__(
        self,
        session: Session,
        model: Any,
        methods: InstanceMethods,
        overlap: str,
        make_optimizer: Callable[..., OverlappedOptimizer],
    ) -> None:
        self.session = session
        self.model = model
        self.overlap = overlap
        self.ready = False
        # One rank is left its XLA, which reaches no variable on another device than the model's.
        with contextlib.nullcontext() if session.world.size == 1 else on_the_host():
            self.train_counter, self.test_counter = SampleCounter(), SampleCounter()
        self._methods = methods
        self._make_optimizer = make_optimizer
        self._optimizer: OverlappedOptimizer | None = None
        self._refusing: Any = None  # the optimizer that refuses updates, as no step has hooked it yet
        self._pending = False
        self._steps_seen = 0
        session.sample_counters.append(self.train_counter)
        # Made of the first batch: by it, equal data on all ranks is found out.
        self._fingerprint = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="hvpipe_batch")

    def flush(self) -> None:
        """Finish updates that wait for the next step. Not collective: what is waited for has been sent."""
        if self._pending and self._optimizer is not None:
            self._optimizer.flush()
        self._pending = False

    def unhook(self) -> None:
        """Finish, and give the optimizer its own methods back."""
        self._end_refusal()
        self.flush()
        if self._optimizer is not None:
            self._optimizer.unhook()

    def refuse_outside(self) -> None:
        """Let the model's optimizer refuse updates until the first step hooks it.

        In a loop outside of `fit` the ranks would train apart. One that is wrapped already reduces there too.
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

    # --- The train function -------------------------------------------------------------------------------

    def make_train_function(self, force: bool = False) -> Any:
        """Stand in for `model.make_train_function`: also prepares, checks and times what it makes."""
        model = self.model
        if model.train_function is not None and not force:
            return model.train_function
        without_xla(self.session, model)
        self._methods.own("make_train_function")(force=True)
        inner = model.train_function
        model.train_function = self._timed(inner if self.session.world.size == 1 else self._checked(inner))
        self.ready = False
        return model.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Stand in for `model.make_test_function`: XLA cannot reach the counter, which is on the host."""
        without_xla(self.session, self.model)
        return self._methods.own("make_test_function")(force=force)

    def _checked(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """The train function; made again where tracing shows that some variables have no gradient."""
        holder = [inner]

        def train_function(iterator: Any) -> Any:
            if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                # A generator that a failed trace would use up.
                iterator = list(itertools.islice(iterator, self.model.steps_per_execution))
            if not self.ready:
                self._prepare(batch_of(iterator))
            logs = None
            while logs is None:
                logs = self._call_or_make_anew(holder, iterator)
            self._pending = True
            self._steps_seen += 1
            if self._steps_seen == 1:
                self._warn_of_equal_batches()
            return logs

        return train_function

    def _call_or_make_anew(self, holder: list[Callable[..., Any]], iterator: Any) -> Any:
        """The logs of a call; None if the train function was made again instead."""
        waited, self._pending = self._pending, False  # the call finishes what waits
        try:
            return self._call(holder[0], iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            self._pending = waited  # or not: the data had come to its end
            raise
        except Exception as error:
            self._pending = waited
            if not self._plan_anew():
                self.session.engine.fail_if_announced(f"{type(error).__name__}: {error}")
                raise
        installed = self.model.train_function
        self._methods.own("make_train_function")(force=True)
        holder[0], self.model.train_function = self.model.train_function, installed
        return None

    def _plan_anew(self) -> bool:
        """After a failed call: whether that was in tracing, and the optimizer is hooked now as it must be."""
        assert self._optimizer is not None
        others, early = self._optimizer.other_variables, self._optimizer.used_early
        if early:
            if self.session.world.rank == 0:
                logger.warning(
                    "hvpipe: train_step of model %s uses %s after the optimizer's update, which "
                    'overlap="step" puts off to the next step: overlap="backward" is used instead.',
                    self.model.name,
                    ", ".join(early[:3]) + (" ..." if len(early) > 3 else ""),
                )
            self.overlap = "backward"
            self._hook_optimizer(self._optimizer.reducer.variables)
        elif others:
            self._hook_optimizer(others)
        return bool(early or others)

    def _call(self, function: Callable[..., Any], iterator: Any) -> Any:
        return function(iter(iterator) if isinstance(iterator, list) else iterator)

    def _timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        durations_s = self.session.step_durations_s
        last_s = [0.0]

        def train_function(iterator: Any) -> Any:
            begun_s = time.monotonic()
            logs = inner(iterator)
            ended_s = time.monotonic()
            # From end to end, so that waiting for input counts; not over the pause between two epochs.
            steps = self.model.steps_per_execution
            since_s = last_s[0] if last_s[0] > begun_s - (ended_s - begun_s) else begun_s
            durations_s.extend([(ended_s - since_s) / steps] * steps)
            last_s[0] = ended_s
            return logs

        return train_function

    def _prepare(self, batch: Any) -> None:
        """Start from rank 0's state, and hook the optimizer; collective."""
        start_equal(self.session, self.model, batch)
        self._hook_optimizer(self.model.trainable_variables)
        self.ready = True

    def _hook_optimizer(self, variables: Sequence[Any]) -> None:
        self.flush()
        self._end_refusal()
        if self._optimizer is not None:
            self._optimizer.unhook()
        if not variables:
            raise HvpipeError(
                "Training wants at least one trainable variable. "
                f"Received: model {self.model.name} without any"
            )
        # Eagerly there is no next step's graph to put an update off to; the weights are the same.
        eager = self.overlap == "step" and self.model.run_eagerly
        overlap = "backward" if eager else self.overlap
        self._optimizer = self._make_optimizer(
            self.model.optimizer, variables, overlap=overlap, tables=tables_of(self.model)
        )
        self._optimizer.hook()

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
        self.train_counter.add(first_leaf(data))
        return self._methods.own("train_step")(data)

    def train_step(self, data: Any) -> Any:
        """Stand in for `model.train_step`: what waits is finished first, then gradients are reduced."""
        assert self._optimizer is not None
        batch = first_leaf(data)
        first = self.train_counter.is_new()
        self._fingerprint.assign(
            tf.cond(first, lambda: fingerprint_of(batch), lambda: self._fingerprint.read_value())
        )
        samples = self.train_counter.add(batch)
        data = self._optimizer.begin(samples, data)
        reductions = self.session.announcements
        logs = self._methods.own("train_step")(data)
        if self.session.announcements == reductions:
            raise HvpipeError(
                "train_step should update with the optimizer given to compile, or with others wrapped in "
                "hvpipe.keras.DistributedOptimizer: else the ranks train apart. "
                f"Received: train_step of {type(self.model).__name__}, which reduces no gradient"
            )
        self._optimizer.end()
        return logs

    def test_step(self, data: Any) -> Any:
        """Stand in for `model.test_step`."""
        self.test_counter.add(first_leaf(data))
        return self._methods.own("test_step")(data)
