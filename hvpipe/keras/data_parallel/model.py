"""`data_parallel`: a Keras model whose `fit`, `train_on_batch` and `evaluate` run on all ranks together."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from hvpipe.comm.engine import check_compression
from hvpipe.errors import HvpipeError
from hvpipe.keras.arguments import by_name, takes
from hvpipe.keras.callbacks import (
    EpochEnd,
    FinishBeforeBatchCallbacks,
    StartTogether,
    average_logs,
    reads_at_batches,
    stop_together,
)
from hvpipe.keras.data_parallel.overlap import OverlappedOptimizer, check_overlap
from hvpipe.keras.data_parallel.shards import same_length
from hvpipe.keras.data_parallel.train_steps import TrainSteps
from hvpipe.keras.initial_state import broadcast_model, checksums, is_built, take_rank_0s
from hvpipe.keras.instance_methods import InstanceMethods
from hvpipe.keras.one_writer import with_one_writer
from hvpipe.keras.supported import told
from hvpipe.keras.variables import average_variables
from hvpipe.session import Session, current

Model = TypeVar("Model", bound=keras.Model)

logger = logging.getLogger("hvpipe")

# Methods that read or write the weights from outside a step; each finishes the updates first. keras.saving
# and tf.saved_model, which do not come by `save`, call `get_config`, `save_own_variables` or
# `load_own_variables`.
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
# Those of them after which weights may be others, perhaps on one rank alone.
_SET = ("load_own_variables", "load_weights", "set_state_tree", "set_weights")


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
    sample count. Weights, optimizer state and seed generators start as rank 0's; weights and optimizer
    state that differ at the begin of a later `fit` become rank 0's. Metrics and losses in logs are averages
    over all ranks' samples.

    `overlap`: "none" computes, reduces, updates in turn; "backward" reduces during backward; "step"
    (default) also during the next step's forward. The three give the same weights, bit for bit. "stale"
    applies gradients one step late after `warmup_steps` exact steps: faster where links are slow, but
    another algorithm (Pipe-SGD), whose results differ.

    `compression`: None, "bf16" or "fp16": the type in which float32 gradients travel. `bucket_bytes`: size
    of the fused buffers (default HVPIPE_BUCKET_BYTES, else 4 MiB, of a model with less than 32 MiB of
    gradients an eighth of them).

    Weights that you see are finished ones, in callbacks and after `train_on_batch` as well. Where your own
    code runs while a step is under way (another thread, a callback with `reads_weights = False`), read them
    through the model (`get_weights`, `save`, `evaluate`, ...), not through a layer or variable: only the
    model knows of the update that is to come. The same holds after `train_on_batch` with "stale".

    Raises HvpipeError for an unknown `overlap` or `compression`, or before `hvpipe.init`.
    """
    check_overlap(overlap)
    check_compression(compression)
    if not isinstance(model, keras.Model):
        raise HvpipeError(f"data_parallel wants a keras.Model, of Keras 3. Received: {told(model)}")
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
        self._methods = InstanceMethods(model)
        make_optimizer = functools.partial(
            OverlappedOptimizer,
            session,
            compression=compression,
            bucket_bytes=bucket_bytes,
            warmup_steps=warmup_steps,
        )
        self._steps = TrainSteps(session, model, self._methods, overlap, make_optimizer)
        self._set = False  # whether weights were set by the model's methods since the ranks last compared
        self._samples_before_fit = 0.0  # since the statistics were averaged

    # --- Attaching ------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Replace methods on the model instance; its class and its saved form stay as they are."""
        self.model._hvpipe = self
        self._methods.replace("make_train_function", self._steps.make_train_function)
        if self.session.world.size == 1:
            self._methods.replace("train_step", self._steps.counted_train_step)
            self.model.train_function = None
            return
        self._methods.replace("train_step", self._steps.train_step)
        self._methods.replace("test_step", self._steps.test_step)
        self._methods.replace("make_test_function", self._steps.make_test_function)
        self._methods.replace("compile", self._compile)
        self._methods.replace("fit", self._fit)
        self._methods.replace("evaluate", self._evaluate)
        self._methods.replace("train_on_batch", self._train_on_batch)
        for name in _FLUSH_FIRST:
            self._methods.replace(name, functools.partial(self._flush_first, name))
        self.model.train_function = None
        self.model.test_function = None
        self._steps.refuse_outside()

    def detach(self) -> None:
        """Give the model its own methods back."""
        self._steps.unhook()
        self._methods.restore()
        vars(self.model).pop("_hvpipe", None)
        self.model.train_function = None
        self.model.test_function = None

    # --- Around steps -------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Finish updates that wait for the next step; not collective."""
        self._steps.flush()

    def begin_fit(self) -> None:
        """Go on with rank 0's state and epoch, whatever was loaded or set on some ranks; collective.

        Where nobody has trained yet, the first step sees to the state. Statistics may differ after
        `train_on_batch`: they become the mean.
        """
        model, steps = self.model, self._steps
        steps.flush()
        self._set = False
        statistics = self._statistics()
        sums = checksums(model, statistics) if steps.ready else (0.0, 0.0)
        # What BackupAndRestore found on rank 0, say.
        row = np.array([[float(steps.ready), *sums, float(model._initial_epoch or 0)]])
        self.session.engine.agree("begin of fit")
        ready, weights, kept, epochs = self.session.engine.allgather(row).T
        model._initial_epoch = int(epochs[0]) or None
        steps.ready = bool(ready.all())
        if not steps.ready or take_rank_0s(self.session, model, weights, "at the begin of fit"):
            return
        if len(set(kept)) > 1:
            average_variables(self.session, statistics, self._samples_before_fit or 1.0)

    def begin_epoch(self, epoch: int) -> None:
        """Go on with rank 0's state where callbacks have set weights on some ranks; collective."""
        when = f"at the begin of epoch {epoch + 1}"
        self._take_rank_0s_if_set(self.session.engine.agree(when, float(self._set)), when)

    def _take_rank_0s_if_set(self, anywhere: Sequence[float], when: str) -> None:
        self._set = False
        if not any(anywhere) or not self._steps.ready:
            return
        self._steps.flush()
        weights, _ = checksums(self.model, self._statistics())
        take_rank_0s(self.session, self.model, self.session.engine.agree(f"weights {when}", weights), when)

    def end_epoch(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """Finish, then make statistics and logs those of all ranks."""
        self._steps.flush()
        samples = self._steps.train_counter.restart()
        self.session.engine.agree(f"end of epoch {epoch + 1}")
        average_variables(self.session, self._statistics(), samples)
        if logs:
            # Keras puts the validation's results in as well; evaluate has made them those of all ranks.
            own = {name: value for name, value in logs.items() if not name.startswith("val_")}
            average_logs(self.session, own, samples, f"logs of epoch {epoch + 1}")
            logs.update(own)

    def _statistics(self) -> list[Any]:
        """What layers keep beside weights; frozen weights, which are equal, are none of it."""
        kept = {id(v): v for layer in self.model._flatten_layers() for v in layer._non_trainable_variables}
        return list(kept.values())

    def _fit(self, *args: Any, **kwargs: Any) -> Any:
        model, own = self.model, self._methods.own("fit")
        model._assert_compile_called("fit")
        if not takes(own, "callbacks"):
            raise HvpipeError(
                "fit should take callbacks, or hand **kwargs on to Keras, as data_parallel adds some. "
                f"Received: {type(model).__name__}.fit{inspect.signature(own)}"
            )
        given = by_name(own, args, kwargs, functools.partial(keras.Model.fit, model))
        x = same_length(self.session, given.get("x"), given.get("batch_size"), given.get("steps_per_epoch"))
        if "x" in given:
            given["x"] = x
        given["callbacks"] = self._with_own_callbacks(given.get("callbacks"))
        self._samples_before_fit = self._steps.train_counter.restart()
        try:
            return own(**given)
        except BaseException:
            # The last step is whole, unless it is the one that failed; what peers owe it is under way.
            with contextlib.suppress(Exception):
                self._steps.flush()
            raise

    def _with_own_callbacks(self, callbacks: Any) -> Any:
        """The callbacks of a `fit` and ours around them; collective."""
        listed = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
        listed = with_one_writer(self.session, tf.nest.flatten(listed) if listed else [])
        first = self._callback_for(listed)
        last: list[Any] = [stop_together(self.session, listed), StartTogether(self)]
        ours = [first, *listed, *last]
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            return ours
        for callback in (first, *last):
            callback.set_model(self.model)
        callbacks.callbacks[:] = ours
        callbacks._configure_async_dispatch(ours)
        return callbacks

    def _callback_for(self, callbacks: list[Any]) -> EpochEnd:
        readers = [type(c).__name__ for c in callbacks if reads_at_batches(c)]
        if not readers or self._steps.overlap not in ("step", "stale"):
            return EpochEnd(self)
        if self.session.world.rank == 0:
            logger.warning(
                "hvpipe: callback %s may read weights between steps, so every step is finished before it "
                "runs, and the overlap with the next step is lost. Set reads_weights = False on it if it "
                "does not, and sets nothing of the optimizer either.",
                ", ".join(readers),
            )
        return FinishBeforeBatchCallbacks(self)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._steps.flush()
        when = "at the begin of evaluate"
        if self._steps.ready:
            self._take_rank_0s_if_set(self.session.engine.agree(when, float(self._set)), when)
            average_variables(
                self.session, self._statistics(), self._steps.train_counter.since_restart() or 1.0
            )
        elif all(self.session.engine.agree(f"{when}, before a step", float(is_built(self.model)))):
            # Weights may have been loaded on rank 0 alone: figures of different models have no mean.
            broadcast_model(self.model)
        self._steps.test_counter.restart()
        return_dict, logs = self._as_dict("evaluate", args, kwargs)
        average_logs(self.session, logs, self._steps.test_counter.restart(), "results of evaluate")
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    def _train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        self._set = self._set and self._steps.ready  # the first step takes rank 0's anyway
        before = self._steps.train_counter.total()
        return_dict, logs = self._as_dict("train_on_batch", args, kwargs)
        if self._steps.overlap == "step":
            # The caller may set the learning rate, read a layer or call the model next.
            self._steps.flush()
        samples = self._steps.train_counter.total() - before
        anywhere = average_logs(
            self.session, logs, samples, "results of train_on_batch", note=float(self._set)
        )
        self._take_rank_0s_if_set(anywhere, "in this train_on_batch")
        return logs if return_dict else self.model._flatten_metrics_in_order(logs)

    def _as_dict(self, name: str, args: Any, kwargs: Any) -> tuple[bool, dict[str, Any]]:
        """Call the model's own method for logs by name; whether that was asked for, and the logs."""
        own = self._methods.own(name)
        given = by_name(own, args, kwargs, functools.partial(getattr(keras.Model, name), self.model))
        asked = bool(given.pop("return_dict", False))
        return asked, dict(own(**given, return_dict=True))

    def _compile(self, *args: Any, **kwargs: Any) -> Any:
        self._steps.flush()
        returned = self._methods.own("compile")(*args, **kwargs)
        self._steps.refuse_outside()
        return returned

    def _flush_first(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._steps.flush()
        self._set = self._set or name in _SET
        return self._methods.own(name)(*args, **kwargs)
