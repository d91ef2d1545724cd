"""`pipeline_parallel`: a Keras model whose layers are spread over the ranks, trained by micro-batches."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.arguments import by_name
from hvpipe.keras.callbacks import stop_together
from hvpipe.keras.gpu import device_of_messages
from hvpipe.keras.graph.deferred_build import build_without_memory, give_memory, leave_to_others
from hvpipe.keras.graph.layer_graph import LayerGraph, functional_of, layer_graph
from hvpipe.keras.graph.stage import Stages
from hvpipe.keras.initial_state import broadcast_model
from hvpipe.keras.one_writer import with_one_writer
from hvpipe.keras.pipeline.batch_targets import check_samples, flat_targets, signature_of_feeder
from hvpipe.keras.pipeline.layout import Layout, layout_of
from hvpipe.keras.pipeline.logs import PipelineLogs, flat_results
from hvpipe.keras.pipeline.microbatch_loss import LossOfParts
from hvpipe.keras.pipeline.plan_choice import Wish, plan_for
from hvpipe.keras.pipeline.rank_driver import Machine, Reach
from hvpipe.keras.pipeline.saving import PipelineFiles, make_folders, told_once
from hvpipe.keras.pipeline.shared_variables import Sharing
from hvpipe.keras.pipeline.step import Batch, Outcome
from hvpipe.keras.pipeline.tensor_channel import Mail
from hvpipe.keras.pipeline.update import check_optimizers, learning_rate_of
from hvpipe.keras.supported import of_keras_2, told
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
) -> PipelineParallel:
    """Spread a Keras model over the ranks: `compile` and `fit` the result as any model; collective.

    `build_model` is a function without arguments that returns a functional or Sequential model, or such a
    model. With a function no rank gives memory to weights outside its own stages.

    `stages`: how many (each on one rank, or on several as `replicas` says, say (2, 1, 1); without it all
    stages have as many), "auto" (as many as there are ranks), or a plan or its file, from `hvpipe plan`.
    Layers are balanced by the greedy partitioner, with the costs of `profile` (from `hvpipe profile`) or
    rough ones from the layers' shapes, on the devices of `cluster` or equal ones; all ranks plan by what
    rank 0 is given.

    `microbatches`: how many parts a batch is cut into, 8 unless said otherwise. `schedule`: "gpipe", "1f1b"
    (the default), "zb-h1", or "interleaved" with `chunks` (2) stages on each rank. `recompute` keeps only
    what a stage received and runs its forward again in the backward: True for all stages, or the numbers of
    some. A plan brings all of these.

    The result trains as the undivided model would on the same batch: gradients of the micro-batches add up
    to the batch's. BatchNormalization uses and records the statistics of each micro-batch. The batches that
    count are those of the rank with the first stage; the others' must have as many samples.

    Raises HvpipeError for a model without a graph, more stages than layers or ranks, fewer micro-batches
    than stages, complex numbers between stages, and for an argument that says otherwise than a plan;
    PlanError for a plan or profile of another model, or where memory does not suffice.
    """
    session = current()
    if isinstance(build_model, keras.Model):
        model, deferred = build_model, False
    elif callable(build_model) and not of_keras_2(build_model):
        model, deferred = build_without_memory(session, build_model), True
    else:
        raise HvpipeError(
            "pipeline_parallel wants a Keras model or a function that returns one. "
            f"Received: {told(build_model)}"
        )
    graph = layer_graph(model)
    _check_steps(model)
    _check_sizes(graph)
    wish = Wish(stages, replicas, microbatches, schedule, chunks, recompute, profile, cluster)
    plan, ranks = plan_for(session, graph, wish)
    layout = layout_of(graph, plan, ranks)
    _check_wires(layout.stages)
    session.engine.agree(layout.summary)
    recomputes = plan.pipelining.recomputes
    return PipelineParallel(session, model, layout, deferred=deferred, recomputes=recomputes)


def _check_steps(model: Any) -> None:
    """A step of the model's own would be passed over."""
    own = [
        name
        for name in ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")
        if getattr(type(model), name) is not getattr(keras.Model, name)
    ]
    if own:
        raise HvpipeError(
            "A pipeline runs steps of its own: put what the model's do into layers (add_loss), losses and "
            f"metrics. Received: {type(model).__name__} {model.name!r}, which defines {', '.join(own)}"
        )


