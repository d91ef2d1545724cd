"""One system's speed over another's: in each group with an interval over its rounds, and the means of groups.

Systems of a group take turns, so rounds of the same number ran one after the other, on a machine in the same
state. Their ratio is one sample. Intervals are Student's, of the logarithms of these ratios, at 95 %. With
five rounds a bootstrap would be too narrow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from bench.evaluation.outcome import EvaluationOutcome
from bench.report.figures import CaseFigures, by_group, failed_cases, pays
from bench.systems import SYSTEMS

OURS = "hvpipe-step"
NATIVE = ("tf-ps", "tf-mwms", "tf-mwms-tuned")
_BEST_NATIVE = "best native TensorFlow"
_AGAINST = (
    (OURS, _BEST_NATIVE, NATIVE),
    (OURS, f"{_BEST_NATIVE} that trains the same", tuple(name for name in NATIVE if SYSTEMS[name].exact)),
    (OURS, "Horovod, tuned", ("horovod-tuned",)),
    (OURS, "Horovod", ("horovod",)),
    (OURS, "Keras on PyTorch, DDP", ("torch-ddp",)),
    (OURS, "Keras on JAX", ("keras-jax",)),
    (OURS, "hvpipe without overlap", ("hvpipe-none",)),
    ("hvpipe-local", _BEST_NATIVE, NATIVE),
)
_WHERE = {True: "a cluster is faster", False: "one host is faster", None: "unknown"}
"""Whether a cluster is worth having: see `pays`."""
_UPPER = 0.975  # the quantile that ends a 95 % interval


@dataclass(frozen=True)
class Comparison:
    """A system against another in one group. `ratios` are those of the rounds that both ran."""

    group: str
    baseline: str  # the system compared with
    speedup: float
    ratios: tuple[float, ...] = ()

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the speedup; None of fewer than two rounds."""
        return _interval([self]) if len(self.ratios) > 1 else None

    @property
    def verdict(self) -> str:
        """Whether the interval leaves 1x out: "faster", "slower" or "tie"; "of one round" without one."""
        if self.interval is None:
            return "of one round"
        low, high = self.interval
        return "faster" if low > 1 else "slower" if high < 1 else "tie"

    def describe(self) -> str:
        """Return the speedup with its interval, in words."""
        return _with_interval(self.speedup, self.interval) + (", one round" if self.interval is None else "")


@dataclass(frozen=True)
class Comparisons:
    """A system against others in all groups of a kind.

    The mean reduction of time is arithmetic, the mean speedup geometric: 26.5 % less time is 1.36x. The
    interval is that of the measurement. It does not say how other cases would come out.
    """

    system: str
    against: str
    where: str
    each: tuple[Comparison, ...]  # at least one

    @property
    def speedup(self) -> float:
        return statistics.geometric_mean([one.speedup for one in self.each])

    @property
    def reduction(self) -> float:
        """The share of the baseline's time that is saved."""
        return statistics.fmean(1 - 1 / one.speedup for one in self.each)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the speedup; None if a comparison rests on one round."""
        return _interval(self.each) if all(len(one.ratios) > 1 for one in self.each) else None

    def cells(self) -> list[str]:
        """Return the cells of a row below HEADER."""
        verdicts = [one.verdict for one in self.each]
        kinds = [kind for kind in ("faster", "tie", "slower", "of one round") if kind in verdicts]
        slower = [f"{one.describe()} in {one.group}" for one in self.each if one.speedup < 1]
        worst = min(self.each, key=lambda one: one.speedup)
        return [
            self.system,
            self.against,
            self.where,
            _with_interval(self.speedup, self.interval),
            f"{abs(self.reduction):.0%} {'less' if self.reduction >= 0 else 'more'}",
            f"{len(self.each)}: {', '.join(f'{verdicts.count(kind)} {kind}' for kind in kinds)}",
            "; ".join(slower) or worst.describe(),
        ]


HEADER = ("system", "against", "where", "speed", "time", "cases", "worst, or all below 1x")


def comparisons(outcome: EvaluationOutcome, rows: Sequence[CaseFigures]) -> list[Comparisons]:
    """Return those that have figures: hvpipe-step by whether a cluster pays, hvpipe-local in all groups."""
    failed = failed_cases(outcome)
    kinds: dict[bool | None, list[CaseFigures]] = {True: [], False: [], None: []}
    for members in by_group(rows).values():
        kinds[pays(members)] += members
    found = []
    for system, against, baselines in _AGAINST:
        parts = {_WHERE[pay]: kind for pay, kind in kinds.items()} if system == OURS else {"all": rows}
        for where, part in parts.items():
            if each := compare_in_groups(part, system, baselines, failed):
                found.append(Comparisons(system, against, where, tuple(each)))
    return found


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


def _speedup(mine: CaseFigures, other: CaseFigures) -> float:
    if mine.uneven or other.uneven:
        return other.wall_s / mine.wall_s
    return other.step_s / mine.step_s


def _compared(mine: CaseFigures, other: CaseFigures) -> Comparison:
    drained = mine.uneven or other.uneven
    ours, theirs = (row.rounds_wall_s if drained else row.rounds_step_s for row in (mine, other))
    ratios = tuple(theirs[number] / ours[number] for number in sorted(set(ours) & set(theirs)))
    speedup = statistics.geometric_mean(ratios) if ratios else _speedup(mine, other)
    return Comparison(mine.case.group, other.case.system, speedup, ratios)


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


def _with_interval(speedup: float, interval: tuple[float, float] | None) -> str:
    return f"{speedup:.2f}x" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")
