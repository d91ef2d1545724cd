"""Foretells how long gradients travel around rings of devices, and how much hides behind backward."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain

from hvpipe.forecast.simulate import Way
from hvpipe.plan.buckets import fitting_bytes
from hvpipe.specs.cluster import Cluster, Link, Port
from hvpipe.specs.profile import LayerCost
from hvpipe.trace.computing_time import Interval, merged


@dataclass(frozen=True)
class Ring:
    """So many devices in a circle, of whose links the slowest counts.

    `ports` are the links of hosts that it crosses and shares with others, each with what that carries alone.
    """

    devices: int
    link: Link
    ports: tuple[tuple[Port, Link], ...] = ()

    @staticmethod
    def of(cluster: Cluster, names: Sequence[str]) -> Ring:
        """The ring of these devices, those of a host side by side."""
        hosts = [host.name for host in cluster.hosts]
        around = sorted(names, key=lambda name: hosts.index(cluster.host_of(name).name))
        pairs = list(zip(around, [*around[1:], around[0]], strict=True))
        slowest = reduce(Link.joined, (cluster.link(one, other) for one, other in pairs))
        ports = chain.from_iterable(cluster.ports(one, other) for one, other in pairs)
        return Ring(len(names), slowest, tuple(ports))

    def seconds(self, size_bytes: float) -> float:
        """An all-reduce (Patarasuk and Yuan, 2009): 2 (n - 1) messages of an n-th, one after the other."""
        return self._seconds_over(self.link, size_bytes)

    def busy_s(self, size_bytes: float) -> Iterator[tuple[Port, float]]:
        """How long an all-reduce keeps each of the ports busy: as long as that alone would take."""
        for port, link in self.ports:
            yield port, min(self.seconds(size_bytes), self._seconds_over(link, size_bytes))

    def _seconds_over(self, link: Link, size_bytes: float) -> float:
        rounds = 2 * (self.devices - 1)
        return link.time_s(rounds * size_bytes / self.devices, rounds) if rounds else 0.0


@dataclass(frozen=True)
class Backward:
    """The last backward of one device; gradients are final layer by layer, from the last to the first."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class Gradients:
    """What the devices of a ring sum: the gradients of these layers, which all of them run."""

    layers: Sequence[LayerCost]
    backwards: Sequence[Backward]
    ring: Ring

    def buckets(self) -> Iterator[tuple[float, int]]:
        """When each bucket is final on all devices, and its bytes; filled in the order of the backward."""
        whole_s = sum(layer.backward_s for layer in self.layers)
        limit_bytes = fitting_bytes(sum(layer.weight_bytes for layer in self.layers))
        done_s, size_bytes = 0.0, 0
        for number, layer in enumerate(reversed(self.layers), 1):
            done_s += layer.backward_s
            size_bytes += layer.weight_bytes
            last = number == len(self.layers)
            if size_bytes >= limit_bytes or (last and size_bytes):
                share = 1.0 if last or not whole_s else done_s / whole_s
                yield max(b.start_s + share * (b.end_s - b.start_s) for b in self.backwards), size_bytes
                size_bytes = 0


def reduce_beside(
    gradients: Mapping[int, Gradients], taken: Mapping[Way, Sequence[Interval]] | None = None
) -> Iterator[tuple[int, float, float, int]]:
    """Key, start, end and bytes of each bucket's all-reduce, beside the last backward (`overlap="backward"`).

    Around each ring one bucket goes after the other, when it is final and no other ring is on the links of
    hosts that it crosses: first come, first served. While transfers have these, as `taken` says, it rests.
    """
    buckets = {key: list(one.buckets()) for key, one in gradients.items()}
    resting = {
        key: merged(span for port, _ in one.ring.ports for span in (taken or {}).get(port, ()))
        for key, one in gradients.items()
    }
    free_s: dict[Port, float] = defaultdict(float)
    queue = [(of_ring[0][0], key, 0) for key, of_ring in buckets.items() if of_ring]
    heapq.heapify(queue)
    while queue:
        ready_s, key, number = heapq.heappop(queue)
        ring, size_bytes = gradients[key].ring, buckets[key][number][1]
        start_s = max([ready_s, *(free_s[port] for port, _ in ring.ports)])
        end_s = _end_s(start_s, ring.seconds(size_bytes), resting[key])
        for port, busy_s in ring.busy_s(size_bytes):
            free_s[port] = _end_s(start_s, busy_s, resting[key])
        yield key, start_s, end_s, size_bytes
        if number + 1 < len(buckets[key]):
            heapq.heappush(queue, (max(end_s, buckets[key][number + 1][0]), key, number + 1))


def _end_s(start_s: float, seconds: float, resting: Sequence[Interval]) -> float:
    """When something that takes so many seconds is done, if it rests in all of these spans."""
    end_s = start_s + seconds
    first = bisect_right(resting, start_s, key=lambda span: span[1])
    for place in range(first, len(resting)):
        from_s, to_s = resting[place]
        if from_s >= end_s:
            break
        end_s += to_s - max(from_s, start_s)
    return end_s
