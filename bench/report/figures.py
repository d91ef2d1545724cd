"""The figures of an evaluation, from its rounds alone: steps and their noise, efficiency, comparisons, means.

A step is the median of the slowest rank over the timed steps, without the first of each round. Its noise is
the standard error of that median (bench.rounds.timed_steps).

Steps of an asynchronous system end in bursts. So its step is the mean of all steps with draining, and its
spread is the standard deviation. It is compared with the same mean of the other system: between begin and
drained, all work is complete.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from bench.evaluation.outcome import ClusterFacts, EvaluationOutcome
from bench.metrics import communication_bound_s, geometric_mean, median, relative_spread
from bench.report.group_breakdown import Parts, computing_alone, parts_of, ranks_of_parts
from bench.report.usage import Usage, usage_of
from bench.rounds.record import Case, Round, last_words
from bench.rounds.step_breakdown import ALONE
from bench.rounds.timed_steps import counted, deviation, mean_noise, slowest_rank, steps_noise
from bench.systems import SYSTEMS

STALE = "hvpipe-stale"
NATIVE = ("tf-ps", "tf-mwms", "tf-mwms-tuned")
BEST_NATIVE = "best native TensorFlow"
SYNCHRONOUS_NATIVE = tuple(name for name in NATIVE if not SYSTEMS[name].asynchronous)
COMMUNICATION_BOUND_BITS_PER_S = 1e9  # links up to this rate count as limited by communication

LinksRate = Literal["set", "measured", ""]


@dataclass(frozen=True)
class CaseFigures:
    """One case that has figures. Seconds, bytes; shares and ratios are plain numbers."""

    case: Case
    step_s: float
    spread: float  # half the distance between the quartiles of all steps, over the median; see above
    noise: float  # of step_s, relative; one standard error
    wall_s: float  # a step with its part of what is drained at the end
    samples_per_s: float
    first_step_s: float
    cpu_share: float  # cores, mean of the ranks
    peak_bytes: int
    sent_bytes: int
    rounds: int
    asynchronous: bool = False
    alone_s: float | None = None  # computing alone in the same group; a drained mean where this step is one
    links_s: float | None = None  # what the gradients take on the slowest link
    links_rate: LinksRate = ""  # whether at the rate that was set or, where none was, the one measured
    bound_s: float | None = None  # the larger of alone_s and links_s
    parts: Parts = field(default_factory=Parts)
    usage: Usage = field(default_factory=Usage)

    @property
    def parts_s(self) -> Mapping[str, float]:
        """Of a step."""
        return self.parts.seconds

    @property
    def efficiency(self) -> float | None:
        """Of the throughput of all ranks computing alone."""
        return None if self.alone_s is None else self.alone_s / self.step_s

    @property
    def over_bound(self) -> float | None:
        """1 hides everything that can be hidden."""
        return None if self.bound_s is None else self.step_s / self.bound_s


@dataclass(frozen=True)
class Comparison:
    """A system against another in one group."""

    group: str
    system: str
    baseline: str  # the system that it was
    speedup: float
    noise: float  # of the speedup, relative; one standard error
    rounds: int = 1  # of the system that has fewer

    @property
    def reduction(self) -> float:
        """The share of the baseline's time that is saved."""
        return 1 - 1 / self.speedup


@dataclass(frozen=True)
class Means:
    """Both averages over groups. 26.5 % less is 1.36x: the two means say different things.

    The mean reduction is arithmetic, the mean speedup geometric.
    """

    groups: int
    reduction: float
    speedup: float
    worst_speedup: float
    slower_in: tuple[str, ...] = ()  # with the speedup and its noise
    single_rounds: int = 0  # groups whose comparison rests on one round


def all_figures(outcome: EvaluationOutcome) -> list[CaseFigures]:
    """A row for each case that has figures, groups in the order of the suite."""
    computing = computing_alone(outcome.rounds)
    good = [found for rounds in rounds_by_case(outcome).values() if (found := _good(rounds))]
    ranks = ranks_of_parts(good)
    rows = []
    for rounds in good:
        group = rounds[0].case.group
        rows.append(_case_figures(rounds, parts_of(rounds, ranks[group], computing.get(group))))
    alone = {row.case.group: row for row in rows if row.case.system == ALONE}
    return [_with_bound(outcome, row, alone.get(row.case.group)) for row in _in_groups(rows)]


