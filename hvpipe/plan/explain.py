"""Why each cut of a plan is where it is: what it costs there, and what a layer earlier or later."""

from __future__ import annotations

from hvpipe.errors import PlanError
from hvpipe.plan.placement import Placement, StageCost, stage_costs
from hvpipe.plan.stages import Plan
from hvpipe.profile import Profile
from hvpipe.topology import Cluster


def explain(plan: Plan, profile: Profile, cluster: Cluster) -> list[str]:
    """A line for each cut: its tensors, its two stages, and the same two if the cut were a layer off.

    cut 1 behind relu_3 (h0 | h1): 12.8 MB; 31.0 | 29.5 ms; behind conv_3: 25.7 MB, 38.1 | 35.2 ms; ...
    """
    plan.check(profile, cluster)
    if not plan.contiguous:
        raise PlanError(f"Only a pipeline has cuts to explain. Received: method={plan.method!r}")
    placement = plan.placement(profile)
    return [_explain_cut(plan, profile, cluster, placement, cut) for cut in range(1, len(placement))]


def _explain_cut(plan: Plan, profile: Profile, cluster: Cluster, placement: Placement, cut: int) -> str:
    left, right = placement[cut - 1], placement[cut]
    end = right[1][0]
    lines = [
        f"cut {cut} behind {profile.layers[end - 1].name} ({', '.join(left[0])} | {', '.join(right[0])}): "
        + _numbers(profile, end, [stage.cost for stage in plan.stages[cut - 1 : cut + 1]])
    ]
    for other in (end - 1, end + 1):
        where = f"behind {profile.layers[other - 1].name}"
        if not left[1][0] < other < right[1][-1] + 1:
            lines.append(f"{where}: leaves a stage without layers")
            continue
        moved: Placement = [
            *placement[: cut - 1],
            (left[0], range(left[1][0], other)),
            (right[0], range(other, right[1][-1] + 1)),
            *placement[cut + 1 :],
        ]
        costs = stage_costs(profile, cluster, moved, plan.pipelining)[cut - 1 : cut + 1]
        lines.append(f"{where}: {_numbers(profile, other, costs)}{_verdict(plan, cluster, costs, cut)}")
    return "; ".join(lines)


def _numbers(profile: Profile, end: int, costs: list[StageCost]) -> str:
    crossing = sum(
        layer.output_bytes
        for layer, users in zip(profile.layers[:end], profile.users, strict=False)
        if users and users[-1] >= end
    )
    left, right = (1e3 * cost.total_s for cost in costs)
    return f"{crossing / 1e6:.3g} MB, {left:.3g} | {right:.3g} ms"


def _verdict(plan: Plan, cluster: Cluster, costs: list[StageCost], cut: int) -> str:
    """What speaks against the cut elsewhere, if anything does."""
    for stage, cost in zip(plan.stages[cut - 1 : cut + 1], costs, strict=True):
        for device in stage.devices:
            limit_bytes = cluster.device(device).memory_bytes
            if limit_bytes is not None and cost.memory_bytes > limit_bytes:
                return f" (memory of {device} exceeded by {(cost.memory_bytes - limit_bytes) / 1e6:.3g} MB)"
    here_s = max(stage.cost.total_s for stage in plan.stages[cut - 1 : cut + 1])
    there_s = max(cost.total_s for cost in costs)
    return f" (slower by {1e3 * (there_s - here_s):.3g} ms)" if there_s > here_s else ""
