"""What each rank of a case used of its processor and GPU in the timed steps: means over the rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.evaluation.outcome import EvaluationOutcome
from bench.evaluation.suite import LOOPBACK
from bench.rounds.record import RankRound, Round

_GPU = "gpu_"
_OTHER_CORES = 0.5
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


def disturbed(outcome: EvaluationOutcome) -> list[str]:
    """Return the rounds beside which other work took half a core of this machine or more, on the average.

    Known where all ranks were on this machine: their own CPU time is left out.
    """
    groups = outcome.setting.plan.get("groups", [])
    here = {each["cluster"] for each in groups if each["spec"] is not None or each["cluster"] == LOOPBACK}
    found = []
    for each in outcome.rounds:
        host = _mean(each.ranks[:1], "host") if each.case.cluster in here else None
        if host is not None:
            own = sum(rank.cpu_share for rank in each.ranks)
            if host * outcome.setting.machine.cores - own >= _OTHER_CORES:
                found.append(f"{each.case.key}, round {each.number + 1}")
    return found


def _mean(rank: Sequence[RankRound], name: str) -> float | None:
    values = [one[name] for each in rank for one in each.utilization if name in one]
    return statistics.fmean(values) if values else None
