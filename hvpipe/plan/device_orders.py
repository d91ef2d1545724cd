"""The orders of devices along a pipeline: kinds of equal devices, and the links between neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import combinations, pairwise, permutations

import numpy as np

from hvpipe.errors import HvpipeError
from hvpipe.plan.greedy_fill import Cut, DeviceChoices
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.span_costs import StageDevice
from hvpipe.specs.cluster import Cluster, Device, Link

# The most hosts whose orders are all tried.
_FEW_HOSTS = 4
# A stage of several on a device may take an even part of the memory, or more, up to all, in steps: how many.
_SHARES = 4

Order = tuple[int, ...]
"""The kind of the device at each stage."""


class DeviceOrders:
    """The orders of a cluster's devices for a number of stages; devices of one kind are interchangeable.

    Devices of a kind have the same speed, memory and type. If links differ (`mixed`), they are also on the
    same host. With measured links, their links differ by at most the share `alike` instead. With chunks,
    stages go round the devices in a circle (`circle`), and an order is one round.
    """

    def __init__(self, cluster: Cluster, stages: int, pipelining: Pipelining, alike: float = 0.0) -> None:
        self.stages = stages
        self.cluster = cluster
        self._pipelining = pipelining
        self.mixed = cluster.common_link is None
        self.circle = pipelining.chunks > 1
        self.ranks = stages // pipelining.chunks
        if self.mixed and cluster.measured:
            where = _linked_alike(cluster, alike)
        else:
            where = {d.name: host.name if self.mixed else "" for host in cluster.hosts for d in host.devices}
        members: dict[tuple[float, float, str, str], list[Device]] = {}
        for device in cluster.devices:
            key = (device.speed, device.room_bytes, device.type, where[device.name])
            members.setdefault(key, []).append(device)
        # The fastest kind first: ties go to the faster device.
        keys = sorted(members, key=lambda key: (-key[0], -key[1]))
        self._members = [members[key] for key in keys]
        self.counts = [len(devices) for devices in self._members]

    @cached_property
    def in_any_order(self) -> DeviceChoices:
        """Any kind at any stage, not in a circle. With mixed links, a device is charged its slowest link."""
        kinds = range(len(self.counts))
        links = [self._slowest(kind) for kind in kinds]
        levels = (
            [self._stage_device(stage, kind, links[kind], links[kind]) for kind in kinds]
            for stage in range(self.stages)
        )
        return DeviceChoices(list(levels), self.counts)

    def in_order(self, order: Order, share: float = 1.0) -> DeviceChoices:
        """Return one kind at each stage, with its links; in a circle, with a share of its memory."""
        chunks = self._pipelining.chunks
        names = [device.name for device in self._devices(order)] * chunks
        links = [self.cluster.link(one, other) for one, other in pairwise(names)]
        around = [Link(), *links, Link()]
        levels = [
            [self._stage_device(s, kind, around[s], around[s + 1])] for s, kind in enumerate(order * chunks)
        ]
        devices = self.ranks if self.circle else 0
        return DeviceChoices(levels, [count * chunks for count in self.counts], devices, share)

    def links(self, order: Order) -> list[list[Link]]:
        """Return the link from each device of an order to each other."""
        names = [device.name for device in self._devices(order)]
        return [[self.cluster.link(one, other) for other in names] for one in names]

    def to_fit(self) -> list[DeviceChoices]:
        """Return the choices to try when memory is scarce, such as the devices with most memory first."""
        if not self.circle:
            return [self.in_any_order, self.in_order(self.by_memory())]
        orders = self.by_speed(), self.by_memory()
        return [self.in_order(order, share) for share in self.shares for order in orders]

    @property
    def shares(self) -> list[float]:
        """The shares of its device's memory to try for a stage: in a circle, from an even part up to all."""
        if not self.circle or all(device.memory_bytes is None for device in self.cluster.devices):
            return [1.0]
        even = 1 / self._pipelining.chunks
        return [even + (1 - even) * step / _SHARES for step in range(_SHARES + 1)]

    def of_names(self, names: Sequence[str]) -> DeviceChoices:
        """Return the devices of these names, one at each stage."""
        kind_of = {d.name: kind for kind, devices in enumerate(self._members) for d in devices}
        if len(names) != self.ranks or len(set(names)) != len(names) or not set(names) <= set(kind_of):
            raise HvpipeError(
                f"order should name {self.ranks} devices of {', '.join(kind_of)}, each once. "
                f"Received: order={list(names)}"
            )
        return self.in_order(tuple(kind_of[name] for name in names))

    def all(self, at_most: int) -> list[Order] | None:
        """Return every distinct order, or None if there are more than `at_most`."""
        found: list[Order] = []
        for order in _arrangements(self.counts, self.ranks):
            if len(found) == at_most:
                return None
            found.append(order)
        return found

    def by_host(self, order: Order) -> list[Order]:
        """Return orders of the same kinds that keep a host's devices together; all such if hosts are few."""
        names = [self.cluster.host_of(device.name).name for device in self._devices(order)]
        hosts = list(dict.fromkeys(names))
        few = len(hosts) <= _FEW_HOSTS and len(hosts) < len(names)
        return [
            tuple(order[i] for host in hosts for i, name in enumerate(names) if name == host)
            for hosts in (permutations(hosts) if few else [tuple(hosts)])
        ]

    def by_speed(self) -> Order:
        """Return the order of the fastest devices, the fastest first."""
        return tuple(kind for kind, count in enumerate(self.counts) for _ in range(count))[: self.ranks]

    def by_memory(self) -> Order:
        """Return the order of the devices with most memory, the largest first: 1F1B stashes most early on."""
        every = [kind for kind, count in enumerate(self.counts) for _ in range(count)]
        every.sort(key=lambda kind: -self._members[kind][0].room_bytes)
        return tuple(every[: self.ranks])

    def order_of(self, cuts: Sequence[Cut]) -> Order:
        """Return the order of the devices of these cuts."""
        return tuple(device.kind for device, _ in cuts[: self.ranks])

    def placement(self, cuts: Sequence[Cut]) -> list[tuple[tuple[str], range]]:
        """Return the names of the devices with the layers of their cuts; equal devices in cluster order."""
        placed, start = [], 0
        round_ = self._devices(self.order_of(cuts))
        for device, (_, end) in zip(round_ * self._pipelining.chunks, cuts, strict=True):
            placed.append(((device.name,), range(start, end)))
            start = end
        return placed

    def _devices(self, order: Order) -> list[Device]:
        taken = [0] * len(self.counts)
        devices = []
        for kind in order:
            devices.append(self._members[kind][taken[kind]])
            taken[kind] += 1
        return devices

    def _stage_device(self, stage: int, kind: int, receive: Link, send: Link) -> StageDevice:
        device = self._members[kind][0]
        in_flight = self._in_flight[stage]
        recompute = self._pipelining.recomputes(stage)
        return StageDevice(
            kind, device.speed, device.room_bytes, receive, send, in_flight, recompute, device.type
        )

    @cached_property
    def _in_flight(self) -> list[int]:
        replicas = (1,) * self.stages
        return self._pipelining.all_in_flight(replicas)

    def _slowest(self, kind: int) -> Link:
        if self.cluster.common_link is not None:
            return self.cluster.common_link
        name = self._members[kind][0].name
        links = [self.cluster.link(name, d.name) for d in self.cluster.devices if d.name != name]
        slowest = links[0]
        for link in links[1:]:
            slowest = slowest.joined(link)
        return slowest


