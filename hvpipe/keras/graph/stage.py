"""Stages: runs of a model's calls, what they hand each other, and the functions that one of them runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from hvpipe.errors import HvpipeError
from hvpipe.keras.graph.activity_losses import added_losses, scaled_activities
from hvpipe.keras.graph.layer_graph import LayerGraph
from hvpipe.keras.graph.split_gradient import Halves, split_gradient
from hvpipe.schedule.program import Dataflow


@dataclass(frozen=True)
class Wire:
    """One tensor that crosses from stage to stage: a tensor of the graph by its number, or its mask."""

    number: int
    mask: bool = False


@dataclass(frozen=True)
class StageCut:
    """One stage as all ranks see it: its calls by place, and the tensors that it takes and gives.

    `receives[s]` comes from stage s, `sends[t]` goes to stage t, straight, however far away. `inputs` are the
    model's inputs that it reads.
    """

    calls: tuple[int, ...]
    inputs: tuple[int, ...]
    receives: Mapping[int, tuple[Wire, ...]]
    sends: Mapping[int, tuple[Wire, ...]]

    @cached_property
    def outputs(self) -> tuple[Wire, ...]:
        """What any other stage takes, each once."""
        wires = {wire for sent in self.sends.values() for wire in sent}
        return tuple(sorted(wires, key=lambda wire: (wire.number, wire.mask)))


@dataclass(frozen=True)
class Stages:
    """A graph cut into stages, in order. The last one has the loss, and so receives all outputs."""

    graph: LayerGraph
    cuts: tuple[StageCut, ...]

    @property
    def dataflow(self) -> Dataflow:
        edges = {(source, s) for s, cut in enumerate(self.cuts) for source in cut.receives}
        return Dataflow(len(self.cuts), tuple(sorted(edges)))

    def spec(self, wire: Wire) -> Any:
        """Shape (None for the batch) and dtype of a wire, as a tf.TensorSpec."""
        tensor = self.graph.tensors[wire.number]
        if wire.mask:
            return tf.TensorSpec(tensor.mask_shape, tf.bool)
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    def without_users(self, stage: int, unreached: Collection[tuple[int, Wire]]) -> list[Wire]:
        """The outputs of a stage that no other has a gradient for; `unreached` by users and wires."""
        sends = self.cuts[stage].sends
        return [
            wire
            for wire in self.floating(self.cuts[stage].outputs)
            if all((user, wire) in unreached for user, sent in sends.items() if wire in sent)
        ]

    def floating(self, wires: Sequence[Wire]) -> tuple[Wire, ...]:
        """Those that have gradients."""
        return tuple(
            w for w in wires if not w.mask and tf.as_dtype(self.graph.tensors[w.number].dtype).is_floating
        )

    def layers(self, stage: int) -> list[Any]:
        """The layers of a stage, each once."""
        return self.graph.layers(self.cuts[stage].calls)


def cut_stages(graph: LayerGraph, places: Sequence[Sequence[int]]) -> Stages:
    """Cut the graph: `places` are the calls of each stage, in order.

    Raises HvpipeError unless every call is in one stage and no stage takes from a later one.
    """
    stage_of = {place: stage for stage, of_stage in enumerate(places) for place in of_stage}
    if sorted(p for of_stage in places for p in of_stage) != list(range(len(graph.calls))):
        raise HvpipeError(
            f"Stages should hold each of {len(graph.calls)} layer calls once. "
            f"Received: {[len(of_stage) for of_stage in places]} of which {len(stage_of)} differ"
        )
    makers = graph.makers()
    crossing: dict[tuple[int, int], set[int]] = {}
    inputs: list[set[int]] = [set() for _ in places]

    def use(number: int, stage: int, what: str) -> None:
        if number not in makers:
            inputs[stage].add(number)
            return
        source = stage_of[makers[number]]
        if source > stage:
            raise HvpipeError(
                f"A stage should take from earlier ones. Received: {what} of stage {stage} takes from "
                f"{graph.calls[makers[number]].name} of stage {source}"
            )
        if source < stage:
            crossing.setdefault((source, stage), set()).add(number)

    for place, call in enumerate(graph.calls):
        for number, _ in call.reads:
            use(number, stage_of[place], call.name)
    for number in graph.outputs:
        use(number, len(places) - 1, "the loss")
    wires = {pair: _wires(graph, numbers) for pair, numbers in crossing.items()}
    cuts = [
        StageCut(
            calls=tuple(sorted(of_stage)),
            inputs=tuple(sorted(inputs[stage])),
            receives={s: wires[s, t] for s, t in sorted(wires) if t == stage},
            sends={t: wires[s, t] for s, t in sorted(wires) if s == stage},
        )
        for stage, of_stage in enumerate(places)
    ]
    return Stages(graph, tuple(cuts))


def _wires(graph: LayerGraph, numbers: set[int]) -> tuple[Wire, ...]:
    found = []
    for number in sorted(numbers):
        tensor = graph.tensors[number]
        if tensor.dtype == "string":
            raise HvpipeError(
                "Tensors of numbers can travel between stages, strings cannot: keep the layers that read "
                f"them in the first stage. Received: tensor {number} of {graph.name}"
            )
        found.append(Wire(number))
        if tensor.mask_shape is not None:
            found.append(Wire(number, mask=True))
    return tuple(found)


Loss = Callable[[Sequence[Any], Sequence[Any]], Any]
"""The loss of a micro-batch, a scalar: of the model's outputs and of targets and sample weights, flat."""