def rounds_by_case(outcome: EvaluationOutcome) -> dict[str, list[Round]]:
    """The rounds of each case, by its key."""
    cases: dict[str, list[Round]] = {}
    for each in outcome.rounds:
        cases.setdefault(each.case.key, []).append(each)
    return cases


def not_measured(outcome: EvaluationOutcome) -> dict[str, str]:
    """Why, by case or pipeline: one that failed in any round, and one that was skipped in all."""
    found = {}
    for key, rounds in rounds_by_case(outcome).items():
        failed = next((each for each in rounds if each.error), None)
        if failed is not None:
            found[key] = f"failed, {failed.why}"
        elif not any(each.ok for each in rounds):
            found[key] = f"skipped, {rounds[-1].why}"
    for each in outcome.pipelines:
        if each.error:
            found[each.name] = f"failed, {last_words(each.error)}"
    return found


def tensorflow_versions(outcome: EvaluationOutcome) -> dict[str, list[str]]:
    """The systems that were measured on each version of TensorFlow."""
    found: dict[str, list[str]] = {}
    for each in outcome.rounds:
        version = re.search(r"TensorFlow ([^\s,]+)", each.versions)
        if each.ok and version is not None:
            systems = found.setdefault(version[1], [])
            if each.case.system not in systems:
                systems.append(each.case.system)
    return found


def failed_cases(outcome: EvaluationOutcome) -> frozenset[str]:
    """The keys of the cases that failed in any round; they may have figures of other rounds."""
    return frozenset(each.case.key for each in outcome.rounds if each.error)


def compare_in_groups(
    rows: Iterable[CaseFigures], system: str, baselines: Sequence[str], failed: Collection[str] = ()
) -> list[Comparison]:
    """A system against the fastest of the baselines, in each group with both; not in trainings by epochs.

    A group in which one of them is among the `failed` (keys of cases) is left out: the fastest that is left
    would not be the fastest.
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


def fastest(members: Iterable[CaseFigures]) -> CaseFigures | None:
    """The fastest of a group that learns what one process would from the whole batch, step by step.

    Not one whose gradients are of older weights, asynchronous or `stale`: that is another algorithm.
    """
    exact = [row for row in members if not row.asynchronous and row.case.system not in (ALONE, STALE)]
    return min(exact, key=lambda row: row.step_s, default=None)


def means(comparisons: Sequence[Comparison]) -> Means | None:
    """Both averages; None of nothing."""
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


def limited_by_links(outcome: EvaluationOutcome, rows: Iterable[CaseFigures]) -> list[CaseFigures]:
    """The rows on clusters whose slowest link has at most 1 Gb/s."""
    return [row for row in rows if is_limited(outcome, row.case)]


def is_limited(outcome: EvaluationOutcome, case: Case) -> bool:
    """Whether the slowest link of a case's cluster has at most 1 Gb/s."""
    rate = outcome.setting.cluster(case.cluster).slowest_bits_per_s or 0.0
    return 0 < rate <= COMMUNICATION_BOUND_BITS_PER_S


def by_group(rows: Iterable[CaseFigures]) -> dict[str, list[CaseFigures]]:
    """Rows that are compared with each other."""
    return {name: list(members) for name, members in groupby(rows, key=lambda row: row.case.group)}


