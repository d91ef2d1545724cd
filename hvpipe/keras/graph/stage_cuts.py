"""Cuts a model's graph into stages: the calls of each, and the tensors that travel between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.graph.layer_graph import LayerGraph
from hvpipe.schedule.program import Dataflow


@dataclass(frozen=True)
class Wire:
    """A tensor that travels between stages: a tensor of the graph by its number, or its Keras mask."""

    number: int
    mask: bool = False


@dataclass(frozen=True)
class StageCut:
    """One stage, as all ranks see it.

    Attributes:
        calls: The indices of its layer calls in the graph.
        inputs: The numbers of the model inputs that it reads.
        receives: `receives[s]` comes straight from stage s: the one before it, or any before
            that (a skip connection).
        sends: `sends[t]` goes straight to stage t.
    """

    calls: tuple[int, ...]
    inputs: tuple[int, ...]
    receives: Mapping[int, tuple[Wire, ...]]
    sends: Mapping[int, tuple[Wire, ...]]

    @cached_property
    def outputs(self) -> tuple[Wire, ...]:
        """The wires that other stages receive, each once."""
        wires = {wire for sent in self.sends.values() for wire in sent}
        return tuple(sorted(wires, key=lambda wire: (wire.number, wire.mask)))

    @cached_property
    def wires_in(self) -> tuple[Wire, ...]:
        """The wires that the stage receives, by sending stage."""
        return tuple(wire for source in sorted(self.receives) for wire in self.receives[source])


@dataclass(frozen=True)
class Stages:
    """A graph cut into stages, in order. The last stage computes the loss, so it receives all outputs."""

    graph: LayerGraph
    cuts: tuple[StageCut, ...]

    @property
    def dataflow(self) -> Dataflow:
        """The dataflow: which stage sends to which."""
        edges = {(source, s) for s, cut in enumerate(self.cuts) for source in cut.receives}
        return Dataflow(len(self.cuts), tuple(sorted(edges)))

    def spec(self, wire: Wire) -> Any:
        """Return shape (None for the batch) and dtype of a wire, as a tf.TensorSpec."""
        tensor = self.graph.tensors[wire.number]
        if wire.mask:
            return tf.TensorSpec(tensor.mask_shape, tf.bool)
        return tf.TensorSpec(tensor.shape, tensor.dtype)

    def without_users(self, stage: int, unreached: Collection[tuple[int, Wire]]) -> list[Wire]:
        """Return the outputs of a stage that no other stage has a gradient for.

        `unreached` holds wires without a gradient, each with the stage that receives it.
        """
        sends = self.cuts[stage].sends
        return [
            wire
            for wire in self.floating(self.cuts[stage].outputs)
            if all((user, wire) in unreached for user, sent in sends.items() if wire in sent)
        ]

    def floating(self, wires: Sequence[Wire]) -> tuple[Wire, ...]:
        """Return the wires that have gradients."""
        return tuple(
            w for w in wires if not w.mask and tf.as_dtype(self.graph.tensors[w.number].dtype).is_floating
        )

    def layers(self, stage: int) -> list[Any]:
        """Return the layers of a stage, each once."""
        return self.graph.layers(self.cuts[stage].calls)


def cut_stages(graph: LayerGraph, calls_of: Sequence[Sequence[int]]) -> Stages:
    """Cut a graph into stages.

    Args:
        graph: The model.
        calls_of: The indices of each stage's calls, stage by stage.

    Returns:
        The stages.

    Raises:
        HvpipeError: A call is in no stage or in several, a stage reads from a later one, or a string would
            travel between stages.
    """
    stage_of = {call: stage for stage, of_stage in enumerate(calls_of) for call in of_stage}
    if sorted(call for of_stage in calls_of for call in of_stage) != list(range(len(graph.calls))):
        raise HvpipeError(
            f"Stages should hold each of {len(graph.calls)} layer calls once. "
            f"Received: {[len(of_stage) for of_stage in calls_of]} of which {len(stage_of)} differ"
        )
    makers, mask_ends = graph.makers(), graph.mask_ends()
    crossing: dict[tuple[int, int], set[int]] = {}
    masked: dict[tuple[int, int], set[int]] = {}  # the same tensors, if their mask is read
    inputs: list[set[int]] = [set() for _ in calls_of]

    def use(number: int, stage: int, what: str, call: int) -> None:
        if number not in makers:
            inputs[stage].add(number)
            return
        source = stage_of[makers[number]]
        if source > stage:
            raise HvpipeError(
                f"A stage should read only from earlier stages. Received: {what} of stage {stage} reads from "
                f"{graph.calls[makers[number]].name} of stage {source}"
            )
        if source < stage:
            crossing.setdefault((source, stage), set()).add(number)
            if graph.tensors[number].mask_shape is not None and call <= mask_ends.get(number, call):
                masked.setdefault((source, stage), set()).add(number)

    for index, call in enumerate(graph.calls):
        for number, _ in call.reads:
            use(number, stage_of[index], call.name, index)
    for number in graph.outputs:
        use(number, len(calls_of) - 1, "the loss", len(graph.calls))
    wires = {pair: _wires(graph, numbers, masked.get(pair, set())) for pair, numbers in crossing.items()}
    cuts = [
        StageCut(
            calls=tuple(sorted(of_stage)),
            inputs=tuple(sorted(inputs[stage])),
            receives={s: wires[s, t] for s, t in sorted(wires) if t == stage},
            sends={t: wires[s, t] for s, t in sorted(wires) if s == stage},
        )
        for stage, of_stage in enumerate(calls_of)
    ]
    return Stages(graph, tuple(cuts))


def _wires(graph: LayerGraph, numbers: set[int], masked: set[int]) -> tuple[Wire, ...]:
    """Return the wires of these tensors, each followed by its mask if it is among `masked`."""
    found = []
    for number in sorted(numbers):
        tensor = graph.tensors[number]
        if tensor.dtype == "string":
            raise HvpipeError(
                "Stages cannot send strings to each other: keep the layers that read strings in the first "
                f"stage. Received: tensor {number} of {graph.name}"
            )
        found.append(Wire(number))
        if number in masked:
            found.append(Wire(number, mask=True))
    return tuple(found)
