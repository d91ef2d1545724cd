"""Forecasts how long gradients travel around rings of devices, and how much hides behind the backward."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, chain

from hvpipe.forecast.simulate import Resource
from hvpipe.plan.buckets import cut_buckets, fitting_bytes
from hvpipe.specs.cluster import Cluster, Link, Port
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.trace.computing_time import Interval, merged


@dataclass(frozen=True)
class Ring:
    """Devices in a circle; the slowest of their links sets the pace.

    `ports` are the ports of hosts and racks that the ring crosses and shares with other traffic. Each has the
    link that it would be for one message of the ring without other traffic.
    """

    devices: int
    link: Link
    ports: tuple[tuple[Port, Link], ...] = ()

    @staticmethod
    def of(cluster: Cluster, names: Sequence[str]) -> Ring:
        """Return the ring of these devices, with devices of the same host side by side."""
        hosts = {host.name: number for number, host in enumerate(cluster.hosts)}
        around = sorted(names, key=lambda name: hosts[cluster.host_of(name).name])
        pairs = list(zip(around, [*around[1:], around[0]], strict=True))
        crossed = list(chain.from_iterable(cluster.ports(one, other) for one, other in pairs))
        times = Counter(port for port, _ in crossed)
        # Hosts of a rack that are apart in the ring share its link.
        ports = {
            port: replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / times[port])
            for port, link in crossed
        }
        links = [cluster.link(one, other) for one, other in pairs]
        slowest = reduce(Link.joined, [*links, *(ports[port] for port in ports if times[port] > 1)])
        return Ring(len(names), slowest, tuple(ports.items()))

    def seconds(self, size_bytes: float) -> float:
        """Return the seconds of an all-reduce of this size.

        A ring of n devices sends 2 (n - 1) messages of an n-th, one after the other (Patarasuk and Yuan,
        2009).
        """
        return self._seconds_over(self.link, size_bytes)

    def busy_s(self, size_bytes: float) -> Iterator[tuple[Port, float]]:
        """Yield each port with the seconds that it needs for its part of an all-reduce."""
        for port, link in self.ports:
            yield port, min(self.seconds(size_bytes), self._seconds_over(link, size_bytes))

    def least_s(self, port_link: Link, size_bytes: float, messages: int) -> float:
        """Return the seconds that all-reduces of this size together keep a port with this link, at least."""
        rounds = 2 * (self.devices - 1)
        sent = rounds * size_bytes / self.devices, rounds * messages
        return min(self.link.time_s(*sent), port_link.time_s(*sent))

    def _seconds_over(self, link: Link, size_bytes: float) -> float:
        rounds = 2 * (self.devices - 1)
        return link.time_s(rounds * size_bytes / self.devices, rounds) if rounds else 0.0


@dataclass(frozen=True)
class BackwardSpan:
    """The last backward of one device. It completes gradients layer by layer, from the last to the first."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class RingGradients:
    """The gradients of `layers`, which every device of a ring runs and the ring sums."""

    layers: Sequence[LayerCost]
    backwards: Sequence[BackwardSpan]
    ring: Ring

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Yield when each bucket is final on all devices, and its bytes.

        The buckets are those that training cuts (`cut_buckets`), with a layer's weights as one gradient.
        """
        weighted = [place for place, layer in enumerate(self.layers) if layer.weight_bytes]
        sizes_bytes = [self.layers[place].weight_bytes for place in weighted]
        # Seconds of the backward from its start to the end of each layer, in the order of the layers.
        done_s = [*accumulate(layer.backward_s for layer in reversed(self.layers))][::-1]
        for members in cut_buckets(sizes_bytes, fitting_bytes(sum(sizes_bytes))):
            share = done_s[weighted[min(members)]] / done_s[0] if done_s[0] else 1.0
            final_s = max(b.start_s + share * (b.end_s - b.start_s) for b in self.backwards)
            yield final_s, sum(sizes_bytes[member] for member in members)


@dataclass(frozen=True)
class FinalGradients:
    """Gradients that all become final at `final_s`, in buckets of these sizes, and that the ring sums."""

    final_s: float
    sizes_bytes: Sequence[int]
    ring: Ring

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Yield when each bucket is final on all devices, and its bytes."""
        for size_bytes in self.sizes_bytes:
            yield self.final_s, size_bytes


def reduce_beside(
    gradients: Mapping[int, RingGradients] | Mapping[int, FinalGradients],
    taken: Mapping[Resource, Sequence[Interval]] | None = None,
) -> Iterator[tuple[int, float, float, int]]:
    """Yield key, start, end and bytes of each bucket's all-reduce beside the backward (`overlap="backward"`).

    Each ring reduces its buckets one after the other. A bucket starts when it is final and no other ring uses
    the host ports that it crosses; first come, first served. While transfers have these ports, as `taken`
    says, the all-reduce pauses.
    """
    buckets = {key: list(one.buckets()) for key, one in gradients.items()}
    pauses = {
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
        end_s = _end_s(start_s, ring.seconds(size_bytes), pauses[key])
        for port, busy_s in ring.busy_s(size_bytes):
            free_s[port] = _end_s(start_s, busy_s, pauses[key])
        yield key, start_s, end_s, size_bytes
        if number + 1 < len(buckets[key]):
            heapq.heappush(queue, (max(end_s, buckets[key][number + 1][0]), key, number + 1))


def _end_s(start_s: float, seconds: float, pauses: Sequence[Interval]) -> float:
    """Return when something that takes `seconds` is done if it pauses in all of these spans."""
    end_s = start_s + seconds
    first = bisect_right(pauses, start_s, key=lambda span: span[1])
    for place in range(first, len(pauses)):
        from_s, to_s = pauses[place]
        if from_s >= end_s:
            break
        end_s += to_s - max(from_s, start_s)
    return end_s
