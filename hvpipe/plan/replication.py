"""Groups of devices that run one stage together, and a cluster in which each group counts as one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations

from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Cluster, Device, Host, Link
from hvpipe.specs.profile import Profile

Group = tuple[str, ...]
"""The devices of a stage: its replicas."""


def groupings(cluster: Cluster, stages: int) -> Iterator[list[Group]]:
    """Yield ways to give each stage the same number of devices: whole pipelines side by side.

    Groups neighbours (replicas on one host reduce over its inner links), or devices a stride apart (whole
    pipelines on one host), each in the cluster's order and by speed. Left-over devices stay idle.
    """
    each = len(cluster.devices) // stages
    if each < 2:
        return
    listed = [device.name for device in cluster.devices]
    fastest = [device.name for device in sorted(cluster.devices, key=lambda device: -device.speed)]
    found = []
    for names in (listed, fastest):
        found.append([tuple(names[stage * each : (stage + 1) * each]) for stage in range(stages)])
        found.append([tuple(names[stage : stages * each : stages]) for stage in range(stages)])
    yield from [groups for place, groups in enumerate(found) if groups not in found[:place]]


def grouped(cluster: Cluster, groups: Sequence[Group]) -> Cluster:
    """Return a cluster with each group as one device on its own host, named after the group's first device.

    It is as fast as all devices of the group, with the memory of the smallest, as each holds the whole stage.
    Between two groups, as many micro-batches travel at once as the smaller has devices, each over the slowest
    link.
    """
    devices = []
    for group in groups:
        members = [cluster.device(name) for name in group]
        limits = [device.memory_bytes for device in members if device.memory_bytes is not None]
        speed = sum(device.speed for device in members)
        devices.append(Device(group[0], speed, min(limits) if limits else None))
    links = {(one[0], other[0]): _between(cluster, one, other) for one, other in combinations(groups, 2)}
    if len(set(links.values())) == 1:
        (link,) = set(links.values())
        return Cluster(tuple(Host(device.name, (device,), link) for device in devices))
    hosts = tuple(Host(device.name, (device,)) for device in devices)
    return Cluster(hosts, tuple((one, other, link) for (one, other), link in links.items()))


def ungrouped(plan: Plan, profile: Profile, cluster: Cluster, groups: Sequence[Group]) -> Plan:
    """Return the plan for the groups' real devices, from a plan for the `grouped` cluster."""
    group_of = {group[0]: group for group in groups}
    placement = [(group_of[devices[0]], layers) for devices, layers in plan.placement(profile)]
    return Plan.of(profile, cluster, placement, plan.pipelining, "hybrid")


def _between(cluster: Cluster, one: Group, other: Group) -> Link:
    slowest = reduce(Link.joined, (cluster.link(a, b) for a in one for b in other))
    at_once = min(len(one), len(other))
    return replace(slowest, bandwidth_bytes_per_s=slowest.bandwidth_bytes_per_s * at_once)
