"""Chooses the devices of data parallel: those whose step is shortest by the forecast."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from itertools import product

from hvpipe.forecast.data_parallel import DataParallelSteps
from hvpipe.plan.replication import Group, device_kinds
from hvpipe.search.judge import MANY_DEVICES
from hvpipe.specs.cluster import Cluster, Device
from hvpipe.specs.profile import Profile

# Sets of devices are tried until they have this number of devices together.
_WORK = 40_000
# How many of the best sets are changed.
_CHANGED = 30
# Of a ranking of many devices, prefixes grow by about this share.
_GROWTH = 1.15


def data_devices(
    profile: Profile, cluster: Cluster, samples: int, most: int, part: float = 1.0
) -> list[Group]:
    """Return sets of devices for data parallel, those with the shortest step first.

    With few kinds of devices it compares all sets. Otherwise it ranks the devices by speed and by link, and
    compares the first of each ranking. From the best it then adds and leaves out devices and hosts. A set
    whose memory does not suffice comes after those that fit: it may do in micro-batches.

    Args:
        profile: The model, with costs of one micro-batch.
        cluster: The devices and links.
        samples: Samples of the batch.
        most: The most sets of those that fit, and of the others.
        part: The part of the usual work to do.
    """
    search = _Search(profile, cluster, samples, part)
    search.run()
    found: list[Group] = []
    for fits in (True, False):
        of_these = [names for names, (missing, _) in search.known.items() if (missing == 0) is fits]
        found += sorted(of_these, key=lambda names: search.known[names][1])[:most]
    return [names for names in found if math.isfinite(search.known[names][1])]


class _Search:
    """The steps of the sets of devices that were tried, each set in the order of the cluster."""

    def __init__(self, profile: Profile, cluster: Cluster, samples: int, part: float) -> None:
        self._cluster = cluster
        self._steps = DataParallelSteps(profile, cluster, samples)
        self._speed = {device.name: profile.speed(device) for device in cluster.devices}
        self._kind = device_kinds(cluster)
        self._members: dict[Hashable, list[str]] = defaultdict(list)
        for name, kind in self._kind.items():
            self._members[kind].append(name)
        self._left = max(1, int(part * _WORK))
        self.known: dict[Group, tuple[float, float]] = {}

    def run(self) -> None:
        """Try sets of devices, as `data_devices` says."""
        sets = math.prod(len(names) + 1 for names in self._members.values())
        if sets * len(self._kind) <= 2 * self._left:  # on average a set has half of the devices
            counts = product(*(range(len(names) + 1) for names in self._members.values()))
            for each in counts:
                chosen = (names[:count] for names, count in zip(self._members.values(), each, strict=True))
                self._try({name for names in chosen for name in names})
            return
        self._try(set(self._kind))
        # Half of the work is left for changes of the best.
        half = self._left // 2
        for names in self._prefixes():
            if self._left > half:
                self._try(names)
        changed: set[Group] = set()
        while len(changed) < _CHANGED and self._left > 0 and (rest := self.known.keys() - changed):
            best = min(rest, key=lambda names: (self.known[names], names))
            changed.add(best)
            for names in self._near(set(best)):
                self._try(names)

    def _try(self, chosen: set[str]) -> None:
        names = tuple(name for name in self._kind if name in chosen)
        if names and names not in self.known and self._left > 0:
            self._left -= len(names)
            self.known[names] = self._steps.of(names)

    def _prefixes(self) -> Iterator[set[str]]:
        """Yield the first devices of each ranking, for numbers of devices that grow, in turn."""
        devices = self._cluster.devices
        counts = _growing(len(devices)) if len(devices) > 16 else range(1, len(devices) + 1)
        ranked = [[device.name for device in sorted(devices, key=rank)] for rank in self._rankings()]
        for count in counts:
            for names in ranked:
                yield set(names[:count])

    def _rankings(self) -> list[Callable[[Device], tuple[float, ...]]]:
        """Return what to rank devices by: speed, the link's bandwidth, and its latency."""
        links = {device.name: self._links_s(device.name) for device in self._cluster.devices}
        rankings: list[Callable[[Device], tuple[float, ...]]] = [
            lambda one: (-self._speed[one.name], *links[one.name], -one.room_bytes)
        ]
        if len(set(links.values())) > 1:
            rankings.append(lambda one: (*links[one.name], -self._speed[one.name]))
            rankings.append(lambda one: (*links[one.name][::-1], -self._speed[one.name]))
        return rankings

    def _links_s(self, name: str) -> tuple[float, float]:
        """Return the seconds for a byte, and the latency, of a device's usual way to the others."""
        others = [other for other in self._kind if other != name] if self._cluster.measured else []
        links = [self._cluster.link(name, other) for other in others[:MANY_DEVICES]]
        if not links:
            links = [self._cluster.host_of(name).link]
        per_byte_s = sorted(1 / link.bandwidth_bytes_per_s for link in links)
        latency_s = sorted(link.latency_s for link in links)
        return per_byte_s[len(links) // 2], latency_s[len(links) // 2]

    def _near(self, best: set[str]) -> Iterator[set[str]]:
        """Yield the set without and with a device or a host, and with one device instead of another."""
        for names in self._hosts_beside(best):
            yield best - names
            yield best | names
        inside, outside = self._one_of_each(best), self._one_of_each(set(self._kind) - best)
        for name in inside:
            yield best - {name}
        for name in outside:
            yield best | {name}
        for one, other in product(inside, outside):
            yield best - {one} | {other}

    def _hosts_beside(self, best: set[str]) -> Iterator[set[str]]:
        """Yield the devices of each host with several; of hosts that are alike, those of one."""
        seen = set()
        for host in self._cluster.hosts:
            names = {device.name for device in host.devices}
            like = [replace(device, name="") for device in host.devices]
            key = (host.link, host.inner, host.rack, *like, len(names & best))
            if len(names) > 1 and (self._cluster.measured or key not in seen):
                seen.add(key)
                yield names

    def _one_of_each(self, names: Iterable[str]) -> list[str]:
        """Return a device of each kind, in the order of the cluster."""
        chosen = set(names)
        return [
            next(name for name in members if name in chosen)
            for members in self._members.values()
            if not chosen.isdisjoint(members)
        ]


def _growing(most: int) -> list[int]:
    """Return numbers from `most` down to 1, each some 15 % less than the one before."""
    found = [most]
    while found[-1] > 1:
        found.append(min(found[-1] - 1, int(found[-1] / _GROWTH)))
    return found
