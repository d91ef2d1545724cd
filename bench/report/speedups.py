"""Speedups of one system over others: in each group, and their means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from bench.metrics import geometric_mean
from bench.report.figures import CaseFigures, by_group
from bench.rounds.record import Case
from bench.systems import SYSTEMS

NATIVE = ("tf-ps", "tf-mwms", "tf-mwms-tuned")
BEST_NATIVE = "best native TensorFlow"
SYNCHRONOUS_NATIVE = tuple(name for name in NATIVE if not SYSTEMS[name].asynchronous)


@dataclass(frozen=True)
class Comparison:
    """A system against another in one group."""

    group: str
    system: str
    baseline: str  # the system compared with
    speedup: float
    noise: float  # of the speedup, relative; one standard error
    rounds: int = 1  # of the system that has fewer

    @property
    def reduction(self) -> float:
        """The share of the baseline's time that is saved."""
        return 1 - 1 / self.speedup


@dataclass(frozen=True)
class Means:
    """Both averages over groups. The mean reduction is arithmetic, the mean speedup geometric.

    26.5 % less time is 1.36x, so the two means say different things.
    """

    groups: int
    reduction: float
    speedup: float
    worst_speedup: float
    slower_in: tuple[str, ...] = ()  # with the speedup and its noise
    single_rounds: int = 0  # groups whose comparison rests on one round


def compare_in_groups(
    rows: Iterable[CaseFigures], system: str, baselines: Sequence[str], failed: Collection[str] = ()
) -> list[Comparison]:
    """Compare a system with the fastest of the baselines in each group, except trainings by epochs.

    A group in which one of them is among the `failed` keys is left out, because the fastest of the rest need
    not be the fastest of all.
    """
    found = []
    for group, members in by_group(rows).items():
        if members[0].case.task.epochs or any(f"{group}/{name}" in failed for name in (system, *baselines)):
            continue
        mine = next((row for row in members if row.case.system == system), None)
        others = [row for row in members if row.case.system in baselines]
        if mine is not None and others:
            best = min(others, key=lambda row: _speedup(mine, row))
            noise = math.hypot(mine.noise, best.noise)
            rounds = min(mine.rounds, best.rounds)
            found.append(Comparison(group, system, best.case.system, _speedup(mine, best), noise, rounds))
    return found


def means(comparisons: Sequence[Comparison]) -> Means | None:
    """Return both averages; None of nothing."""
    if not comparisons:
        return None
    return Means(
        len(comparisons),
        statistics.fmean(each.reduction for each in comparisons),
        geometric_mean([each.speedup for each in comparisons]),
        min(each.speedup for each in comparisons),
        tuple(
            f"{each.group} ({each.speedup:.2f}x +- {each.noise:.0%})"
            for each in comparisons
            if each.speedup < 1
        ),
        sum(each.rounds == 1 for each in comparisons),
    )


def shares_gain(rows: Iterable[CaseFigures]) -> list[Comparison]:
    """Compare shares by speed with equal shares, with the same system, workload, cluster and samples a step.

    The comparison is of samples per second, because shares are rounded to whole samples.
    """
    known = list(rows)
    found = []
    for row in known:
        if not row.case.task.shares:
            continue
        for other in known:
            if _same_but_shares(row.case, other.case):
                noise = math.hypot(row.noise, other.noise)
                ratio = row.samples_per_s / other.samples_per_s
                rounds = min(row.rounds, other.rounds)
                found.append(
                    Comparison(row.case.group, row.case.system, "equal shares", ratio, noise, rounds)
                )
    return found


def _speedup(mine: CaseFigures, other: CaseFigures) -> float:
    if mine.asynchronous or other.asynchronous:
        return other.wall_s / mine.wall_s
    return other.step_s / mine.step_s


def _same_but_shares(shared: Case, equal: Case) -> bool:
    return (
        not equal.task.shares
        and (shared.system, shared.cluster, shared.ranks) == (equal.system, equal.cluster, equal.ranks)
        and (shared.task.workload, shared.task.pixels) == (equal.task.workload, equal.task.pixels)
        and sum(shared.task.shares) == equal.task.batch * equal.ranks
    )
