"""The links between hosts: their set rates, and their rates with both directions busy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from bench.cluster.spec import format_rate
from bench.errors import BenchError
from bench.hosts.hosts import Hosts
from bench.hosts.rank_benchmark import say
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

    def describe(self) -> str:
        carries = f"not measured, {self.why}" if self.why else format_rate(self.two_way_bits_per_s)
        marked = "" if self.keeps_its_limit else ", NOT AS SET: results do not reflect the set rate"
        return f"{self.first} to {self.second} {format_rate(self.set_bits_per_s)}, two-way {carries}{marked}"


def measure(hosts: Hosts, cluster: str, seconds: float = 2.0) -> list[LinkFacts]:
    """Measure the links from the first host to every other one. Those that cannot be measured say why."""
    first, *others = hosts.spec.hosts
    found = []
    for other in others:
        ends = (first.rate_bits_per_s, other.rate_bits_per_s)
        set_rate = min((rate for rate in ends if rate is not None), default=None)
        link = LinkFacts(cluster, first.name, other.name, set_rate)
        try:
            rates = measure_two_way(hosts, first.name, other.name, seconds=seconds)
            link = replace(link, two_way_bits_per_s=fmean(rates))
        except Exception as error:  # the systems can be measured without it
            link = replace(link, why=last_words(str(error)))
        say(f"{cluster}: {link.describe()}")
        found.append(link)
    return found


def measure_two_way(hosts: Hosts, first: str, second: str, *, seconds: float = 4.0) -> tuple[float, float]:
    """Stream both ways between two hosts for some `seconds`; BenchError if that fails.

    Return the bits per second that arrived at the first and at the second host. A ring uses both directions
    alike, so it can reach their mean at most.
    """
    size_bytes, taken_s = _FIRST_BYTES, (0.0, 0.0)
    try:
        with (
            open_stream(hosts.plain_command(first, COMMAND)) as one,
            open_stream(hosts.plain_command(second, COMMAND)) as other,
        ):
            one.send_to(second, other.port)
            other.send_to(first, one.port)
            while min(taken_s) < seconds:
                one.begin(size_bytes)
                other.begin(size_bytes)
                taken_s, sent_bytes = (one.wait(), other.wait()), size_bytes
                size_bytes = int(sent_bytes * min(8.0, 1.2 * seconds / min(taken_s)))
    except (RuntimeError, OSError) as error:
        raise BenchError(
            f"A stream between {first} and {second} must not end early. Received: {error}"
        ) from error
    return 8 * sent_bytes / taken_s[0], 8 * sent_bytes / taken_s[1]
