"""Checks that all ranks make the same pipeline: the same model, arguments, cut and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import keras

from hvpipe.errors import MismatchError, listed
from hvpipe.keras.graph.layer_graph import Call, LayerGraph
from hvpipe.keras.pipeline.layout import Layout
from hvpipe.keras.same_model import check_same, layer_items
from hvpipe.session import Session

_MODEL, _REST = "model", "the rest"


def check_same_pipeline(session: Session, layout: Layout) -> None:
    """Raise MismatchError, on all ranks, unless all of them have the same layout; collective."""
    everyone = session.engine.allgather_object(described(layout), "pipeline_parallel")
    first = everyone[0]
    odd = next(((rank, one) for rank, one in enumerate(everyone) if one != first), None)
    if odd is None:
        layers = [call.operation for call in layout.stages.graph.calls]
        check_same(session, "pipeline_parallel needs the same model on all ranks", layer_items(layers))
        return
    rank, other = odd
    # A few layers more may be a different number of stages, too: the model first.
    if first[_MODEL] != other[_MODEL]:
        calls = session.engine.allgather_object(_calls(layout.stages.graph), "pipeline_parallel")
        here, there = _first_difference(calls[0], calls[rank])
        raise MismatchError(
            "pipeline_parallel needs the same model on all ranks. "
            f"Received: {here} on rank 0 and {there} on rank {rank}"
        )
    name = next(name for name in first if first[name] != other[name])
    says = "{}={}" if name.isidentifier() else "{} {}"
    raise MismatchError(
        "pipeline_parallel needs the same arguments on all ranks. Received: "
        f"{says.format(name, first[name])} on rank 0 and {says.format(name, other[name])} on rank {rank}"
    )


def described(layout: Layout) -> dict[str, str]:
    """Return what ranks compare: the model as a checksum, then each argument or choice of the planner."""
    graph, schedule = layout.stages.graph, layout.whole_schedule
    cuts = [cut.calls for cut in layout.stages.cuts]
    texts = [text for _, text in _calls(graph)]
    links = [[number for number, _ in call.reads] for call in graph.calls]
    return {
        _MODEL: _checksum((texts, links, graph.tensors, graph.inputs, graph.outputs)),
        "stages": str(len(cuts)),
        "microbatches": str(schedule.microbatches),
        "schedule": repr(schedule.name),
        "replicas": str(tuple(len(layout.ranks_of(stage)) for stage in range(len(cuts)))),
        "stages on ranks": str(layout.ranks),
        "stages with numbers of layers": str([len(calls) for calls in cuts]),
        _REST: f"of the plan with checksum {_checksum((cuts, schedule.actions))}",
    }


def _checksum(content: object) -> str:
    return f"{crc32(repr(content).encode()):08x}"


def _calls(graph: LayerGraph) -> list[tuple[str, str]]:
    """Return the name of each call, and what must be equal: names that Keras numbers may differ."""
    return [(call.name, _described_call(graph, call)) for call in graph.calls]


def _described_call(graph: LayerGraph, call: Call) -> str:
    weights: list[Any] = getattr(call.operation, "variables", [])
    held = [f"{keras.backend.standardize_dtype(v.dtype)}{list(v.shape)}" for v in weights]
    made = [graph.tensors[number] for number, _ in call.writes]
    has = f"variables {listed(held)}" if held else "no variables"
    makes = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in made)
    return f"{type(call.operation).__name__} with {has} and output {makes}"


def _first_difference(ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Say what the first calls are that differ, one of each rank."""
    for place in range(max(len(ours), len(theirs))):
        one, other = (calls[place] if place < len(calls) else None for calls in (ours, theirs))
        if one is None or other is None or one[1] != other[1]:
            return _said(place, one), _said(place, other)
    return "other links between the layers, or inputs,", "these"


def _said(place: int, call: tuple[str, str] | None) -> str:
    return f"no layer {place}" if call is None else f"layer {place}, {call[0]!r}, {call[1]},"
