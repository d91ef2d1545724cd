"""Says how far a measurement can be trusted: how equal runs differ, and what else the hosts computed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvpipe.environment.this_host import CpuMeter

TOO_NOISY = 0.2
"""Beyond this spread, or this share of a host's cores, a measurement warns."""


@dataclass(frozen=True)
class Noise:
    """What disturbed a measurement.

    Attributes:
        spread: The slowest of equal runs minus the fastest, over their median; of the rank with the largest.
        others: By host, the share of its cores that processes other than the ranks kept busy. Hosts without
            psutil are missing.
    """

    spread: float
    others: Mapping[str, float]

    def to_line(self) -> str:
        """Return the figures on one line."""
        busy = [f"{share:.0%} of the cores of {host}" for host, share in self.others.items()]
        of_others = f"; other processes took {', '.join(busy)}" if busy else ""
        return f"  equal runs differ by {self.spread:.0%}{of_others}"

    def warning(self) -> str | None:
        """Return a warning if the measurement is too noisy."""
        if self.spread <= TOO_NOISY and max(self.others.values(), default=0.0) <= TOO_NOISY:
            return None
        return (
            f"hvpipe: the measured times may be far off, since {self.to_line().strip()}. More than "
            f"{TOO_NOISY:.0%} is too much: end what else runs there, and measure again, with more repeats."
        )


@dataclass(frozen=True)
class RankNoise:
    """What one rank knows of the noise.

    Attributes:
        host: The host.
        cores: Its cores.
        spread: As for `Noise`, of this rank.
        own_cores: The cores that this rank kept busy; None without psutil.
        busy_share: The share of all cores that were busy; None without psutil.
    """

    host: str
    cores: int
    spread: float
    own_cores: float | None
    busy_share: float | None

    @staticmethod
    def since(meter: CpuMeter, host: str, spread: float) -> RankNoise:
        """Return what this rank has seen since the meter was made."""
        own_cores, busy_share, _ = meter.look()
        return RankNoise(host, os.cpu_count() or 1, spread, own_cores, busy_share)


def noise_of(ranks: Sequence[RankNoise]) -> Noise:
    """Return the noise of a measurement that these ranks made together."""
    others: dict[str, float] = {}
    for host in dict.fromkeys(one.host for one in ranks):
        here = [one for one in ranks if one.host == host]
        own = sum(one.own_cores or 0.0 for one in here)
        shares = [one.busy_share for one in here if one.busy_share is not None]
        if shares:
            others[host] = max(0.0, sum(shares) / len(shares) - own / here[0].cores)
    return Noise(max(one.spread for one in ranks), others)
