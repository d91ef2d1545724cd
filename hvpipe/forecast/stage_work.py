"""The work of a pipeline's step for the event run: times of each rank, wires between ranks, shared ports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvpipe.forecast.event_run import Wire, Work, edges_of
from hvpipe.forecast.layer_sums import Crossing, LayerSums
from hvpipe.forecast.simulate import Resource
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.placement_cost import Placement
from hvpipe.schedule.coded import CodedSchedule
from hvpipe.specs.cluster import Cluster


def ends_of(placement: Placement) -> list[int]:
    """Return the end of each stage's layers."""
    return [places[-1] + 1 for _, places in placement]


def names_of(placement: Placement) -> list[str]:
    """Return the device of each rank: stage by stage, replica by replica."""
    return list(dict.fromkeys(name for devices, _ in placement for name in devices))


def speed_1_seconds(sums: LayerSums, ends: Sequence[int], pipelining: Pipelining) -> list[list[float]]:
    """Return for each stage the seconds of F, B, I and W on a device of speed 1.

    If a stage recomputes and I and W run apart, each runs the forward again. Stage 0 has an empty I.
    """
    found, start = [], 0
    for stage, end in enumerate(ends):
        forward_s, backward_s, weights_s = (
            of[end] - of[start] for of in (sums.forward_s, sums.backward_s, sums.weights_s)
        )
        again_s = forward_s if pipelining.recomputes(stage) else 0.0
        whole_s = backward_s + again_s
        apart_s = again_s if pipelining.schedule == "zb-h1" and stage > 0 and weights_s > 0 else 0.0
        inputs_s = max(0.0, whole_s - weights_s)
        found.append([forward_s, whole_s + apart_s, inputs_s, weights_s + apart_s])
        start = end
    return found


@dataclass
class _Wires:
    """The wires between the ranks of a placement, and the resources that they share.

    Devices of a host share its network link, which sends and receives at the same time. Inside a host, each
    pair of devices has a wire for each direction. A message keeps a host's link busy only as long as this
    link needs, even if the message travels for longer.
    """

    cluster: Cluster
    names: Sequence[str]
    schedule: CodedSchedule
    crossings: Mapping[tuple[int, int], Crossing]
    numbers: dict[Resource, int]

    def between(self, maker: int, user: int, back: bool) -> dict[tuple[int, int], Wire]:
        """Return the wires from one stage to another, for the ranks that share a micro-batch."""
        m, home = self.schedule.microbatches, self.schedule.home
        makers, users = home[maker * m : (maker + 1) * m], home[user * m : (user + 1) * m]
        crossing = self.crossings[maker, user]
        found = {}
        for one, other in dict.fromkeys(zip(makers, users, strict=True)):
            source, target = (other, one) if back else (one, other)
            if source != target and (wire := self._wire(source, target, crossing, back)):
                found[source, target] = wire
        return found

    def _wire(self, source: int, target: int, crossing: Crossing, back: bool) -> Wire | None:
        one, other = self.names[source], self.names[target]
        seconds = crossing.time_s(self.cluster.link(one, other), back)
        if seconds == 0:
            return None
        shared = self.cluster.ports(one, other)
        if not shared:
            return seconds, ((self._number((f"to {target}", source)), seconds),)
        return seconds, tuple(
            (self._number(port), min(seconds, crossing.time_s(link, back))) for port, link in shared
        )

    def _number(self, resource: Resource) -> int:
        return self.numbers.setdefault(resource, len(self.numbers))


def stage_work(
    sums: LayerSums,
    cluster: Cluster,
    placement: Placement,
    pipelining: Pipelining,
    schedule: CodedSchedule,
    crossings: Mapping[tuple[int, int], Crossing],
) -> tuple[Work, list[Resource]]:
    """Return the work of a step, and the names of the resources that its wires share.

    Args:
        sums: Sums of the profile of one micro-batch.
        cluster: The devices and links.
        placement: The devices and layers of each stage, a pipeline.
        pipelining: Which stages recompute.
        schedule: The schedule of the placement.
        crossings: What travels between its stages.
    """
    names = names_of(placement)
    devices = [cluster.device(name) for name in names]
    ends = ends_of(placement)
    on = {kind: speed_1_seconds(sums.on(kind), ends, pipelining) for kind in {d.type for d in devices}}
    seconds = [
        {job: on[device.type][job >> 2][job & 3] / device.speed + cluster.action_s for job in jobs}
        for device, jobs in zip(devices, schedule.jobs_of, strict=True)
    ]
    numbers: dict[Resource, int] = {}
    wires = _Wires(cluster, names, schedule, crossings, numbers)
    edges = edges_of(schedule, crossings, wires.between)
    return Work(schedule, seconds, edges, len(numbers)), list(numbers)
