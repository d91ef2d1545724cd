"""The links between hosts: their set rates, and their rates with both directions busy."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from statistics import fmean

from bench.cluster.spec import format_rate
from bench.cluster.virtual_cluster import VirtualCluster
from bench.hosts.hosts import Hosts
from bench.hosts.stream import COMMAND, open_stream
from bench.rounds.record import last_words

_FIRST_BYTES = 1 << 20
_NEAR = 0.15  # by which a measured rate may differ from the set one


@dataclass(frozen=True)
class LinkFacts:
    """One link. None means not measured, see `why`."""

    cluster: str
    first: str
    second: str
    set_bits_per_s: float | None  # its limit
    two_way_bits_per_s: float | None = None  # each way, with both directions busy
    why: str = ""

    @property
    def keeps_its_limit(self) -> bool:
        """Whether the two-way rate is near the set one; True if one of them is unknown."""
        if self.set_bits_per_s is None or self.two_way_bits_per_s is None:
            return True
        return abs(self.two_way_bits_per_s / self.set_bits_per_s - 1) <= _NEAR


def measure(hosts: Hosts, cluster: str, seconds: float = 2.0) -> list[LinkFacts]:
    """Measure the links from the first host to every other one. Those that cannot be measured say why."""
    first, *others = hosts.spec.hosts
    found = [
        _measured(hosts, LinkFacts(cluster, first.name, host.name, _slower(hosts, host.name)), seconds)
        for host in others
    ]
    for link in found:
        if not link.keeps_its_limit:
            print(
                f"WARNING: {cluster}: the link from {link.first} to {link.second} is set to "
                f"{format_rate(link.set_bits_per_s)}, and carries {format_rate(link.two_way_bits_per_s)}. "
                "Results on this link do not reflect the stated rate.",
                file=sys.stderr,
            )
    return found


def _measured(hosts: Hosts, link: LinkFacts, seconds: float) -> LinkFacts:
    try:
        rate = fmean(measure_two_way(hosts, link.first, link.second, seconds=seconds))
    except Exception as error:  # the systems can be measured without it
        print(f"{link.first} to {link.second}: both ways at once not measured, {error}", file=sys.stderr)
        return replace(link, why=last_words(str(error)))
    return replace(link, two_way_bits_per_s=rate)


def _slower(hosts: Hosts, second: str) -> float | None:
    """Return the lower of the set rates at the two ends of the link to a host."""
    if not isinstance(hosts, VirtualCluster):
        return None
    ends = [host for host in hosts.spec.hosts if host.name in (hosts.spec.hosts[0].name, second)]
    return min((host.rate_bits_per_s for host in ends if host.rate_bits_per_s is not None), default=None)


def measure_two_way(hosts: Hosts, first: str, second: str, *, seconds: float = 4.0) -> tuple[float, float]:
    """Stream both ways between two hosts for some `seconds`.

    Return the bits per second that arrived at the first and at the second host. A ring uses both directions
    alike, so it can reach their mean at most.
    """
    with (
        open_stream(hosts.plain_command(first, COMMAND)) as one,
        open_stream(hosts.plain_command(second, COMMAND)) as other,
    ):
        one.send_to(second, other.port)
        other.send_to(first, one.port)
        size_bytes, taken_s = _FIRST_BYTES, (0.0, 0.0)
        while min(taken_s) < seconds:
            one.begin(size_bytes)
            other.begin(size_bytes)
            taken_s, sent_bytes = (one.wait(), other.wait()), size_bytes
            size_bytes = int(sent_bytes * min(8.0, 1.2 * seconds / min(taken_s)))
    return 8 * sent_bytes / taken_s[0], 8 * sent_bytes / taken_s[1]