def shares_gain(rows: Iterable[CaseFigures]) -> list[Comparison]:
    """Shares by speed against equal ones: the same system, workload and cluster, as many samples a step.

    The step is a rank's; what is compared is samples per second, since shares are rounded to whole samples.
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


def trained_on_shares(round_: Round) -> bool:
    """Whether processes of `single` learned from a share of each step's samples, as they did before they
    kept how many: no reference for the accuracy of all ranks together."""
    batches = {rank.batch for rank in round_.ranks}
    return round_.case.system == ALONE and round_.case.ranks > 1 and batches != {samples(round_.case)}


def samples(case: Case) -> int:
    """Of one step, all ranks together."""
    return sum(case.task.shares) if case.task.shares else case.task.batch * case.ranks


def _speedup(mine: CaseFigures, other: CaseFigures) -> float:
    if mine.asynchronous or other.asynchronous:
        return other.wall_s / mine.wall_s
    return other.step_s / mine.step_s


def _good(rounds: Iterable[Round]) -> list[Round]:
    return [each for each in rounds if each.ok]


def _case_figures(rounds: list[Round], parts: Parts) -> CaseFigures:
    case = rounds[0].case
    slowest = slowest_rank(rounds)
    asynchronous = case.system in SYSTEMS and SYSTEMS[case.system].asynchronous
    steps_by_round = [
        each.ranks[slowest].step_s if asynchronous else counted(case.task, each.ranks[slowest].step_s)
        for each in rounds
    ]
    steps = [step for each in steps_by_round for step in each]
    ranks = [rank for each in rounds for rank in each.ranks]
    wall_s = median([max(rank.wall_s for rank in each.ranks) for each in rounds])
    step_s = wall_s if asynchronous else median(steps)
    return CaseFigures(
        case,
        step_s,
        deviation(steps) if asynchronous else relative_spread(steps),
        mean_noise(steps_by_round) if asynchronous else steps_noise(steps_by_round),
        wall_s,
        samples(case) / step_s,
        median([max(rank.first_step_s for rank in each.ranks) for each in rounds]),
        statistics.fmean(rank.cpu_share for rank in ranks),
        max(rank.peak_bytes for rank in ranks),
        max(rank.sent_bytes for rank in ranks),
        len(rounds),
        asynchronous,
        parts=parts,
        usage=usage_of(rounds),
    )


def _with_bound(outcome: EvaluationOutcome, row: CaseFigures, alone: CaseFigures | None) -> CaseFigures:
    if alone is None:
        return row
    alone_s = alone.wall_s if row.asynchronous else alone.step_s
    gradient_bytes = max(
        rank.gradient_bytes
        for each in outcome.rounds
        if each.case.group == row.case.group
        for rank in each.ranks or ()
    )
    cluster = outcome.setting.cluster(row.case.cluster)
    if cluster.hosts < 2:
        return replace(row, alone_s=alone_s, bound_s=alone_s)
    rate, rate_is = _rate(outcome, cluster)
    if rate is None or gradient_bytes == 0:
        return replace(row, alone_s=alone_s)  # computing alone is no bound where links may be slower
    links_s = communication_bound_s(gradient_bytes, cluster.hosts, rate)
    return replace(row, alone_s=alone_s, links_s=links_s, links_rate=rate_is, bound_s=max(alone_s, links_s))


def _rate(outcome: EvaluationOutcome, cluster: ClusterFacts) -> tuple[float | None, LinksRate]:
    """What bounds a ring through the hosts: the slowest link's set rate, else what was measured of it."""
    if cluster.slowest_bits_per_s is not None:
        return cluster.slowest_bits_per_s, "set"
    links = [each for each in outcome.links if each.cluster == cluster.name]
    rates = [each.two_way_bits_per_s or each.bits_per_s for each in links]
    known = [rate for rate in rates if rate is not None]
    # A link that nobody could measure may be the slowest.
    return (min(known), "measured") if links and len(known) == len(links) else (None, "")


def _in_groups(rows: list[CaseFigures]) -> list[CaseFigures]:
    """Groups together in the suite's order, systems always in the same one."""
    order = list(dict.fromkeys(row.case.group for row in rows))
    systems = list(SYSTEMS)

    def position(row: CaseFigures) -> tuple[int, int]:
        known = row.case.system in systems
        return order.index(row.case.group), systems.index(row.case.system) if known else len(systems)

    return sorted(rows, key=position)


def _same_but_shares(shared: Case, equal: Case) -> bool:
    return (
        not equal.task.shares
        and (shared.system, shared.cluster, shared.ranks) == (equal.system, equal.cluster, equal.ranks)
        and (shared.task.workload, shared.task.pixels) == (equal.task.workload, equal.task.pixels)
        and sum(shared.task.shares) == equal.task.batch * equal.ranks
    )
