"""Groups of devices that run one stage together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from hvpipe.specs.cluster import Cluster

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


def device_kinds(cluster: Cluster) -> dict[str, Hashable]:
    """Return a kind for each device; exchanging two devices of a kind changes no forecast.

    Devices of a kind have the same speed, type and memory. They are on the same host, or alone on hosts with
    the same links in the same rack. With measured links, each device is a kind of its own.
    """
    kinds: dict[str, Hashable] = {}
    for host in cluster.hosts:
        for device in host.devices:
            where: Hashable = host.name if len(host.devices) > 1 else (host.rack, host.link)
            kinds[device.name] = (
                device.name if cluster.measured else (device.speed, device.type, device.memory_bytes, where)
            )
    return kinds
