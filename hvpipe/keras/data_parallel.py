"""`data_parallel`: a Keras model whose `fit`, `train_on_batch` and `evaluate` run on all ranks together."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from hvpipe.engine import check_compression
from hvpipe.errors import HvpipeError
from hvpipe.keras.callbacks import (
    EpochEnd,
    FinishBeforeBatchCallbacks,
    StopTogether,
    StopTogetherAtBatches,
    average_logs,
    reads_at_batches,
    stops_at_batches,
)
from hvpipe.keras.data import SampleCounter, batch_of, fingerprint_of, first_leaf, same_length
from hvpipe.keras.instance_methods import InstanceMethods
from hvpipe.keras.overlap import OverlappedOptimizer, check_overlap
from hvpipe.keras.start import start_equal
from hvpipe.keras.variables import average_variables
from hvpipe.session import Session, current

Model = TypeVar("Model", bound=keras.Model)

logger = logging.getLogger("hvpipe")

# Methods that read or write the weights from outside a step, or replace the optimizer; each finishes the
# updates first. keras.saving and tf.saved_model, which do not come by `save`, call `get_config`,
# `save_own_variables` or `load_own_variables`.
_FLUSH_FIRST = (
    "compile",
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


def data_parallel(
    model: Model,
    overlap: str = "step",
    *,
    compression: str | None = None,
    bucket_bytes: int | None = None,
    warmup_steps: int = 100,
) -> Model:
    """Make `fit`, `train_on_batch` and `evaluate` of a model train on all ranks; returns the same model.

    Each rank trains on its own batches (see `shard`), whose sizes may differ; gradients are averaged by
    sample count. Weights, optimizer state and seed generators start as rank 0's. Metrics and losses in
    logs are averages over all ranks' samples.

    `overlap`: "none" computes, reduces, updates in turn; "backward" reduces during backward; "step"
    (default) also during the next step's forward. The three give the same weights, bit for bit. "stale"
    applies gradients one step late after `warmup_steps` exact steps: faster where links are slow, but
    another algorithm (Pipe-SGD), whose results differ.

    `compression`: None, "bf16" or "fp16": the type in which float32 gradients travel. `bucket_bytes`: size
    of the fused buffers (default 4 MiB, or HVPIPE_BUCKET_BYTES).

    Weights that you see are finished ones, in callbacks and after `train_on_batch` as well. Where your own
    code runs while a step is under way (another thread, a callback with `reads_weights = False`), read them
    through the model (`get_weights`, `save`, `evaluate`, ...), not through a layer or variable: only the
    model knows of the update that is to come. The same holds after `train_on_batch` with "stale".

    Raises HvpipeError for an unknown `overlap` or `compression`, or before `hvpipe.init`.
    """
    check_overlap(overlap)
    check_compression(compression)
    if not isinstance(model, keras.Model):
        raise HvpipeError(f"data_parallel wants a keras.Model. Received: {type(model).__name__}")
    session = current()
    previous = vars(model).get("_hvpipe")
    if previous is not None:
        previous.detach()
    if bucket_bytes is not None and bucket_bytes < 1:
        raise HvpipeError(f"bucket_bytes should be positive. Received: bucket_bytes={bucket_bytes}")
    state = DataParallel(session, model, overlap, compression, bucket_bytes, warmup_steps)
    state.attach()
    return model


class DataParallel:
    """What `data_parallel` adds to one model; hangs its methods before the model's own, on the instance."""

    def __init__(
        self,
        session: Session,
        model: Any,
        overlap: str,
        compression: str | None,
        bucket_bytes: int | None,
        warmup_steps: int,
    ) -> None:
        self.session = session
        self.model = model
        self.overlap = overlap
        self._make_optimizer = functools.partial(
            OverlappedOptimizer,
            session,
            compression=compression,
            bucket_bytes=bucket_bytes,
            warmup_steps=warmup_steps,
        )
        self._optimizer: OverlappedOptimizer | None = None
        self._methods = InstanceMethods(model)
        self._ready = False
        self._pending = False
        self._steps_seen = 0
        self._train_counter = SampleCounter()
        self._test_counter = SampleCounter()
        session.sample_counters.append(self._train_counter)
        # Made of the first batch: by it, equal data on all ranks is found out.
        self._fingerprint = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="hvpipe_batch")

    # --- Attaching ------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Replace methods on the model instance; its class and its saved form stay as they are."""
        self.model._hvpipe = self
        self._methods.replace("make_train_function", self._make_train_function)
        if self.session.world.size == 1:
            self._methods.replace("train_step", self._counted_train_step)
            self.model.train_function = None
            return
        self._methods.replace("train_step", self._train_step)
        self._methods.replace("test_step", self._test_step)
        self._methods.replace("fit", self._fit)
        self._methods.replace("evaluate", self._evaluate)
        self._methods.replace("train_on_batch", self._train_on_batch)
        for name in _FLUSH_FIRST:
            self._methods.replace(name, functools.partial(self._flush_first, name))
        self.model.train_function = None
        self.model.test_function = None

    def detach(self) -> None:
        """Give the model its own methods back."""
        self.flush()
        if self._optimizer is not None:
            self._optimizer.unhook()
        self._methods.restore()
        vars(self.model).pop("_hvpipe", None)
        self.model.train_function = None
        self.model.test_function = None

    # --- Before the first step ----------------------------------------------------------------------------

    def _make_train_function(self, force: bool = False) -> Any:
        model = self.model
        if model.train_function is not None and not force:
            return model.train_function
        if self.session.world.size > 1 and model.jit_compile:
            if self.session.world.rank == 0:
                logger.warning(
                    "hvpipe: jit_compile is switched off for model %s: XLA cannot compile the communication "
                    "that runs inside the step.",
                    model.name,
                )
            model.jit_compile = False
        self._methods.own("make_train_function")(force=True)
        inner = model.train_function
        model.train_function = self._timed(inner if self.session.world.size == 1 else self._checked(inner))
        self._ready = False
        return model.train_function

    def _checked(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """The train function; made again where tracing shows that some variables have no gradient."""
        holder = [inner]

        def train_function(iterator: Any) -> Any:
            if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                # A generator that a failed trace would use up.
                iterator = list(itertools.islice(iterator, self.model.steps_per_execution))
            if not self._ready:
                self._prepare(batch_of(iterator))
            waited, self._pending = self._pending, False  # this call finishes what waits
            try:
                logs = self._call(holder[0], iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                self._pending = waited  # or not: the data had come to its end
                raise
            except Exception as error:
                if not self._plan_anew():
                    self.session.engine.fail_if_announced(f"{type(error).__name__}: {error}")
                    raise
                self._methods.own("make_train_function")(force=True)
                holder[0] = self.model.train_function
                self.model.train_function = train_function
                logs = self._call(holder[0], iterator)
            self._pending = True
            self._steps_seen += 1
            if self._steps_seen == 1:
                self._warn_of_equal_batches()
            return logs

        return train_function

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
        self._ready = True

    def _hook_optimizer(self, variables: Sequence[Any]) -> None:
        self.flush()
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
        self._optimizer = self._make_optimizer(self.model.optimizer, variables, overlap=overlap)
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

    def _counted_train_step(self, data: Any) -> Any:
        self._train_counter.add(first_leaf(data))
        return self._methods.own("train_step")(data)

    def _train_step(self, data: Any) -> Any:
        assert self._optimizer is not None
        batch = first_leaf(data)
        first = self._train_counter.is_new()
        self._fingerprint.assign(
            tf.cond(first, lambda: fingerprint_of(batch), lambda: self._fingerprint.read_value())
        )
        samples = self._train_counter.add(batch)
        self._optimizer.begin(samples)
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

    def _test_step(self, data: Any) -> Any:
        self._test_counter.add(first_leaf(data))
        return self._methods.own("test_step")(data)

    # --- Around steps -------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Finish updates that wait for the next step. Not collective: what is waited for has been sent."""
        if self._pending and self._optimizer is not None:
            self._optimizer.flush()
        self._pending = False

    def end_epoch(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """Finish, then make statistics and logs those of all ranks."""
        self.flush()
        samples = self._train_counter.restart()
        self.session.engine.agree(f"end of epoch {epoch + 1}")
        average_variables(self.session, self._statistics(), samples)
        if logs:
            # Keras puts the validation's results in as well; evaluate has made them those of all ranks.
            own = {name: value for name, value in logs.items() if not name.startswith("val_")}
            average_logs(self.session, own, samples, f"logs of epoch {epoch + 1}")
            logs.update(own)

    def _statistics(self) -> list[Any]:
        return [v for v in self.model.non_trainable_variables if not _is_seed(v)]

    def _fit(self, *args: Any, **kwargs: Any) -> Any:
        self.model._assert_compile_called("fit")
        bound = inspect.signature(self._methods.own("fit")).bind(*args, **kwargs)
        given = bound.arguments
        given["x"] = same_length(
            self.session, given.get("x"), given.get("batch_size"), given.get("steps_per_epoch")
        )
        given["callbacks"] = self._with_own_callbacks(given.get("callbacks"))
        self._train_counter.restart()
        try:
            return self._methods.own("fit")(*bound.args, **bound.kwargs)
        except BaseException:
            # The last step is whole, unless it is the one that failed; what peers owe it is under way.
            with contextlib.suppress(Exception):
                self.flush()
            raise

    def _with_own_callbacks(self, callbacks: Any) -> Any:
        """The callbacks of a `fit` and ours around them; collective."""
        listed = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
        listed = list(tf.nest.flatten(listed)) if listed else []
        stopping = any(stops_at_batches(callback) for callback in listed)
        # The ranks' callbacks may differ, but all must agree at the same times.
        anywhere = any(self.session.engine.agree("callbacks that may stop within an epoch", float(stopping)))
        last = (StopTogetherAtBatches if anywhere else StopTogether)(self.session)
        ours = [self._callback_for(listed), *listed, last]
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            return ours
        for callback in (ours[0], last):
            callback.set_model(self.model)
        callbacks.callbacks[:] = ours
        callbacks._configure_async_dispatch(ours)
        return callbacks

    def _callback_for(self, callbacks: list[Any]) -> EpochEnd:
        readers = [type(c).__name__ for c in callbacks if reads_at_batches(c)]
        if not readers or self.overlap not in ("step", "stale"):
            return EpochEnd(self)
        if self.session.world.rank == 0:
            logger.warning(
                "hvpipe: callback %s may read weights between steps, so every step is finished before it "
                "runs, and the overlap with the next step is lost. Set reads_weights = False on it if it "
                "does not.",
                ", ".join(readers),
            )
        return FinishBeforeBatchCallbacks(self)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.flush()
        if self._ready:
            average_variables(self.session, self._statistics(), self._train_counter.since_restart() or 1.0)
        self._test_counter.restart()
        return_dict = kwargs.pop("return_dict", False)
        logs = dict(self._methods.own("evaluate")(*args, return_dict=True, **kwargs))
        average_logs(self.session, logs, self._test_counter.restart(), "results of evaluate")
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    def _train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return_dict = kwargs.pop("return_dict", False)
        before = self._train_counter.total()
        logs = dict(self._methods.own("train_on_batch")(*args, return_dict=True, **kwargs))
        if self.overlap == "step":
            # The caller may set the learning rate, read a layer or call the model next.
            self.flush()
        samples = self._train_counter.total() - before
        average_logs(self.session, logs, samples, "results of train_on_batch")
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    def _flush_first(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.flush()
        return self._methods.own(name)(*args, **kwargs)


def _is_seed(variable: Any) -> bool:
    return not tf.as_dtype(variable.dtype).is_floating
