"""Foretells how long gradients travel around a ring of devices, and how much hides behind backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from hvpipe.profile import LayerCost
from hvpipe.topology import Cluster, Link

BUCKET_BYTES = 4 << 20
"""The size of a fused buffer: hvpipe's default."""


@dataclass(frozen=True)
class Ring:
    """So many devices in a circle, of whose links the slowest counts."""

    devices: int
    link: Link

    @staticmethod
    def of(cluster: Cluster, names: Sequence[str]) -> Ring:
        """The ring of these devices, those of a host side by side."""
        hosts = [host.name for host in cluster.hosts]
        around = sorted(names, key=lambda name: hosts.index(cluster.host_of(name).name))
        links = (
            cluster.link(one, other) for one, other in zip(around, [*around[1:], around[0]], strict=True)
        )
        return Ring(len(names), reduce(Link.joined, links))

    def seconds(self, size_bytes: float) -> float:
        """An all-reduce (Patarasuk and Yuan, 2009): 2 (n - 1) messages of an n-th, one after the other."""
        rounds = 2 * (self.devices - 1)
        return self.link.time_s(rounds * size_bytes / self.devices, rounds) if rounds else 0.0


@dataclass(frozen=True)
class Backward:
    """The last backward of one device; gradients are final layer by layer, from the last to the first."""

    start_s: float
    end_s: float


def reduce_beside(
    layers: Sequence[LayerCost], backwards: Sequence[Backward], ring: Ring
) -> Iterator[tuple[float, float, int]]:
    """Start, end and bytes of each bucket's all-reduce, beside the last backward (`overlap="backward"`).

    Buckets are filled in the order of the backward. Each is reduced when it is final on all devices and the
    one before is done: one at a time, while the devices compute on.
    """
    whole_s = sum(layer.backward_s for layer in layers)
    done_s, size_bytes, free_s = 0.0, 0, 0.0
    for number, layer in enumerate(reversed(layers), 1):
        done_s += layer.backward_s
        size_bytes += layer.weight_bytes
        if size_bytes >= BUCKET_BYTES or (number == len(layers) and size_bytes):
            share = 1.0 if number == len(layers) or not whole_s else done_s / whole_s
            ready_s = max(b.start_s + share * (b.end_s - b.start_s) for b in backwards)
            start_s = max(ready_s, free_s)
            free_s = start_s + ring.seconds(size_bytes)
            yield start_s, free_s, size_bytes
            size_bytes = 0
