"""Says which rank has which part of the model, and which layer is too large for the other ranks to help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from hvpipe.keras.graph.deferred_build import weights_of
from hvpipe.keras.graph.layer_graph import LayerGraph
from hvpipe.keras.pipeline.layout import Layout
from hvpipe.keras.profiling.estimate import estimate
from hvpipe.plan.placement_cost import stage_memory
from hvpipe.plan.stage_plan import Plan
from hvpipe.plan.table import bytes_text, layers_text, table

_TOO_UNEVEN = 2.0  # how many times as long as the mean of the others a rank computes


def layout_report(layout: Layout, plan: Plan, hosts: Sequence[str], samples: int) -> Iterator[str]:
    """Yield lines: a title, a table with a line for each stage, and a warning if one layer is too large.

    Args:
        layout: The stages on the ranks.
        plan: The plan that it was made from.
        hosts: The host of each world rank.
        samples: The samples of a batch.
    """
    graph, how = layout.stages.graph, plan.pipelining
    microbatches = min(layout.microbatches, samples)
    profile = estimate(graph, -(-samples // microbatches))
    memory = stage_memory(profile, plan.placement(profile), how)
    operations = {call.name: call.operation for call in graph.calls}
    whole_count = _weight_count(operations.values())
    whole_s = sum(stage.cost.compute_s * len(stage.devices) for stage in plan.stages)
    ranks = [[layout.ranks[plan.ranks.index(device)] for device in stage.devices] for stage in plan.stages]
    rows = []
    for number, (stage, held) in enumerate(zip(plan.stages, ranks, strict=True)):
        stage_count = _weight_count([operations[name] for name in stage.layers])
        rows.append(
            [
                str(number),
                ", ".join(map(str, held)),
                ", ".join(dict.fromkeys(hosts[rank] for rank in held)),
                layers_text(stage.layers),
                _share(stage_count, whole_count),
                _share(stage.cost.compute_s * len(stage.devices), whole_s),
                bytes_text(sum(memory[number])),
            ]
        )
    yield (
        f"hvpipe: {graph.name} in {len(rows)} stage{'s' * (len(rows) > 1)} on {len(layout.ranks)} "
        f"rank{'s' * (len(layout.ranks) > 1)}, {how.schedule}, {microbatches} micro-batches of "
        f"{profile.batch_size} sample{'s' * (profile.batch_size > 1)}. Memory is an estimate."
    )
    yield from table(["stage", "rank", "host", "layers", "weights", "computing", "memory"], rows)
    yield from _warning(graph, plan)


def _warning(graph: LayerGraph, plan: Plan) -> Iterator[str]:
    """Yield a warning if a layer alone keeps its rank busy for much longer than the others: no cut helps."""
    costs = {layer.name: layer.forward_s + layer.backward_s for layer in estimate(graph, samples=1).layers}
    whole_s = sum(stage.cost.compute_s * len(stage.devices) for stage in plan.stages)
    worst_s, worst, copies = 0.0, "", 0
    for stage in plan.stages:
        name = max(stage.layers, key=lambda name: costs[name])
        of_stage_s = sum(costs[name] for name in stage.layers)
        alone_s = stage.cost.compute_s * costs[name] / of_stage_s if of_stage_s else 0.0
        if alone_s > worst_s:
            worst_s, worst, copies = alone_s, name, len(stage.devices)
    others = len(plan.ranks) - copies
    if not worst or not others:
        return
    mean_s = (whole_s - worst_s * copies) / others
    if worst_s > _TOO_UNEVEN * mean_s:
        yield (
            f"hvpipe: warning: {worst!r} has {_share(worst_s * copies, whole_s)} of the computing, so the "
            f"other ranks mostly wait. It cannot be cut: {_why_one(graph, worst)}."
        )


def _why_one(graph: LayerGraph, name: str) -> str:
    """Return why a call cannot be cut, and what to do."""
    operation = next(call.operation for call in graph.calls if call.name == name)
    kind = type(operation).__name__
    why = dict(graph.whole).get(name)
    if why is not None:
        return f"it is a nested model, which stays whole because {why}"
    if isinstance(operation, keras.Model):
        return (
            f"{kind} is a subclassed model. Make it functional, keras.Model(inputs, outputs), to have it cut"
        )
    if not type(operation).__module__.startswith("keras."):
        return f"{kind} is one layer to Keras. Call the layers inside it in the model, to have it cut"
    return f"{kind} is one layer. Use fewer ranks, or replicas of its stage"


def _weight_count(operations: Any) -> int:
    return sum(
        math.prod(v.shape) for v in weights_of(one for one in operations if isinstance(one, keras.Layer))
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "0%"
