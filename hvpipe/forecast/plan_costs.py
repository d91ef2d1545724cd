"""The simulation's inputs for a plan: dataflow, stage times, and the resources that transfers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hvpipe.forecast.simulate import Contention, Costs, Resource, StageTimes, links
from hvpipe.plan.stage_plan import Plan
from hvpipe.schedule.program import Dataflow, Message
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile


def dataflow_of(plan: Plan, profile: Profile) -> Dataflow:
    """Return the plan's dataflow: which stages use which stages' outputs."""
    edges = {(maker, user) for maker, user, _ in _crossing(plan, profile)}
    return Dataflow(len(plan.stages), tuple(sorted(edges)))


def costs_of(plan: Plan, profile: Profile, cluster: Cluster) -> Costs:
    """Return the seconds that each stage takes for a micro-batch on each of its devices."""
    sizes = _crossing_bytes(plan, profile)
    costs = []
    for number, (devices, places) in enumerate(plan.placement(profile)):
        layers = [profile.layers[place] for place in places]
        forward_s = sum(layer.forward_s for layer in layers)
        backward_s = sum(layer.backward_s for layer in layers)
        weights_s = sum(layer.weights_part_s for layer in layers)
        again_s = forward_s if plan.pipelining.recomputes(number) else 0.0
        of_devices = []
        for device in devices:
            speed = cluster.device(device).speed
            transfers_s = {
                user: [
                    cluster.link(device, other).time_s(sum(tensors), sum(map(bool, tensors)))
                    for other in plan.stages[user].devices
                ]
                for (maker, user), tensors in sizes.items()
                if maker == number
            }
            of_devices.append(
                StageTimes(forward_s / speed, (backward_s + again_s) / speed, weights_s / speed, transfers_s)
            )
        costs.append(of_devices)
    return costs


def contention_of(plan: Plan, profile: Profile, cluster: Cluster) -> Contention:
    """Return a function that tells which resources a message of the plan keeps busy, and for how long.

    Devices of a host share its network link, which sends and receives at the same time. Inside a host, each
    pair of devices has a wire for each direction. A message keeps a host's link busy only as long as this
    link needs, even if the message travels for longer.
    """
    sizes = _crossing_bytes(plan, profile)

    def keeps_busy(message: Message, seconds: float) -> Sequence[tuple[Resource, float]]:
        shared = cluster.ports(plan.ranks[message.source], plan.ranks[message.target])
        if not shared:
            return links(message, seconds)
        maker, user = sorted((message.producer.stage, message.consumer.stage))
        tensors = sizes[maker, user]
        total_bytes, count = sum(tensors), sum(map(bool, tensors))
        return tuple((port, min(seconds, link.time_s(total_bytes, count))) for port, link in shared)

    return keeps_busy


def _crossing(plan: Plan, profile: Profile) -> Iterator[tuple[int, int, int]]:
    """Yield (maker's stage, user's stage, bytes) for each tensor and each other stage that uses it."""
    stage_of = {
        place: number for number, (_, places) in enumerate(plan.placement(profile)) for place in places
    }
    for place, layer in enumerate(profile.layers):
        home = stage_of[place]
        for away in sorted({stage_of[user] for user in profile.users[place]} - {home}):
            yield home, away, layer.output_bytes


def _crossing_bytes(plan: Plan, profile: Profile) -> Mapping[tuple[int, int], Sequence[int]]:
    """Return the bytes of each tensor between two stages, by (maker's stage, user's stage)."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for maker, user, size_bytes in _crossing(plan, profile):
        sizes.setdefault((maker, user), []).append(size_bytes)
    return sizes
