"""Times spans of consecutive layers as a pipeline runs them, to correct the times of single layers.

A layer that is called repeatedly finds its weights in the CPU's caches. A short call may end before the
operating system preempts a rank that has used its time slice. Neither holds in a step. So the layers' own
times give their shares of a span, and the span's time gives the seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hvpipe.keras.graph.deferred_build import lent_memory
from hvpipe.keras.graph.layer_graph import LayerGraph
from hvpipe.keras.graph.stage import StageFunctions
from hvpipe.keras.graph.stage_cuts import Stages, cut_stages
from hvpipe.keras.profiling.stopwatch import Stopwatch
from hvpipe.keras.profiling.timed_stage import Activations, TimedStage, same_state
from hvpipe.specs.layer_cost import LayerCost

_SPANS = 8
"""About how many spans of equal time a model is cut into."""

_AT_A_TIME_BYTES = 1 << 30
"""The most bytes of spans that are timed together. The model may be larger than the memory."""


def corrected(
    graph: LayerGraph, inputs: Sequence[Any], costs: Sequence[LayerCost], stopwatch: Stopwatch
) -> list[LayerCost]:
    """Return the costs of the graph's calls, scaled so that the costs in each span add up to its time.

    Spans are timed in turn as in a step: all forwards, then all backwards from the last one. If the model
    takes more than 1 GiB, only spans that fit into 1 GiB together are timed in turn.

    Args:
        graph: The model.
        inputs: Its inputs.
        costs: The measured cost of each call.
        stopwatch: Times the spans.
    """
    spans = _spans(costs)
    stages = cut_stages(graph, [*spans, []])
    activations = Activations(stages, inputs)
    found: list[LayerCost] = []
    for group in _groups(spans, costs):
        layers = [layer for span in group for layer in stages.layers(span)]
        with lent_memory(layers), same_state(layers):
            times_s = _times_s(stages, activations, group, stopwatch)
        for span, (forward_s, backward_s) in zip(group, times_s, strict=True):
            found.extend(_scaled([costs[index] for index in spans[span]], forward_s, backward_s))
    return found


def _spans(costs: Sequence[LayerCost]) -> list[list[int]]:
    """Return spans of consecutive indices. Each has an eighth of the time or of the memory limit."""
    whole_s = sum(cost.compute_s for cost in costs)
    spans: list[list[int]] = [[]]
    span_s, span_bytes = 0.0, 0
    for index, cost in enumerate(costs):
        if spans[-1] and (span_s >= whole_s / _SPANS or span_bytes + _bytes(cost) > _AT_A_TIME_BYTES):
            spans.append([])
            span_s, span_bytes = 0.0, 0
        spans[-1].append(index)
        span_s += cost.compute_s
        span_bytes += _bytes(cost)
    return spans


def _groups(spans: Sequence[Sequence[int]], costs: Sequence[LayerCost]) -> Iterator[list[int]]:
    """Yield the numbers of consecutive spans that fit into the memory limit together."""
    group: list[int] = []
    group_bytes = 0
    for span, indices in enumerate(spans):
        size_bytes = sum(_bytes(costs[index]) for index in indices)
        if group and group_bytes + size_bytes > _AT_A_TIME_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(span)
        group_bytes += size_bytes
    yield group


def _bytes(cost: LayerCost) -> int:
    """Return the bytes of the weights, their gradient accumulators, and the saved tensors of two forwards.

    Two, because the activations of one forward are freed only after the next.
    """
    return 2 * (cost.weight_bytes + cost.saved_bytes)


def _times_s(
    stages: Stages, activations: Activations, group: Sequence[int], stopwatch: Stopwatch
) -> list[tuple[float, float]]:
    """Return the forward and backward seconds of each of these spans."""
    timed = []
    for span in group:
        functions = StageFunctions(stages, span, targets=(), loss=None)
        timed.append(TimedStage(stages, span, functions, activations.take(span)))
        activations.put(span, timed[-1].outputs)
    backwards = [(index, one.backward) for index, one in enumerate(timed)]
    existing = [(index, call) for index, call in reversed(backwards) if call is not None]
    taken_s = stopwatch.in_turn_s([*(one.forward for one in timed), *(call for _, call in existing)])
    forwards_s, rest_s = taken_s[: len(timed)], taken_s[len(timed) :]
    backward_s = {index: s for (index, _), s in zip(existing, rest_s, strict=True)}
    return [(s, backward_s.get(index, 0.0)) for index, s in enumerate(forwards_s)]


def _scaled(costs: Sequence[LayerCost], forward_s: float, backward_s: float) -> Iterator[LayerCost]:
    """Yield the costs of a span's layers, scaled to the span's times."""
    forward = _factor(forward_s, sum(cost.forward_s for cost in costs))
    backward = _factor(backward_s, sum(cost.backward_s for cost in costs))
    for cost in costs:
        yield replace(
            cost,
            forward_s=forward * cost.forward_s,
            backward_s=backward * cost.backward_s,
            fixed_forward_s=forward * cost.fixed_forward_s,
            fixed_backward_s=backward * cost.fixed_backward_s,
        )


def _factor(span_s: float, layers_s: float) -> float:
    """Return the ratio; 1 if either is 0, that is, too short to tell from an empty call."""
    return span_s / layers_s if span_s > 0 and layers_s > 0 else 1.0
