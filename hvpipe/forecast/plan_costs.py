"""A plan as the arguments of `simulate` and `lower_bound_s`: its dataflow and the times of its stages."""

from __future__ import annotations

from hvpipe.forecast.layer_sums import LayerSums
from hvpipe.forecast.simulate import Costs, StageTimes
from hvpipe.forecast.stage_work import ends_of, speed_1_seconds
from hvpipe.plan.stage_plan import Plan
from hvpipe.schedule.program import Dataflow
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile


def dataflow_of(plan: Plan, profile: Profile) -> Dataflow:
    """Return the plan's dataflow: which stages use which stages' outputs."""
    crossings = LayerSums(profile).crossings(ends_of(plan.placement(profile)))
    return Dataflow(len(plan.stages), tuple(sorted(crossings)))


def costs_of(plan: Plan, profile: Profile, cluster: Cluster) -> Costs:
    """Return the seconds that each stage takes for a micro-batch on each of its devices."""
    sums = LayerSums(profile)
    ends = ends_of(plan.placement(profile))
    crossings = sums.crossings(ends)
    costs = []
    kinds = {device.type for device in cluster.devices}
    on = {kind: speed_1_seconds(sums.on(kind), ends, plan.pipelining) for kind in kinds}
    for number, stage in enumerate(plan.stages):
        of_devices = []
        for device in stage.devices:
            one = cluster.device(device)
            forward_s, backward_s, _, weights_s = (s / one.speed for s in on[one.type][number])
            there_s, back_s = (
                {
                    user: [
                        crossing.time_s(cluster.link(device, other), back)
                        for other in plan.stages[user].devices
                    ]
                    for (maker, user), crossing in crossings.items()
                    if maker == number
                }
                for back in (False, True)
            )
            weights_s = min(weights_s, backward_s) + cluster.action_s
            forward_s += cluster.action_s
            backward_s += cluster.action_s * (2 if plan.pipelining.schedule == "zb-h1" else 1)
            of_devices.append(StageTimes(forward_s, backward_s, weights_s, there_s, back_s))
        costs.append(of_devices)
    return costs
