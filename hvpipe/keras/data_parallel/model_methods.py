"""The methods that replace those of a data-parallel model: `fit`, `evaluate`, `train_on_batch` and others."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.errors import HvpipeError, MismatchError, listed
from hvpipe.keras.arguments import by_name, keep_order, takes
from hvpipe.keras.callbacks import average_logs, means_in_logs, reads_at_batches, stop_together
from hvpipe.keras.compat import (
    check_compiled,
    enumerate_epochs,
    initial_epoch,
    is_own_validation,
    learning_rate_variable,
    metrics_in_order,
    reconfigure_callbacks,
    set_initial_epoch,
    with_epochs,
    without_cached_data,
)
from hvpipe.keras.data_parallel.copies import forget_copies
from hvpipe.keras.data_parallel.elastic import Elastic
from hvpipe.keras.data_parallel.fit_callbacks import FinishAtEpochEnd, FinishAtEveryBatch, StartTogether
from hvpipe.keras.data_parallel.local_rounds import parts_of
from hvpipe.keras.data_parallel.shards import cut_to_the_shortest, sharded_anew, source_of
from hvpipe.keras.data_parallel.train_steps import TrainSteps
from hvpipe.keras.fit_call import FitCall, in_order, running
from hvpipe.keras.initial_state import (
    broadcast_model,
    is_built,
    shared_checksum,
    take_rank_0s,
)
from hvpipe.keras.instance_methods import InstanceMethods
from hvpipe.keras.named.sync_batch_norm import normalise_alone
from hvpipe.keras.one_writer import with_one_writer
from hvpipe.keras.training_alone import refuse_alone
from hvpipe.session import Session, run_directly

logger = logging.getLogger("hvpipe")

# Methods that read or write weights outside a step; each flushes first. keras.saving and tf.saved_model do
# not call `save`, but `get_config`, `save_own_variables` or `load_own_variables`.
_FLUSH_FIRST = (
    "export",
    "get_config",
    "get_state_tree",
    "get_weights",
    "load_own_variables",
    "load_weights",
    "predict",
    "predict_on_batch",
    "save",
    "save_own_variables",
    "save_weights",
    "set_state_tree",
    "set_weights",
    "test_on_batch",
)
# Of these, the methods that may change weights, perhaps on one rank only.
_SET = ("load_own_variables", "load_weights", "set_state_tree", "set_weights")

# And those that another thread may call during `fit`: no step begins until they return.
_BETWEEN_STEPS = (*_SET, "get_state_tree", "get_weights", "save", "save_own_variables", "save_weights")
_STEP_S = 2.0  # the longest that they wait for a step to end


class DataParallel:
    """The data-parallel methods of one model. They replace the model's own methods on the instance.

    Args:
        model: The model.
        methods: The model's own methods.
        steps: The model's steps on all ranks.
        elastic: Lets them survive the loss of ranks; None if that was not asked for.
    """

    def __init__(
        self, model: Any, methods: InstanceMethods, steps: TrainSteps, elastic: Elastic | None
    ) -> None:
        self.session: Session = steps.session
        self.model = model
        self.steps = steps
        self.updates = steps.updates
        self.elastic = elastic
        self.fit_call = FitCall()
        """The `fit` that runs."""
        self._methods = methods
        self._set = False  # whether the model's methods have set weights since the ranks last compared them
        self._means: dict[str, tuple[float, float]] | None = None  # of the epoch, from its validation on
        self._samples_before_fit = 0.0  # since the end of the last epoch
        self._combined_at = 0.0  # samples in all, when untrained state was combined

    # --- Attaching ------------------------------------------------------------------------------------

    @staticmethod
    def of(model: Any) -> DataParallel | None:
        """Return the DataParallel that was last attached to a model, or None."""
        found: DataParallel | None = vars(model).get("_hvpipe")
        return found

    def attach(self) -> None:
        """Replace methods on the model instance."""
        vars(self.model)["_hvpipe"] = self
        self._methods.replace("make_train_function", self.steps.make_train_function)
        if self.session.world.size == 1:
            self._methods.replace("train_step", self.steps.counted_train_step)
            self._methods.replace("fit", self._fit_alone)
            self.model.train_function = None
            return
        self._methods.replace("train_step", self.steps.train_step)
        self._methods.replace("test_step", self.steps.test_step)
        self._methods.replace("make_test_function", self.steps.make_test_function)
        self._methods.replace("compile", self._compile)
        self._methods.replace("fit", self._fit)
        self._methods.replace("evaluate", self._evaluate)
        self._methods.replace("train_on_batch", self._train_on_batch)
        for name in _FLUSH_FIRST:
            self._methods.replace(name, functools.partial(self._flush_first, name))
        self.model.train_function = None
        self.model.test_function = None
        self.updates.refuse_outside()

    def detach(self) -> None:
        """Restore the model's own methods."""
        self.steps.unhook()
        self._methods.restore()
        if self.steps.sync_batch_norm:
            normalise_alone(self.model)
        vars(self.model).pop("_hvpipe", None)
        forget_copies(self.model)
        self.model.train_function = None
        self.model.test_function = None

    # --- Around steps -------------------------------------------------------------------------------------

    def begin_fit(self) -> None:
        """Continue with rank 0's state and epoch, whatever was loaded or set on some ranks; collective.

        Before the first step there is nothing to synchronise. After `train_on_batch`, BatchNormalization's
        statistics may differ between ranks, so combine them.
        """
        model, updates = self.model, self.updates
        updates.complete()
        self.steps.compares_next = True
        self._set = False
        checksum = self._checksum() if updates.ready else 0.0
        # The epoch is what BackupAndRestore found on rank 0, for example.
        row = np.array([[float(updates.ready), checksum, float(initial_epoch(model))]])
        self.session.engine.agree("start of fit")
        ready, weights, epochs = self.session.engine.allgather(row).T
        set_initial_epoch(model, int(epochs[0]))
        updates.ready = bool(ready.all())
        if not updates.ready or self._take_rank_0s(weights, "at the start of fit"):
            return
        self._combine(self._samples_before_fit or 1.0)

    def begin_epoch(self, epoch: int) -> None:
        """Continue with rank 0's state if callbacks have changed it on some ranks; collective."""
        when = f"at the start of epoch {epoch + 1}"
        self._means = None
        anywhere = self.session.engine.agree(when.removeprefix("at the "), float(self._set))
        rates = self.session.engine.agree(f"learning rate {when}", self._sum_of_rates())
        self._take_rank_0s_if_set([*anywhere, *(rate != rates[0] for rate in rates)], when)
        self.steps.untrained.start()  # a callback may have set them, by a layer or variable

    def _sum_of_rates(self) -> float:
        """Return the sum of the learning rates that callbacks can set. Schedules have none."""
        rates = map(learning_rate_variable, parts_of(self.model.optimizer))
        return sum(float(rate.numpy()) for rate in rates if isinstance(rate, keras.Variable))

    def _take_rank_0s_if_set(self, anywhere: Sequence[float], when: str) -> None:
        self._set = False
        if not any(anywhere) or not self.updates.ready:
            return
        self.updates.flush()
        self._take_rank_0s(self.session.engine.agree(f"weights {when}", self._checksum()), when)

    def _combine(self, weight: float) -> None:
        """Combine the state that no gradient trains; collective."""
        total = self.steps.train_counter.total()
        if total == self._combined_at:  # what has changed since was set, by layers or variables
            self.steps.untrained.start()
        self.steps.untrained.combine(weight)
        self._combined_at = total

    def _checksum(self) -> float:
        return shared_checksum(self.model, self.statistics() + self.steps.on_purpose(), self.equal_slots())

    def _take_rank_0s(self, sums: Sequence[float], when: str) -> bool:
        taken = take_rank_0s(self.session, self.model, sums, when)
        if taken:
            self.steps.untrained.start()
        return taken

    def end_epoch(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """Flush, then combine statistics, and average logs over all ranks; collective."""
        # Keras adds the validation's results, which `evaluate` has averaged already.
        own = {name: value for name, value in (logs or {}).items() if not name.startswith("val_")}
        averaged = self.session.run_section(functools.partial(self._average, epoch, own))
        self.steps.train_counter.restart()
        if self.elastic is not None:
            self.elastic.data.ended = False
        if logs:
            logs.update(averaged)

    def _average(self, epoch: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        self.updates.complete()
        samples = self.steps.train_counter.since_restart()
        self.session.engine.agree(f"end of epoch {epoch + 1}")
        self._combine(samples)
        averaged = dict(logs)
        if averaged:
            means = means_in_logs(self.model) if self._means is None else self._means
            average_logs(self.session, averaged, samples, f"logs of epoch {epoch + 1}", means=means)
        return averaged

    def statistics(self) -> list[Any]:
        """Return the state that layers keep. Frozen weights, equal on all ranks, are not included."""
        return [variable for variable, _ in self.steps.untrained.variables()]

    def equal_slots(self) -> list[Any]:
        """Return the optimizer's variables that are equal on all ranks."""
        return self.updates.overlap.equal_slots(self.model.optimizer)

    def own_weights(self) -> list[Any]:
        """Return the weights that may differ between ranks at the end of a step."""
        return [*self.statistics(), *self.updates.overlap.own_weights(self.model)]

    # --- The model's methods ------------------------------------------------------------------------------

    def _fit(self, *args: Any, **kwargs: Any) -> Any:
        model, own = self.model, self._methods.own("fit")
        check_compiled(model, "fit")
        refuse_alone(model, "fit")
        if not takes(own, "callbacks"):
            raise HvpipeError(
                "fit should take callbacks, or pass **kwargs on to Keras: data_parallel adds callbacks. "
                f"Received: {type(model).__name__}.fit{inspect.signature(own)}"
            )
        given = by_name(own, args, kwargs, functools.partial(keras.Model.fit, model))
        keep_order(own, given)
        self.fit_call = FitCall(given.get("x"), given.get("steps_per_epoch"))
        given["callbacks"] = self._with_own_callbacks(given.get("callbacks"))
        self._samples_before_fit = self.steps.train_counter.restart()
        try:
            cut = functools.partial(cut_to_the_shortest, self.session)
            with running(self.fit_call.callbacks), with_epochs(self.model, cut), self._elastic_epochs():
                return own(**given)
        except BaseException:
            # The last step is complete, unless it is the one that failed: its gradients are under way.
            with contextlib.suppress(Exception):
                self.updates.flush()
            raise
        finally:
            self.fit_call = FitCall()  # whose data and callbacks may be large

    @contextlib.contextmanager
    def _elastic_epochs(self) -> Iterator[None]:
        """Let an epoch of shared data get longer if ranks are lost."""
        elastic = self.elastic
        if elastic is None:
            yield
            return
        if self.model.steps_per_execution != 1:
            raise HvpipeError(
                "--elastic needs one step for each call of the train function. "
                f"Received: steps_per_execution={self.model.steps_per_execution}"
            )
        source = source_of(self.fit_call.x)
        elastic.begin_fit(source, self.fit_call.steps_per_epoch, self.fit_call.callbacks)
        with contextlib.ExitStack() as stack:
            stack.callback(elastic.end_fit)
            if source is not None:
                change = functools.partial(enumerate_epochs, epoch=elastic.data.epoch)
                stack.enter_context(with_epochs(self.model, change))
            yield

    def _fit_alone(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `model.fit` on a single rank."""
        own = self._methods.own("fit")
        if not takes(own, "callbacks"):
            return own(*args, **kwargs)
        given = by_name(own, args, kwargs, functools.partial(keras.Model.fit, self.model))
        keep_order(own, given)
        callbacks = given.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            given["callbacks"] = in_order(tf.nest.flatten(callbacks) if callbacks else [])
        listed = getattr(given["callbacks"], "callbacks", given["callbacks"])
        self.fit_call = FitCall(given.get("x"), given.get("steps_per_epoch"), tuple(listed))
        self.steps.train_counter.restart()
        try:
            with running(listed):
                return own(**given)
        finally:
            self.fit_call = FitCall()

    def _with_own_callbacks(self, callbacks: Any) -> Any:
        """Return the callbacks of a `fit` with ours around them; collective."""
        listed = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
        listed = with_one_writer(self.session, in_order(tf.nest.flatten(listed) if listed else []))
        for callback in listed:
            if hasattr(callback, "finish_update"):  # it changes the learning rate at batches
                callback.finish_update = self.updates.finish_update
        self.fit_call = replace(self.fit_call, callbacks=tuple(listed))
        first = self._first_callback(listed)
        last: list[Any] = [
            stop_together(self.session, listed),
            StartTogether(
                lambda: self.session.run_section(self.begin_fit),
                lambda epoch: self.session.run_section(functools.partial(self.begin_epoch, epoch)),
            ),
        ]
        ours = [first, *listed, *last]
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            return ours
        for callback in (first, *last):
            callback.set_model(self.model)
        callbacks.callbacks[:] = ours
        reconfigure_callbacks(callbacks, ours)
        return callbacks

    def _first_callback(self, callbacks: list[Any]) -> FinishAtEpochEnd:
        readers = [type(c).__name__ for c in callbacks if reads_at_batches(c)]
        overlap = self.updates.overlap
        if readers and overlap.to_readers and self.session.world.rank == 0:
            logger.warning(overlap.to_readers, ", ".join(readers))
        if not readers or not overlap.defers:
            return FinishAtEpochEnd(self.updates.flush, self.end_epoch)
        return FinishAtEveryBatch(self.updates.flush, self.end_epoch)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        refuse_alone(self.model, "evaluate")
        own, return_dict, given = self._named("evaluate", args, kwargs)
        if is_own_validation(given):  # which resets the metrics before the epoch ends
            self._means = means_in_logs(self.model)
        complete = False
        while not complete:
            self._section(self._begin_evaluate)
            x = sharded_anew(given.get("x"))
            if x is not given.get("x"):
                given = without_cached_data({**given, "x": x})
            size = 0 if source_of(x) is None else self.session.world.size  # other data is not divided anew
            self.steps.test_counter.restart()
            logs = own(**given, return_dict=True)
            samples = self.steps.test_counter.restart()
            # If ranks are lost meanwhile, their part of the data is missing.
            averaged, complete = self._section(functools.partial(self._averaged, logs, samples, size))
        return averaged if return_dict else metrics_in_order(self.model, averaged)

    def _section(self, call: Callable[[], Any]) -> Any:
        """Run a part of `evaluate`, as one of the `fit` that runs, else of this model's last `fit`."""
        elastic, run = self.elastic, self.session.run_section
        if run is run_directly and elastic is not None and elastic.has_fitted:
            run = elastic.section
        return run(call)

    def _averaged(self, logs: Mapping[str, Any], samples: float, size: int) -> tuple[dict[str, Any], bool]:
        """Return the means over ranks, and whether all ranks of today have evaluated all data."""
        averaged = dict(logs)
        evaluated = self.session.engine.agree("end of evaluate", float(bool(logs)))
        if any(evaluated) and not all(evaluated):
            without = [str(rank) for rank, found in enumerate(evaluated) if not found]
            raise MismatchError(
                "Every rank should evaluate at least one batch: give each rank data, as hk.shard does. "
                f"Received: no batch of validation data on rank {listed(without)}"
            )
        means = means_in_logs(self.model)
        sizes = average_logs(
            self.session, averaged, samples, "results of evaluate", note=float(size), means=means
        )
        return averaged, all(each in (0, self.session.world.size) for each in sizes)

    def _begin_evaluate(self) -> None:
        self.updates.complete()
        what = "start of evaluate"
        if self.updates.ready:
            anywhere = self.session.engine.agree(what, float(self._set))
            self._take_rank_0s_if_set(anywhere, f"at the {what}")
            self._combine(self.steps.train_counter.since_restart() or 1.0)
        elif all(self.session.engine.agree(f"{what}, before a step", float(is_built(self.model)))):
            # Weights may have been loaded on rank 0 only: results of different models have no mean.
            broadcast_model(self.model)

    def _train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        self.updates.overlap.check_train_on_batch()
        refuse_alone(self.model, "train_on_batch")
        self._set = self._set and self.updates.ready  # the first step takes rank 0's weights anyway
        before = self.steps.train_counter.total()
        own, return_dict, given = self._named("train_on_batch", args, kwargs)
        logs = dict(own(**given, return_dict=True))
        if self.updates.mode.update_is_last:  # on all ranks alike
            # The caller may next set the learning rate, read a layer or call the model.
            self.updates.complete()
        samples = self.steps.train_counter.total() - before
        what, means = "results of train_on_batch", means_in_logs(self.model)
        anywhere = average_logs(self.session, logs, samples, what, note=float(self._set), means=means)
        self._take_rank_0s_if_set(anywhere, "in this train_on_batch")
        return logs if return_dict else metrics_in_order(self.model, logs)

    def _named(self, name: str, args: Any, kwargs: Any) -> tuple[Any, bool, dict[str, Any]]:
        """Return the model's own method, whether the caller asks it for a dict, and its other arguments."""
        own = self._methods.own(name)
        given = by_name(own, args, kwargs, functools.partial(getattr(keras.Model, name), self.model))
        wanted = bool(given.pop("return_dict", False))
        return own, wanted, given

    def _compile(self, *args: Any, **kwargs: Any) -> Any:
        self.updates.flush()
        returned = self._methods.own("compile")(*args, **kwargs)
        self.updates.refuse_outside()
        return returned

    def _flush_first(self, name: str, *args: Any, **kwargs: Any) -> Any:
        lock = self.updates.between_steps
        # A step may wait for this call: its data may come from code that uses the model.
        holds = name in _BETWEEN_STEPS and lock.acquire(timeout=_STEP_S)
        try:
            self.updates.flush()
            self._set = self._set or name in _SET
            returned = self._methods.own(name)(*args, **kwargs)
            if name in _SET:
                self.steps.untrained.start()
            return returned
        finally:
            if holds:
                lock.release()
