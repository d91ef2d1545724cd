"""Explains the cuts of a plan: the cost of each, and its cost a layer earlier or later."""

from __future__ import annotations

from hvpipe.errors import PlanError
from hvpipe.plan.placement_cost import Placement
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile


def explain(plan: Plan, profile: Profile, cluster: Cluster) -> list[str]:
    """Explain each cut of a pipeline, and the same cut one layer earlier or later.

    A line gives the bytes that cross the cut and the times of its two stages.

    Args:
        plan: A pipeline.
        profile: The profile of the plan's model.
        cluster: The cluster that the plan was made for.

    Returns:
        A line for each cut.

    Raises:
        PlanError: If the plan is not a pipeline, or is of another model or cluster.

    Example:
        ```python
        print("\\n".join(explain(plan, profile, cluster)))
        # cut 1 after relu_3 (h0 | h1): 12.8 MB, 31 | 29.5 ms; after conv_3: 25.7 MB, 38.1 | 35.2 ms; ...
        ```
    """
    plan.check(profile, cluster)
    if not plan.contiguous:
        raise PlanError(f"Only a pipeline has cuts to explain. Received: method={plan.method!r}")
    placement = plan.placement(profile)
    return [_explain_cut(plan, profile, cluster, placement, cut) for cut in range(1, len(placement))]


def _explain_cut(plan: Plan, profile: Profile, cluster: Cluster, placement: Placement, cut: int) -> str:
    """Explain the cut in front of stage number `cut`."""
    left, right = placement[cut - 1], placement[cut]
    end = right[1][0]
    lines = [
        f"cut {cut} after {profile.layers[end - 1].name} ({', '.join(left[0])} | {', '.join(right[0])}): "
        + _numbers(profile, end, plan, cut)
    ]
    for other in (end - 1, end + 1):
        if not left[1][0] < other < right[1][-1] + 1:
            lines.append(f"a layer {'earlier' if other < end else 'later'}: leaves a stage without layers")
            continue
        where = f"after {profile.layers[other - 1].name}"
        moved: Placement = [
            *placement[: cut - 1],
            (left[0], range(left[1][0], other)),
            (right[0], range(other, right[1][-1] + 1)),
            *placement[cut + 1 :],
        ]
        there = Plan.of(profile, cluster, moved, plan.pipelining, plan.method)
        lines.append(f"{where}: {_numbers(profile, other, there, cut)}{_verdict(plan, there, cluster, cut)}")
    return "; ".join(lines)


def _numbers(profile: Profile, end: int, plan: Plan, cut: int) -> str:
    """Format the bytes that cross the cut in front of layer `end`, and the times of the two stages."""
    crossing = sum(tensor.bytes for tensor in profile.tensors if tensor.maker < end <= tensor.users[-1])
    left, right = (1e3 * stage.cost.total_s for stage in plan.stages[cut - 1 : cut + 1])
    return f"{crossing / 1e6:.3g} MB, {left:.3g} | {right:.3g} ms"


def _verdict(plan: Plan, there: Plan, cluster: Cluster, cut: int) -> str:
    """Say why the moved cut is worse, if it is: too little memory, or more time on its devices."""
    # Chunks of a device do not all hold the most at the same time.
    exceeded = "may be exceeded" if plan.pipelining.chunks > 1 else "exceeded"
    for device, missing_bytes in there.shortages(cluster).items():
        return f" (memory of {device} {exceeded} by {missing_bytes / 1e6:.3g} MB)"
    beside = [device for stage in plan.stages[cut - 1 : cut + 1] for device in stage.devices]
    slower_s = max(there.times_s[name] for name in beside) - max(plan.times_s[name] for name in beside)
    return f" (slower by {1e3 * slower_s:.3g} ms)" if slower_s > 0 else ""