def _check_optimizer(optimizer: Any) -> None:
    """Those inside a MultiOptimizer would each clip, scale and count apart from the other ranks'."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    several = getattr(keras.optimizers, "MultiOptimizer", ())
    if isinstance(inner, several):
        raise HvpipeError(
            "A pipeline wants one optimizer for all layers. "
            f"Received: optimizer={type(inner).__name__}, which has one for each group of them"
        )


def _check_sizes(graph: LayerGraph) -> None:
    """Micro-batches are smaller than the batch, and differ in size."""
    fixed = [
        graph.tensors[number].shape for number in graph.inputs if None not in graph.tensors[number].shape[:1]
    ]
    if fixed:
        raise HvpipeError(
            "A pipeline cuts batches, so the model's inputs should leave their size open: "
            f"keras.Input(shape=...), without batch_shape. Received: an input of shape {fixed[0]}"
        )


def _check_wires(stages: Stages) -> None:
    """No gradients come back for complex numbers: layers before them would stay as they are."""
    graph = stages.graph
    for wire in (wire for cut in stages.cuts for wire in cut.outputs):
        if stages.spec(wire).dtype.is_complex:
            raise HvpipeError(
                "Tensors of real numbers can travel between stages, complex ones cannot: put the layers that "
                "make them and those that read them into one layer of your own, or choose other stages by a "
                f"plan. Received: {graph.tensors[wire.number].dtype} from "
                f"{graph.calls[graph.makers()[wire.number]].name}"
            )


class PipelineParallel(PipelineFiles, keras.Model):
    """One rank's part of a model that is spread over all ranks; `pipeline_parallel` makes it.

    `fit`, `evaluate`, `predict`, `train_on_batch` and the like are called on all ranks together, with the
    same arguments. `layers` and `weights` are those of this rank's stages.
    """

    _compile_loss: Any

    def __init__(
        self,
        session: Session,
        model: Any,
        layout: Layout,
        *,
        deferred: bool,
        recomputes: Callable[[int], bool],
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
        self._parts: _Parts = _Parts(session, model, layout, Sharing(session, layout), recomputes)
        self._parts.sharing.equalise()
        self._parts.sharing.separate_seeds()
        self.built = True

    # What Keras asks of a model -------------------------------------------------------------------------

    @property
    def stages(self) -> Stages:
        """All stages of the model."""
        return self._parts.layout.stages

    @property
    def stage_numbers(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return self._parts.layout.stages_of(self._parts.session.world.rank)

    @property
    def output_names(self) -> list[str]:
        """The names of the undivided model's outputs."""
        return list(self._parts.model.output_names)

    def pack_outputs(self, flat: Sequence[Any]) -> Any:
        """Outputs in the structure that the undivided model gives them."""
        model = functional_of(self._parts.model)
        return keras.tree.pack_sequence_as(model._outputs_struct, list(flat))

    def call(self, inputs: Any, training: bool = False) -> Any:
        raise HvpipeError(
            "A pipeline runs by fit, evaluate, predict and their on_batch forms, on all ranks together; no "
            "rank can call the whole model. Received: a call"
        )

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        pass  # Built when it was made.

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        pass

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As keras.Model.compile; XLA is off, as sends and receives lie between the stages' functions.

        Raises HvpipeError for a MultiOptimizer, and for a loss that parts of a batch cannot have.
        """
        kwargs["jit_compile"] = False
        super().compile(*args, **kwargs)
        _check_optimizer(self.optimizer)
        if self._compile_loss is not None:
            self._compile_loss = LossOfParts(self._compile_loss, self._parts.samples)
        compiled = self._compile_metrics
        if compiled is not None:
            # What has served another model begins anew, as where Keras builds a model.
            given = keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
            for metric in given:
                if isinstance(metric, keras.metrics.Metric):
                    metric.reset_state()
        self._parts.reset()

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """As keras.Model.fit, on all ranks together; rank 0 prints the progress.

        Raises MismatchError for an optimizer or a learning rate that is another on some rank.
        """
        session, sharing = self._parts.session, self._parts.sharing
        if self.compiled:
            check_optimizers(session, self.optimizer)
        named = self._quiet(super().fit, args, kwargs)
        callbacks = with_one_writer(session, _listed(named.get("callbacks") or []), ["CSVLogger"])
        make_folders(session, callbacks)
        mine = told_once(session, callbacks, self.stages, self._stage_layers)
        named["callbacks"] = [EpochEnd(session, sharing), *mine, stop_together(session, callbacks)]
        return super().fit(**named)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As keras.Model.evaluate, on all ranks together."""
        return super().evaluate(**self._quiet(super().evaluate, args, kwargs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As keras.Model.predict, on all ranks together; all get the outputs."""
        return super().predict(**self._quiet(super().predict, args, kwargs))

    def _quiet(self, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name; nothing is printed on ranks other than 0."""
        named = by_name(method, args, kwargs, method)
        return named if self._parts.session.world.rank == 0 else {**named, "verbose": 0}

    def make_train_function(self, force: bool = False) -> None:
        self.train_function = functools.partial(self._run_batches, training=True)

    def make_test_function(self, force: bool = False) -> None:
        self.test_function = functools.partial(self._run_batches, training=False)

    def make_predict_function(self, force: bool = False) -> None:
        self.predict_function = self._predict_batches

    def reset_metrics(self) -> None:
        super().reset_metrics()
        self._parts.logs.reset()

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        return logs

    def _flatten_metrics_in_order(self, logs: Mapping[str, Any]) -> Any:
        values = [logs[name] for name in ("loss", *self._parts.logs.names)]
        return values[0] if len(values) == 1 else values

    # Steps ----------------------------------------------------------------------------------------------

    def _run_batches(self, iterator: Iterator[Any], training: bool) -> dict[str, Any]:
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
            self._parts.samples.assign(batch.samples)
            outcome = (self._train if training else self._evaluate)(structure, batch)
            rate = learning_rate_of(self.optimizer) if training else 0.0
            logs = self._parts.logs.add(outcome, batch.samples, self._metric_results, rate)
        return logs

    def _train(self, structure: Any, batch: Batch) -> Outcome:
        parts = self._parts
        begun_s = time.perf_counter()
        with parts.session.engine.recorded("step", "training step"):
            outcome = self._machine_for("training", structure, batch).train(batch, first=not parts.trains)
        parts.session.step_durations_s.append(time.perf_counter() - begun_s)
        parts.trains = True
        return outcome

    def _evaluate(self, structure: Any, batch: Batch) -> Outcome:
        return self._machine_for("evaluation", structure, batch).evaluate(batch)

    def _predict_batches(self, data: Sequence[Any]) -> Any:
        parts = []
        for one in data:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(one)
            inputs = self._inputs(x)
            parts.append(self._machine(None, ()).predict(Batch(inputs, (), int(inputs[0].shape[0]))))
        return self.pack_outputs([tf.concat(of_output, 0) for of_output in zip(*parts, strict=True)])

    def _inputs(self, x: Any) -> list[Any]:
        functional = functional_of(self._parts.model)
        functional._assert_input_compatibility(x)
        return list(functional._standardize_inputs(x))

    def _machine_for(self, what: str, structure: Any, batch: Batch) -> Machine:
        """For batches whose targets have the sizes that the feeder's have, on all ranks; collective."""
        parts = self._parts
        step = f"{what} step of {parts.layout.stages.graph.name}"
        signature = signature_of_feeder(parts.session, parts.layout.feeder, step, structure, batch)
        return self._machine(structure, signature)

    def _machine(self, structure: Any, signature: Sequence[Any]) -> Machine:
        """For batches with targets that look like that; made once, and once more where their sizes vary.

        All ranks ask for the same ones, and so make theirs together.
        """
        parts = self._parts
        if structure is None and parts.machines:
            return parts.machines[0]
        for machine in parts.machines:
            common = machine.common_signature(structure, signature)
            if common == machine.signature:
                return machine
            if common is not None:
                parts.machines.remove(machine)
                signature = common
                break
        parts.machines.append(
            Machine(
                self,
                parts.session,
                parts.layout,
                parts.sharing,
                structure,
                signature,
                recomputes=parts.recomputes,
            )
        )
        return parts.machines[-1]

    def _metric_results(self) -> dict[str, Any]:
        """Of the last stage, without the loss, in the order in which Keras lists them."""
        found = flat_results(self.get_metrics_result())
        found.pop("loss", None)
        names = super()._flatten_metrics_in_order({name: name for name in found})
        return {name: found[name] for name in ([names] if isinstance(names, str) else names)}


class EpochEnd(keras.callbacks.Callback):
    """First of the callbacks: the statistics that replicas of a stage have taken apart become one."""

    def __init__(self, session: Session, sharing: Sharing) -> None:
        super().__init__()
        self._session = session
        self._sharing = sharing

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Replicas sum among themselves, where a rank whose data ended early would be waited for in vain.
        self._session.engine.agree(f"end of epoch {epoch + 1}")
        self._sharing.average_statistics()


class _Parts:
    """What a pipeline is made of; a plain object, whose insides Keras takes for no layers of the pipeline."""

    def __init__(
        self,
        session: Session,
        model: Any,
        layout: Layout,
        sharing: Sharing,
        recomputes: Callable[[int], bool],
    ) -> None:
        self.session = session
        self.model = model
        self.layout = layout
        self.sharing = sharing
        self.recomputes = recomputes
        # One for all machines, as both ends count the messages.
        self.mail = Mail(session, device_of_messages(session))
        self.logs = PipelineLogs(session)
        self.samples = tf.Variable(0.0, trainable=False, name="samples_of_batch")
        self.reset()

    def reset(self) -> None:
        """What depends on how the model is compiled is made again."""
        self.machines: list[Machine] = []
        self.trains = False
        self.reach: dict[str, Reach] = {}  # by the structure of targets that it has been trained on
        self.logs.forget()


def _listed(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
