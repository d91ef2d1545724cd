"""Runs of consecutive layers, timed as a pipeline runs them: they correct what each layer took by itself.

A layer that is called again and again finds its weights in the processor's caches, and a short call may end
before the operating system stops a rank that has had its share; in a step it is not so. So the layers' own
times tell their shares of a run, and the time of the run tells the seconds.
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
from hvpipe.keras.profiling.timed_stage import Wires, Work, same_state
from hvpipe.specs.profile import LayerCost

_RUNS = 8
"""Into about how many a model is cut, by time."""

_AT_A_TIME_BYTES = 1 << 30
"""What runs that are timed together may take: a model may be measured that does not fit."""


def corrected(
    graph: LayerGraph, inputs: Sequence[Any], costs: Sequence[LayerCost], stopwatch: Stopwatch
) -> list[LayerCost]:
    """The costs of the graph's calls, scaled so that those of each run add up to its time, both ways.

    Runs are timed in turn as in a step: all forwards, then all backwards from the last. Of a model that
    takes more memory than 1 GiB, as many at a time as go into it.
    """
    runs = _runs(costs)
    stages = cut_stages(graph, [*runs, []])
    wires = Wires(stages, inputs)
    found: list[LayerCost] = []
    for together in _together(runs, costs):
        layers = [layer for run in together for layer in stages.layers(run)]
        with lent_memory(layers), same_state(layers):
            times_s = _times_s(stages, wires, together, stopwatch)
        for run, (forward_s, backward_s) in zip(together, times_s, strict=True):
            found.extend(_scaled([costs[place] for place in runs[run]], forward_s, backward_s))
    return found


def _runs(costs: Sequence[LayerCost]) -> list[list[int]]:
    """Consecutive places; each run but the last takes an eighth of the time, or all the memory there is."""
    whole_s = sum(cost.compute_s for cost in costs)
    runs: list[list[int]] = [[]]
    taken_s, held_bytes = 0.0, 0
    for place, cost in enumerate(costs):
        if runs[-1] and (taken_s >= whole_s / _RUNS or held_bytes + _bytes(cost) > _AT_A_TIME_BYTES):
            runs.append([])
            taken_s, held_bytes = 0.0, 0
        runs[-1].append(place)
        taken_s += cost.compute_s
        held_bytes += _bytes(cost)
    return runs


def _together(runs: Sequence[Sequence[int]], costs: Sequence[LayerCost]) -> Iterator[list[int]]:
    """The numbers of consecutive runs that have memory at the same time."""
    found: list[int] = []
    held_bytes = 0
    for run, places in enumerate(runs):
        size_bytes = sum(_bytes(costs[place]) for place in places)
        if found and held_bytes + size_bytes > _AT_A_TIME_BYTES:
            yield found
            found, held_bytes = [], 0
        found.append(run)
        held_bytes += size_bytes
    yield found


def _bytes(cost: LayerCost) -> int:
    """Weights, the sums of their gradients, and what two forwards save: one goes when the next is done."""
    return 2 * (cost.weight_bytes + cost.saved_bytes)


def _times_s(
    stages: Stages, wires: Wires, together: Sequence[int], stopwatch: Stopwatch
) -> list[tuple[float, float]]:
    """The forward and the backward of each of these runs."""
    works = []
    for run in together:
        functions = StageFunctions(stages, run, targets=(), loss=None)
        works.append(Work(stages, run, functions, wires.take(run)))
        wires.put(run, works[-1].outputs)
    backwards = [(place, work.backward) for place, work in enumerate(works)]
    there = [(place, timed) for place, timed in reversed(backwards) if timed is not None]
    taken_s = stopwatch.in_turn_s([*(work.forward for work in works), *(timed for _, timed in there)])
    forwards_s, rest_s = taken_s[: len(works)], taken_s[len(works) :]
    backward_s = {place: s for (place, _), s in zip(there, rest_s, strict=True)}
    return [(s, backward_s.get(place, 0.0)) for place, s in enumerate(forwards_s)]


def _scaled(costs: Sequence[LayerCost], forward_s: float, backward_s: float) -> Iterator[LayerCost]:
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


def _factor(run_s: float, layers_s: float) -> float:
    """Too short to be told from an empty call, a run or its layers say nothing."""
    return run_s / layers_s if run_s > 0 and layers_s > 0 else 1.0
