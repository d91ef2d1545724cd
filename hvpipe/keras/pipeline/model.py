"""`pipeline_parallel`: a Keras model whose layers are spread over the ranks, trained by micro-batches."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras import compat
from hvpipe.keras.arguments import by_name, keep_order
from hvpipe.keras.callbacks import means_in_logs, stop_together
from hvpipe.keras.fit_call import FitCall, in_order, running
from hvpipe.keras.gpu import device_of_messages
from hvpipe.keras.graph.deferred_build import (
    build_without_memory,
    give_memory,
    leave_to_others,
    variables_of,
    weights_of,
)
from hvpipe.keras.graph.layer_graph import functional_of, layer_graph
from hvpipe.keras.graph.stage_cuts import Stages
from hvpipe.keras.initial_state import broadcast_model, normalizing, settle
from hvpipe.keras.one_writer import with_one_writer
from hvpipe.keras.pipeline.batch_targets import (
    agreed_signature,
    check_samples,
    common_signature,
    flat_targets,
)
from hvpipe.keras.pipeline.callbacks import CombineState, make_folders, without_duplicates
from hvpipe.keras.pipeline.context import PipelineContext
from hvpipe.keras.pipeline.layout import Layout, layout_of
from hvpipe.keras.pipeline.layout_report import layout_report
from hvpipe.keras.pipeline.logs import PipelineLogs, flat_results
from hvpipe.keras.pipeline.lost_stage import leaving_after_loss
from hvpipe.keras.pipeline.microbatch_loss import MicrobatchLoss
from hvpipe.keras.pipeline.microbatches import Batch
from hvpipe.keras.pipeline.model_checks import (
    check_dense_inputs,
    check_no_own_steps,
    check_open_batch_size,
    check_real_wires,
    check_text_inputs,
    check_time_distributed,
)
from hvpipe.keras.pipeline.on_all_ranks import ending_all
from hvpipe.keras.pipeline.optimizer_settings import (
    check_optimizer,
    check_same_optimizer,
    compiled_with,
    learning_rate_of,
)
from hvpipe.keras.pipeline.plan_choice import PipelineOptions, plan_for
from hvpipe.keras.pipeline.rank_driver import Coverages, RankDriver
from hvpipe.keras.pipeline.same_pipeline import check_same_pipeline
from hvpipe.keras.pipeline.saving import PipelineSaving
from hvpipe.keras.pipeline.shared_variables import SharedVariables
from hvpipe.keras.pipeline.step import StepResult
from hvpipe.keras.pipeline.step_checks import StepChecks, step_checks
from hvpipe.keras.pipeline.step_state import shared_normalizations
from hvpipe.keras.pipeline.step_undo import StepUndo
from hvpipe.keras.pipeline.tensor_channel import TensorChannel
from hvpipe.keras.same_model import check_same, loss_items
from hvpipe.keras.supported import described_type, of_keras_2
from hvpipe.keras.variables import check_not_overwritten
from hvpipe.plan.stage_plan import Plan
from hvpipe.session import Session, current
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile


def pipeline_parallel(
    build_model: Any,
    stages: int | str | os.PathLike[str] | Plan = "auto",
    microbatches: int | None = None,
    schedule: str | None = None,
    *,
    chunks: int | None = None,
    replicas: Sequence[int] | None = None,
    recompute: bool | Sequence[int] | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    verify_every: int | None = None,
    nonfinite: str | None = None,
) -> PipelineParallel:
    """Cut a Keras model into stages and spread them over the ranks; collective.

    The result trains as the undivided model would on the same batch: the gradients of the micro-batches add
    up to the gradient of the batch. BatchNormalization is the exception: it normalises each micro-batch
    separately. Only the batches of the rank with the first stage count; the other ranks' batches must have
    the same number of samples.

    Without a `cluster`, layers are balanced by the greedy partitioner. With one, a search chooses the fastest
    plan of all ranks. All ranks plan with the `profile` and `cluster` of rank 0.

    Args:
        build_model: A functional or Sequential model, or a function without arguments that returns one. With
            a function, no rank allocates weights outside its own stages.
        stages: The number of stages; or "auto", one for each rank; or a plan from `hvpipe plan`, or the path
            of its file. A plan also sets all options below.
        microbatches: The number of micro-batches that a batch is cut into. Default: 8. With fewer than stages
            some ranks always wait; "interleaved" refuses that.
        schedule: "gpipe", "1f1b", "eager-1f1b", "zb-h1" or "interleaved". Default: "1f1b"; with a
            `cluster`, the fastest.
        chunks: The number of stages on each rank with "interleaved". Default: 2.
        replicas: The number of ranks that hold each stage, such as (2, 1, 1). Default: equal for all stages.
        recompute: Keep only a stage's inputs and run its forward again in the backward: True for all stages,
            or the numbers of some stages. Default: none; with a `cluster`, the stages that lack memory
            otherwise.
        profile: The costs of the layers, or the path of the file from `hvpipe profile`. Default: rough costs
            from the layers' shapes, with micro-batches of one sample.
        cluster: The devices and links, or the path of a file. Default: equal devices.
        verify_every: After each N-th step, compare a checksum of what several ranks hold: the weights
            and slots of replicas and of layers that stages share. None: HVPIPE_VERIFY, or never.
        nonfinite: What to do if a gradient has a NaN or Inf on any rank. "raise": raise HvpipeError on all
            ranks, before any rank updates its weights. "skip": no rank updates. "ignore": update all the
            same. None: HVPIPE_NONFINITE, or "ignore".

    Returns:
        This rank's part of the model, a Keras model: `compile` and `fit` it on all ranks together.

    Raises:
        HvpipeError: The model has no graph, there are more stages than layers or ranks, complex numbers
            between stages, an unknown `nonfinite`, a `verify_every` below 1, or an argument contradicts the
            plan.
        PlanError: The plan or profile is of another model, or memory does not suffice.
        MismatchError: The model or an argument differs between ranks.

    Example:

    ```python
    hvpipe.init()
    pipe = hvpipe.keras.pipeline_parallel(build_model, microbatches=8)
    pipe.compile("adam", "mse")
    pipe.fit(x, y, batch_size=256, epochs=2)
    ```
    """
    session = current()
    checks = step_checks(session, nonfinite, verify_every)
    if isinstance(build_model, keras.Model):
        model, deferred = build_model, False
    elif callable(build_model) and not of_keras_2(build_model):
        model, deferred = build_without_memory(session, build_model), True
    else:
        raise HvpipeError(
            "pipeline_parallel needs a Keras model or a function that returns one. "
            f"Received: {described_type(build_model)}"
        )
    graph = layer_graph(model)
    check_no_own_steps(model)
    check_open_batch_size(graph)
    check_time_distributed(graph)
    check_dense_inputs(functional_of(model))
    check_not_overwritten(model.trainable_variables, "A pipeline")
    options = PipelineOptions(stages, replicas, microbatches, schedule, chunks, recompute, profile, cluster)
    plan, ranks = plan_for(session, graph, options)
    layout = layout_of(graph, plan, ranks)
    check_real_wires(layout.stages)
    check_text_inputs(layout)
    shared_normalizations(layout.stages)  # raises an error for one that stages cannot share
    check_same_pipeline(session, layout)
    return PipelineParallel(session, model, layout, plan, checks, deferred=deferred)


class PipelineParallel(PipelineSaving, keras.Model):
    """One rank's part of a model that is spread over all ranks; `pipeline_parallel` makes it.

    Call `fit`, `evaluate`, `predict`, `train_on_batch` and the like on all ranks together, with the same
    arguments. `layers` and `weights` cover this rank's stages only.
    """

    def __init__(
        self,
        session: Session,
        model: Any,
        layout: Layout,
        plan: Plan,
        checks: StepChecks,
        *,
        deferred: bool,
    ) -> None:
        # With the policy mixed_float16, `compile` scales the loss.
        super().__init__(name=model.name, dtype=model.dtype_policy)
        mine = {id(la): la for s in layout.stages_of(session.world.rank) for la in layout.stages.layers(s)}
        self._stage_layers = list(mine.values())
        if deferred:
            give_memory(self._stage_layers)
            leave_to_others(layout.stages.graph.all_layers())
        else:
            broadcast_model(model)
        channel = TensorChannel(session, device_of_messages(session))
        samples = tf.Variable(0.0, trainable=False, name="samples_of_batch")
        peers = layout.peers_of(session.world.rank) if channel.by_nccl else ()
        with ending_all(session, "Making a pipeline"):
            channel.connect(peers)
            shared = SharedVariables(session, layout, channel)
            shared.broadcast()
        undo = None
        if session.settings.elastic and layout.has_replicas:
            weights = {id(variable) for variable in weights_of(self._stage_layers)}
            undo = StepUndo(v for v in variables_of(self._stage_layers) if id(v) not in weights)
        # Wrapped in an object, or Keras would take the model for a layer of the pipeline.
        self._context = PipelineContext(session, model, layout, shared, plan, channel, samples, checks, undo)
        self.fit_call = FitCall()
        """The `fit` that runs."""
        self.samples_trained = 0
        """Samples of all steps, of the whole pipeline."""
        self._hosts = session.engine.allgather_object(session.world.host, "pipeline_parallel")
        self._tells_layout = False  # at the next step
        self._has_told_layout = False
        self._forget_compiled()
        shared.separate_seeds()
        self.built = True

    def _forget_compiled(self) -> None:
        """Drop everything that depends on the arguments of `compile`."""
        self._forget_drivers()
        self._logs = PipelineLogs(self._context.session)
        self._has_trained = False

    def settle(self) -> None:
        """After variables were assigned, let layers recompute the constants that they derive from them.

        Graphs hold the old ones. Ranks make graphs together, so all forget theirs if any has such a layer.
        """
        settle(self)
        if any(map(normalizing, self.stages.graph.all_layers())):
            self._forget_drivers()

    def _forget_drivers(self) -> None:
        self._drivers: list[RankDriver] = []  # one for each structure of targets
        self._coverages: Coverages = {}

    @property
    def logs(self) -> PipelineLogs:
        """The logs of the epoch so far."""
        return self._logs

    @property
    def context(self) -> PipelineContext:
        """What the parts of the pipeline share."""
        return self._context

    # What Keras asks of a model -------------------------------------------------------------------------

    @property
    def stages(self) -> Stages:
        """All stages of the model."""
        return self._context.layout.stages

    @property
    def stage_numbers(self) -> tuple[int, ...]:
        """The numbers of this rank's stages."""
        return self._context.layout.stages_of(self._context.rank)

    @property
    def output_names(self) -> list[str]:
        """The names of the undivided model's outputs."""
        return list(self._context.model.output_names)

    def pack_outputs(self, flat: Sequence[Any]) -> Any:
        """Return flat outputs in the structure of the undivided model's outputs."""
        structure = compat.outputs_structure(functional_of(self._context.model))
        return keras.tree.pack_sequence_as(structure, list(flat))

    def call(self, inputs: Any, training: bool = False) -> Any:
        raise HvpipeError(
            "No rank can call the whole model of a pipeline. Use fit, evaluate, predict or their on_batch "
            "forms on all ranks together."
        )

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        pass  # Already built by the constructor.

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        pass

    def _assert_compile_called(self, method_name: str | None = None) -> None:
        if not self.compiled and self._context.model.compiled:
            raise HvpipeError(
                "A pipeline should be compiled before it is used. build_model has compiled the model: call "
                "`pipe.compile()` to take that. "
                f"Received: {method_name or 'a step'} before compile"
            )
        compat.check_compiled(super(), method_name or "fit")

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Configure training, as keras.Model.compile does.

        Without an optimizer and a loss, the pipeline takes the arguments with which the model was compiled.
        `jit_compile` has no effect: XLA cannot compile the sends and receives between the stages' graphs.

        Args:
            *args: As for keras.Model.compile.
            **kwargs: As for keras.Model.compile.

        Raises:
            HvpipeError: The optimizer is a MultiOptimizer, or micro-batches cannot compute a loss
                separately.
        """
        named = by_name(super().compile, args, kwargs, super().compile)
        if not named.keys() & {"optimizer", "loss"}:
            named = {**compiled_with(self._context.model), **named}
        super().compile(**{**named, "jit_compile": False})
        check_optimizer(self.optimizer)
        self._context.checks.check_optimizer(self.optimizer)
        loss, metrics = compat.compiled_loss(self), compat.compiled_metrics(self)
        if loss is not None:
            compat.set_compiled_loss(self, MicrobatchLoss(loss, self._context.samples))
        if metrics is not None:
            # Metrics may come from another model. Keras resets them when it builds a model.
            for metric in compat.user_metrics(metrics):
                if isinstance(metric, keras.metrics.Metric):
                    metric.reset_state()
        self._forget_compiled()

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train on all ranks together, as keras.Model.fit does; rank 0 prints the progress.

        Args:
            *args: As for keras.Model.fit.
            **kwargs: As for keras.Model.fit.

        Returns:
            The History, the same on all ranks.

        Raises:
            MismatchError: The optimizer, the learning rate or the loss differs between ranks.
        """
        session = self._context.session
        if self.compiled:
            check_same_optimizer(session, self.optimizer)
            check_same(session, "A pipeline needs the same loss on all ranks", loss_items(self))
        named = self._arguments_of(super().fit, args, kwargs)
        keep_order(super().fit, named)
        listed = in_order(_listed(named.get("callbacks") or []))
        callbacks = with_one_writer(session, listed, ["CSVLogger"])
        make_folders(session, callbacks)
        mine = without_duplicates(session, callbacks, self.stages, self._stage_layers)
        first = CombineState(session, self._context.shared)
        named["callbacks"] = [first, *mine, stop_together(session, callbacks)]
        self._tells_layout = named.get("verbose", "auto") not in (0, "0") and not self._has_told_layout
        self.fit_call = FitCall(named.get("x"), named.get("steps_per_epoch"), tuple(mine))
        try:
            with running(mine), leaving_after_loss(session, mine):
                return super().fit(**named)
        finally:
            self.fit_call = FitCall()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Return loss and metrics in inference mode, as keras.Model.evaluate does; on all ranks together.

        Args:
            *args: As for keras.Model.evaluate.
            **kwargs: As for keras.Model.evaluate.

        Returns:
            The loss, or loss and metrics, the same on all ranks.
        """
        return super().evaluate(**self._arguments_of(super().evaluate, args, kwargs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs on all ranks, as keras.Model.predict does; on all ranks together.

        Args:
            *args: As for keras.Model.predict.
            **kwargs: As for keras.Model.predict.

        Returns:
            The outputs, the same on all ranks.
        """
        return super().predict(**self._arguments_of(super().predict, args, kwargs))

    def _arguments_of(self, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, with `verbose=0` on ranks other than 0."""
        named = by_name(method, args, kwargs, method)
        return named if self._context.rank == 0 else {**named, "verbose": 0}

    def make_train_function(self, force: bool = False) -> None:
        self.train_function = functools.partial(self._run_batches, training=True)

    def make_test_function(self, force: bool = False) -> None:
        self.test_function = functools.partial(self._run_batches, training=False)

    def make_predict_function(self, force: bool = False) -> None:
        self.predict_function = self._predict_batches

    def reset_metrics(self) -> None:
        super().reset_metrics()
        self._logs.reset()

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        return logs

    def _flatten_metrics_in_order(self, logs: Mapping[str, Any]) -> Any:
        values = [logs[name] for name in ("loss", *self._logs.names)]
        return values[0] if len(values) == 1 else values

    # Steps ----------------------------------------------------------------------------------------------

    def _run_batches(self, iterator: Iterator[Any], training: bool) -> dict[str, Any]:
        """Run `steps_per_execution` steps, or fewer if the batches end; return the logs."""
        logs: dict[str, Any] = {}
        for count in range(self.steps_per_execution):
            try:
                data = next(iterator)
            except StopIteration:
                if count == 0:
                    raise
                break
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            inputs, structure = self._inputs(x), (y, sample_weight)
            batch = Batch(inputs, flat_targets(structure), int(inputs[0].shape[0]))
            check_samples(batch)
            self._context.samples.assign(batch.samples)
            result = (self._train if training else self._evaluate)(structure, batch)
            rate = learning_rate_of(self.optimizer) if training else 0.0
            logs = self._logs.add(result, batch.samples, self._metric_results, self._metric_weights, rate)
        return logs

    def _train(self, structure: Any, batch: Batch) -> StepResult:
        session = self._context.session
        start_s = time.perf_counter()
        if self._tells_layout:
            self._tell_layout(batch.samples)
        with session.engine.recorded("step", "training step"):
            driver = self._driver_for("training", structure, batch)
            result = driver.train(batch, first=not self._has_trained)
        session.step_durations_s.append(time.perf_counter() - start_s)
        self._has_trained = True
        self.samples_trained += batch.samples
        if self._context.checks.end_step():
            self._context.checks.verify(self.rank_state())
        return result

    def _tell_layout(self, samples: int) -> None:
        """Print which rank has which part of the model, before the first step of a `fit` that prints."""
        context = self._context
        self._tells_layout, self._has_told_layout = False, True
        print(*layout_report(context.layout, context.plan, self._hosts, samples), sep="\n", flush=True)

    def _evaluate(self, structure: Any, batch: Batch) -> StepResult:
        return self._driver_for("evaluation", structure, batch).evaluate(batch)

    def _predict_batches(self, data: Sequence[Any]) -> Any:
        outputs = []
        for one in data:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(one)
            inputs = self._inputs(x)
            batch = Batch(inputs, (), int(inputs[0].shape[0]))
            driver = self._drivers[0] if self._drivers else self._new_driver(None, ())
            outputs.append(driver.predict(batch))
        return self.pack_outputs([tf.concat(of_output, 0) for of_output in zip(*outputs, strict=True)])

    def _inputs(self, x: Any) -> list[Any]:
        """Return a batch's inputs flat, as the undivided model takes them; raises Keras's own errors."""
        functional = functional_of(self._context.model)
        compat.check_inputs(functional, x)
        return list(compat.standardize_inputs(functional, x))

    def _driver_for(self, what: str, structure: Any, batch: Batch) -> RankDriver:
        """Return the driver for targets like the data rank's; collective.

        If sizes differ from earlier batches, a driver that leaves them open replaces the old one.
        """
        layout = self._context.layout
        step = f"{what} step of {layout.stages.graph.name}"
        signature = agreed_signature(self._context.session, layout.data_rank, step, structure, batch)
        for driver in self._drivers:
            common = common_signature(driver.structure, driver.signature, structure, signature)
            if common == driver.signature:
                return driver
            if common is not None:
                self._drivers.remove(driver)
                signature = common
                break
        return self._new_driver(structure, signature)

    def _new_driver(self, structure: Any, signature: Sequence[Any]) -> RankDriver:
        driver = RankDriver(self, self._context, structure, signature, self._coverages)
        self._drivers.append(driver)
        return driver

    def _metric_weights(self) -> dict[str, float]:
        """Return the sums of weights of the last stage's metrics that are means, by name."""
        found = {name: count for name, (_, count) in means_in_logs(self).items()}
        loss = compat.compiled_loss(self)
        return found | {metric.name: float(metric.count) for metric in (loss.metrics if loss else ())}

    def _metric_results(self) -> dict[str, Any]:
        """Return the last stage's metrics without the loss, in the order in which Keras lists them."""
        found = flat_results(self.get_metrics_result())
        found.pop("loss", None)
        names = compat.metrics_in_order(super(), {name: name for name in found})
        return {name: found[name] for name in ([names] if isinstance(names, str) else names)}


def _listed(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