def _linked_alike(cluster: Cluster, share: float) -> dict[str, str]:
    """Map each device to the first device that has the same links to all others, within a share."""
    names = [device.name for device in cluster.devices]
    figures = np.zeros((2, len(names), len(names)))
    for one, other in combinations(range(len(names)), 2):
        link = cluster.link(names[one], names[other])
        figures[:, one, other] = figures[:, other, one] = link.latency_s, link.bandwidth_bytes_per_s
    firsts: list[int] = []
    found = {}
    for place, name in enumerate(names):
        near = np.array(np.isclose(figures, figures[:, [place]], rtol=share, atol=0).all(axis=0))
        near[:, place] = True  # the link between the two compared devices does not count
        np.fill_diagonal(near, True)
        alike = [first for first in firsts if bool(near[first].all())]
        found[name] = names[alike[0]] if alike else name
        if not alike:
            firsts.append(place)
    return found


def _arrangements(counts: Sequence[int], length: int) -> Iterator[Order]:
    """Yield all sequences of `length` kinds in which no kind occurs more often than its count."""
    left, chosen, first = list(counts), list[int](), 0
    while True:
        if len(chosen) == length:
            yield tuple(chosen)
        else:
            kind = next((kind for kind in range(first, len(left)) if left[kind]), None)
            if kind is not None:
                left[kind] -= 1
                chosen.append(kind)
                first = 0
                continue
        if not chosen:
            return
        first = chosen.pop() + 1
        left[first - 1] += 1
