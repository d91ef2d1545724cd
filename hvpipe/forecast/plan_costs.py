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
    for number, seconds in enumerate(speed_1_seconds(sums, ends, plan.pipelining)):
        of_devices = []
        for device in plan.stages[number].devices:
            forward_s, backward_s, _, weights_s = (s / cluster.device(device).speed for s in seconds)
            transfers_s = {
                user: [
                    cluster.link(device, other).time_s(crossing.bytes, crossing.messages)
                    for other in plan.stages[user].devices
                ]
                for (maker, user), crossing in crossings.items()
                if maker == number
            }
            of_devices.append(StageTimes(forward_s, backward_s, min(weights_s, backward_s), transfers_s))
        costs.append(of_devices)
    return costs
