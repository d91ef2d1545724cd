"""What each rank of a case used of its processor and GPU in the timed steps: means over the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.rounds.record import RankRound, Round

_GPU = "gpu_"
_TOTAL = "gpu_energy_j"  # a counter; its mean says nothing


@dataclass(frozen=True)
class Usage:
    """By rank: cores kept busy, and GPU quantities by the name that samples use. None if unknown."""

    cores: tuple[float, ...] = ()
    gpu: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)


def usage_of(rounds: Sequence[Round]) -> Usage:
    """Return the usage in the good rounds of a case."""
    ranks = [[each.ranks[number] for each in rounds] for number in range(len(rounds[0].ranks))]
    cores = tuple(statistics.fmean(each.cpu_share for each in rank) for rank in ranks)
    sampled = {name for rank in ranks for each in rank for one in each.utilization for name in one}
    quantities = sorted(name for name in sampled if name.startswith(_GPU) and name != _TOTAL)
    return Usage(cores, {name: tuple(_mean(rank, name) for rank in ranks) for name in quantities})


def _mean(rank: Sequence[RankRound], name: str) -> float | None:
    values = [one[name] for each in rank for one in each.utilization if name in one]
    return statistics.fmean(values) if values else None
