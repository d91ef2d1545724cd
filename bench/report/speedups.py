"""Speedups of one system over others: in each group with an interval over its rounds, and their means.

Systems of a group take turns, so rounds of the same number ran one after the other, on a machine in the same
state. Their ratio is one sample. Intervals are Student's, of the logarithms of these ratios, at 95 %. With
five rounds a bootstrap would be too narrow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from bench.report.figures import CaseFigures, by_group
from bench.systems import SYSTEMS

NATIVE = ("tf-ps", "tf-mwms", "tf-mwms-tuned")
BEST_NATIVE = "best native TensorFlow"
EXACT_NATIVE = tuple(name for name in NATIVE if SYSTEMS[name].exact)


_UPPER = 0.975  # the quantile that ends a 95 % interval


@dataclass(frozen=True)
class Comparison:
    """A system against another in one group. `ratios` are those of the rounds that both ran."""

    group: str
    system: str
    baseline: str  # the system compared with
    speedup: float
    ratios: tuple[float, ...] = ()

    @property
    def reduction(self) -> float:
        """The share of the baseline's time that is saved."""
        return 1 - 1 / self.speedup

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the speedup; None of fewer than two rounds."""
        return _interval([self]) if len(self.ratios) > 1 else None

    @property
    def verdict(self) -> str:
        """Whether the interval leaves 1x out: "faster", "slower" or "tie"; "" of fewer than two rounds."""
        if self.interval is None:
            return ""
        low, high = self.interval
        return "faster" if low > 1 else "slower" if high < 1 else "tie"

    def describe(self) -> str:
        """Return the speedup with its interval, in words."""
        if self.interval is None:
            return f"{self.speedup:.2f}x, one round"
        low, high = self.interval
        return f"{self.speedup:.2f}x ({low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class Means:
    """Both averages over groups. The mean reduction is arithmetic, the mean speedup geometric.

    26.5 % less time is 1.36x, so the two means say different things. The interval is that of the measurement.
    It does not say how other cases would come out.
    """

    groups: int
    reduction: float
    speedup: float
    interval: tuple[float, float] | None  # of the speedup; None if a comparison rests on one round
    worst: Comparison
    verdicts: tuple[str, ...]  # of each group
    slower_in: tuple[str, ...] = ()  # groups in which the speedup is below 1, with it and its interval


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
            found.append(_compared(mine, best))
    return found


def means(comparisons: Sequence[Comparison]) -> Means | None:
    """Return both averages; None of nothing."""
    if not comparisons:
        return None
    return Means(
        len(comparisons),
        statistics.fmean(each.reduction for each in comparisons),
        statistics.geometric_mean([each.speedup for each in comparisons]),
        _interval(comparisons) if all(len(each.ratios) > 1 for each in comparisons) else None,
        min(comparisons, key=lambda each: each.speedup),
        tuple(each.verdict for each in comparisons),
        tuple(f"{each.group} ({each.describe()})" for each in comparisons if each.speedup < 1),
    )


def less_or_more(reduction: float) -> str:
    """Return a share of time that is saved in words: "18% less", "5% more"."""
    return f"{abs(reduction):.0%} {'less' if reduction >= 0 else 'more'}"


def _speedup(mine: CaseFigures, other: CaseFigures) -> float:
    if mine.uneven or other.uneven:
        return other.wall_s / mine.wall_s
    return other.step_s / mine.step_s


def _compared(mine: CaseFigures, other: CaseFigures) -> Comparison:
    drained = mine.uneven or other.uneven
    ours, theirs = (row.rounds_wall_s if drained else row.rounds_step_s for row in (mine, other))
    ratios = tuple(theirs[number] / ours[number] for number in sorted(set(ours) & set(theirs)))
    speedup = statistics.geometric_mean(ratios) if ratios else _speedup(mine, other)
    return Comparison(mine.case.group, mine.case.system, other.case.system, speedup, ratios)


def _interval(comparisons: Sequence[Comparison]) -> tuple[float, float]:
    """Return the interval of the geometric mean of speedups, each of two rounds or more (Welch's t)."""
    logs = [[math.log(ratio) for ratio in each.ratios] for each in comparisons]
    squares = [statistics.variance(each) / len(each) / len(logs) ** 2 for each in logs]
    middle, error = statistics.fmean(map(statistics.fmean, logs)), math.sqrt(sum(squares))
    if error == 0:
        return math.exp(middle), math.exp(middle)
    from scipy.special import stdtrit  # takes as long to import as all else here

    parts = sum(square**2 / (len(each) - 1) for square, each in zip(squares, logs, strict=True))
    half = float(stdtrit(error**4 / parts, _UPPER)) * error
    return math.exp(middle - half), math.exp(middle + half)