class StageFunctions:
    """What a rank runs of one stage. Values are flat lists: wires from each stage in order, model inputs,
    targets."""

    def __init__(
        self,
        stages: Stages,
        stage: int,
        targets: Sequence[Any],
        loss: Loss | None,
        recompute: bool = False,
        samples: Any = None,
    ) -> None:
        """`samples` is the variable that holds the batch's samples, of which values are a part; None: all."""
        self._samples = samples
        self._stages = stages
        self._cut = stages.cuts[stage]
        self._last = stage == len(stages.cuts) - 1
        self._targets = len(targets) if self._last else 0
        self._loss = loss if self._last else None
        graph = stages.graph
        self.wires_in = tuple(w for source in sorted(self._cut.receives) for w in self._cut.receives[source])
        self._signature = [
            *(stages.spec(wire) for wire in self.wires_in),
            *(stages.spec(Wire(number)) for number in self._cut.inputs),
        ]
        self._target_signature = list(targets) if self._last else []
        layers = stages.layers(stage)
        self.trainable = _unique(v for layer in layers for v in layer.trainable_variables)
        # Of a layer that several stages share, the first one counts.
        earlier = {
            id(v) for s in range(stage) for layer in stages.layers(s) for v in layer.trainable_variables
        }
        self._regularized = [v for v in self.trainable if v.regularizer is not None and id(v) not in earlier]
        self.has_loss = self._loss is not None or bool(self._regularized) or self._has_activity_losses(layers)
        self.loss_dtype = tf.float64 if keras.config.floatx() == "float64" else tf.float32
        self.outputs_of_model = len(graph.outputs) if self._last else 0
        # Those of the outputs that have a mask, which metrics count by.
        self.masked = [
            place
            for place, number in enumerate(graph.outputs)
            if self._last and graph.tensors[number].mask_shape is not None
        ]
        self._recompute = recompute
        self._passed_over: frozenset[int] = frozenset()  # among the floating outputs
        self._adds_loss = False  # told by tracing

    @cached_property
    def training(self) -> Halves:
        """Forward and backward. Outputs: `StageCut.outputs`, the loss if there is one, the model's, masks.

        Gradients are given for the floating ones and the loss, and come for the floating wires.
        """
        return split_gradient(
            lambda *values: self._run(values, training=True),
            [*self._signature, *self._target_signature],
            [v.value for v in self.trainable],
            wanted=len(self.wires_in),
            only_out=self.outputs_of_model + len(self.masked),
            recompute=self._recompute,
            passed_over=self._passed_over,
        )

    @property
    def unreached(self) -> list[Wire]:
        """The floating wires that come in, to which no gradient comes in this stage: they get 0."""
        wires = self._stages.floating(self.wires_in)
        return [wire for wire, reached in zip(wires, self.training.reached, strict=True) if not reached]

    def pass_over(self, wires: Collection[Wire]) -> None:
        """Of these outputs no user has a gradient: weights behind them alone get none, as in Keras."""
        outputs = self._stages.floating(self._cut.outputs)
        places = frozenset(place for place, wire in enumerate(outputs) if wire in wires)
        if places != self._passed_over:
            self._passed_over = places
            self.__dict__.pop("training", None)

    @property
    def trains_by_a_loss(self) -> bool:
        """Whether any loss comes of the forward in training; `has_loss` is true already where one may."""
        _ = self.training
        return self._adds_loss

    @property
    def foreign(self) -> list[Any]:
        """Weights of other stages' layers alone that the forward in training reads; they get no gradient."""
        read = {id(outside) for outside in self.training.captured}
        graph, own = self._stages.graph, {id(v) for v in self.trainable}
        every = _unique(v for la in graph.all_layers() for v in la.trainable_variables)
        return [v for v in every if id(v) not in own and id(getattr(v._value, "handle", None)) in read]

    @cached_property
    def evaluation(self) -> Any:
        """The same outputs in inference mode, without a backward; the loss with targets alone."""
        return tf.function(
            lambda *values: self._run(values, training=False),
            input_signature=[*self._signature, *self._target_signature],
            autograph=False,
        )

    @cached_property
    def prediction(self) -> Any:
        """Outputs in inference mode, without targets and loss."""
        return tf.function(
            lambda *values: self._run(values, training=False, with_loss=False),
            input_signature=self._signature,
            autograph=False,
        )

    def run_eagerly(self, values: Sequence[Any]) -> list[Any]:
        """The outputs of one forward in training mode, without making a graph."""
        return self._run(values, training=True)

    def _run(self, values: Sequence[Any], training: bool, with_loss: bool = True) -> list[Any]:
        graph, cut = self._stages.graph, self._cut
        targets = values[len(self._signature) :]
        known: dict[int, Any] = {}
        for wire, value in zip(
            [*self.wires_in, *(Wire(number) for number in cut.inputs)], values, strict=False
        ):
            if wire.mask:
                set_keras_mask(known[wire.number], value)
            else:
                # A tensor of its own: a mask must not stick to what others hold.
                known[wire.number] = tf.identity(value)
        losses: list[Any] = []
        with scaled_activities(self._stages.graph.layers(cut.calls), self._share_of):
            for place in cut.calls:
                call = graph.calls[place]
                for (number, _), value in zip(call.writes, call(known, training), strict=True):
                    known[number] = value
                losses.extend(map(self._summed, added_losses(call.operation)))
        found = [get_keras_mask(known[w.number]) if w.mask else known[w.number] for w in cut.outputs]
        for wire, value in zip(cut.outputs, found, strict=True):
            self._check_dtype(wire, value)
        results = [known[number] for number in graph.outputs] if self._last else []
        if not with_loss:
            return [*found, *results]
        losses.extend(v.regularizer(v) for v in self._regularized)
        if self._loss is not None:
            losses.insert(0, self._loss(results, targets))
        self._adds_loss |= training and bool(losses)
        if self.has_loss:
            zero = tf.zeros((), self.loss_dtype)
            found.append(tf.add_n([zero, *(tf.cast(loss, self.loss_dtype) for loss in losses)]))
        return [*found, *results, *(get_keras_mask(results[place]) for place in self.masked)]

    def _summed(self, loss: Any) -> Any:
        """What a layer has added, as Keras sums it; a sum over samples is not to be averaged over parts."""
        total = tf.reduce_sum(loss)
        if loss.shape.rank == 0 or loss.shape[0] is not None:
            return total
        return total / self._share_of(loss, total.dtype)

    def _share_of(self, tensor: Any, dtype: Any) -> Any:
        """The part of the batch's samples that a tensor has."""
        if self._samples is None:
            return tf.ones((), dtype)
        samples = tf.cast(tf.shape(tensor)[0], self.loss_dtype)
        return tf.cast(samples / tf.cast(self._samples, self.loss_dtype), dtype)

    def _check_dtype(self, wire: Wire, value: Any) -> None:
        """What reads it was made for the dtype that Keras tells, which may not be the one that comes."""
        told = self._stages.spec(wire).dtype
        if value.dtype != told:
            graph = self._stages.graph
            name = graph.calls[graph.makers()[wire.number]].name
            raise HvpipeError(
                "What goes from stage to stage should have the dtype that Keras tells of it. "
                f"{name} tells {told.name}: make it with dtype={value.dtype.name!r}, or let its output spec "
                f"tell. Received: {'a mask of ' * wire.mask}{value.dtype.name} from {name}"
            )

    @staticmethod
    def _has_activity_losses(layers: Sequence[Any]) -> bool:
        """Whether a call may add a loss: an activity regularizer, or a layer of the user's own."""
        return any(
            getattr(layer, "activity_regularizer", None) is not None
            or not type(layer).__module__.startswith("keras.")
            for outer in layers
            for layer in outer._flatten_layers()
        )


def _unique(variables: Any) -> list[Any]:
    return list({id(v): v for v in variables}.values())
