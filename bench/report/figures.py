"""The figures of an evaluation, from its rounds alone: steps and their noise, efficiency, comparisons, means.

A step is the median of the slowest rank over the timed steps, without the first of each round. Its noise is
the standard error of that median.

Where steps are uneven, a step is the mean of all steps with draining. It is compared with the same mean of
the other system: between the start and drained, all work is complete.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from bench.evaluation.outcome import ClusterFacts, EvaluationOutcome
from bench.metrics import communication_bound_s, relative_spread
from bench.rounds.record import ALONE, Case, RankRound, Round
from bench.systems import SYSTEMS

BESIDE_TCP = "single-beside-tcp"
_GPU_TOTAL = "gpu_energy_j"  # a counter; its mean says nothing


@dataclass(frozen=True)
class CaseFigures:
    """The figures of one case, in seconds and bytes. Shares and ratios are plain numbers."""

    case: Case
    step_s: float
    noise: float  # of step_s, relative; one standard error
    wall_s: float  # the mean step with draining
    samples_per_s: float
    first_step_s: float
    cores: tuple[float, ...]  # kept busy, by rank
    peak_bytes: int
    sent_bytes: int
    rounds_step_s: Mapping[int, float]  # the median step of each round, by its number
    rounds_wall_s: Mapping[int, float]  # the same of wall_s
    uneven: bool = False
    alone_s: float | None = None  # computing alone in the same group; a drained mean if this step is one
    links_s: float | None = None  # the gradients' time on the slowest link
    bound_s: float | None = None  # the largest of alone_s, links_s and the step beside plain TCP
    bound_is: str = ""  # what it was measured by: "plain TCP", "links as measured"; "" if links count as set
    gpu: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)  # means by quantity and rank

    @property
    def rounds(self) -> int:
        """The number of rounds with figures."""
        return len(self.rounds_step_s)

    @property
    def cpu_s(self) -> float:
        """The seconds of CPU time that a step takes of a rank, in the mean."""
        return statistics.fmean(self.cores) * self.wall_s

    @property
    def against_one_host(self) -> float | None:
        """The throughput of all ranks over that of one rank that computes alone on its host."""
        return None if self.efficiency is None else self.efficiency * self.case.ranks

    @property
    def efficiency(self) -> float | None:
        """The share of the throughput of all ranks computing alone."""
        return None if self.alone_s is None else self.alone_s / self.step_s

    @property
    def over_bound(self) -> float | None:
        """The step over its bound: 1 hides everything that can be hidden."""
        return None if self.bound_s is None else self.step_s / self.bound_s


def all_figures(outcome: EvaluationOutcome) -> list[CaseFigures]:
    """Return a row for each case that has figures, with groups in the order of the suite."""
    groups: dict[str, list[CaseFigures]] = {}
    for rounds in rounds_by_case(outcome).values():
        if good := [each for each in rounds if each.ok]:
            groups.setdefault(good[0].case.group, []).append(_case_figures(good))
    systems = list(SYSTEMS)
    rows: list[CaseFigures] = []
    for members in groups.values():
        known = {row.case.system: row for row in members}
        in_order = sorted(known, key=lambda name: systems.index(name) if name in systems else len(systems))
        rows += [
            _with_bound(outcome, known[name], known.get(ALONE), known.get(BESIDE_TCP)) for name in in_order
        ]
    return rows


def rounds_by_case(outcome: EvaluationOutcome) -> dict[str, list[Round]]:
    """Return the rounds of each case by its key."""
    cases: dict[str, list[Round]] = {}
    for each in outcome.rounds:
        cases.setdefault(each.case.key, []).append(each)
    return cases


def not_measured(outcome: EvaluationOutcome) -> dict[str, str]:
    """Return the reason by case: any round failed, or all were skipped."""
    found = {}
    for key, rounds in rounds_by_case(outcome).items():
        failed = next((each for each in rounds if each.error), None)
        if failed is not None:
            found[key] = f"failed, {failed.why}"
        elif not any(each.ok for each in rounds):
            found[key] = f"skipped, {rounds[-1].why}"
    return found


def failed_cases(outcome: EvaluationOutcome) -> frozenset[str]:
    """Return the keys of cases that failed in any round. They may have figures of other rounds."""
    return frozenset(each.case.key for each in outcome.rounds if each.error)


def fastest(members: Iterable[CaseFigures]) -> CaseFigures | None:
    """Return the fastest of a group that trains exactly, as one process would on the whole batch."""
    exact = [row for row in members if is_exact(row.case.system) and not computes_alone(row.case.system)]
    return min(exact, key=lambda row: row.step_s, default=None)


def computes_alone(system: str) -> bool:
    """Return whether the ranks of a system share nothing."""
    return system in SYSTEMS and SYSTEMS[system].adapter == SYSTEMS[ALONE].adapter


def is_exact(system: str) -> bool:
    """Return whether a system trains as one process would on the whole batch; so do unknown ones."""
    return system not in SYSTEMS or SYSTEMS[system].exact


def pays(members: Iterable[CaseFigures]) -> bool | None:
    """Return whether an exact system of a group is faster than one host alone; None if that is unknown."""
    best = fastest(members)
    return None if best is None or best.against_one_host is None else best.against_one_host > 1


def by_group(rows: Iterable[CaseFigures]) -> dict[str, list[CaseFigures]]:
    """Return the rows that are compared with each other, by group."""
    return {name: list(members) for name, members in groupby(rows, key=lambda row: row.case.group)}


def samples(case: Case) -> int:
    """Return the samples of one step, of all ranks together."""
    return sum(case.task.shares) if case.task.shares else case.task.batch * case.ranks


def _case_figures(rounds: list[Round]) -> CaseFigures:
    case, numbers = rounds[0].case, range(len(rounds[0].ranks))
    slowest = max(numbers, key=lambda rank: statistics.median(s for r in rounds for s in r.counted(rank)))
    uneven = case.system in SYSTEMS and SYSTEMS[case.system].uneven
    steps_by_round = [each.ranks[slowest].step_s if uneven else each.counted(slowest) for each in rounds]
    steps = [step for each in steps_by_round for step in each]
    ranks = [rank for each in rounds for rank in each.ranks]
    by_rank = [[each.ranks[number] for each in rounds] for number in numbers]
    rounds_wall_s = {each.number: max(rank.wall_s for rank in each.ranks) for each in rounds}
    wall_s = statistics.median(list(rounds_wall_s.values()))
    step_s = wall_s if uneven else statistics.median(steps)
    return CaseFigures(
        case,
        step_s,
        mean_noise(steps_by_round) if uneven else steps_noise(steps_by_round),
        wall_s,
        samples(case) / step_s,
        statistics.median([max(rank.first_step_s for rank in each.ranks) for each in rounds]),
        tuple(statistics.fmean(each.cpu_share for each in rank) for rank in by_rank),
        max(rank.peak_bytes for rank in ranks),
        max(rank.sent_bytes for rank in ranks),
        {each.number: statistics.median(steps) for each, steps in zip(rounds, steps_by_round, strict=True)},
        rounds_wall_s,
        uneven,
        gpu=_gpu(by_rank),
    )


def _gpu(by_rank: Sequence[Sequence[RankRound]]) -> dict[str, tuple[float | None, ...]]:
    sampled = {name for rank in by_rank for each in rank for name in each.utilization}
    quantities = sorted(name for name in sampled if name.startswith("gpu_") and name != _GPU_TOTAL)
    return {name: tuple(_mean_use(rank, name) for rank in by_rank) for name in quantities}


def _mean_use(rounds: Sequence[RankRound], name: str) -> float | None:
    """Return a sampled quantity in the rounds of a rank; None if it was not sampled."""
    values = [each.utilization[name] for each in rounds if name in each.utilization]
    return statistics.fmean(values) if values else None


def steps_noise(rounds: Sequence[Sequence[float]]) -> float:
    """Return the relative standard error of the median of all steps.

    It is the larger of two estimates: from the quartiles of the steps, and half the distance between the
    medians of the rounds.
    """
    steps = [step for each in rounds for step in each]
    # Half the distance between quartiles is 0.6745 sigma; the error of a median is 1.2533 sigma / sqrt(n).
    by_steps = relative_spread(steps) / 0.6745 * 1.2533 / math.sqrt(len(steps))
    return max(by_steps, _between([statistics.median(each) for each in rounds]))


def mean_noise(rounds: Sequence[Sequence[float]]) -> float:
    """Return the relative standard error of the mean of all steps."""
    steps = [step for each in rounds for step in each]
    by_steps = statistics.pstdev(steps) / statistics.fmean(steps) / math.sqrt(len(steps))
    return max(by_steps, _between([statistics.fmean(each) for each in rounds]))


def _between(rounds: Sequence[float]) -> float:
    """Return half the distance between the rounds' figures, relative to their median."""
    return (max(rounds) - min(rounds)) / 2 / statistics.median(rounds)


def _with_bound(
    outcome: EvaluationOutcome, row: CaseFigures, alone: CaseFigures | None, beside: CaseFigures | None
) -> CaseFigures:
    """Add the bound, from computing alone in the same group, and from doing so beside a plain TCP stream."""
    if alone is not None:
        alone_s = alone.wall_s if row.uneven else alone.step_s
        row = replace(row, alone_s=alone_s)
        cluster = outcome.setting.cluster(row.case.cluster)
        if cluster.hosts < 2:
            row = replace(row, bound_s=alone_s)
        elif (links_s := _links_s(outcome, row.case.group, cluster)) is not None:
            bound_is = "links as measured" if cluster.slowest_bits_per_s is None else ""
            row = replace(row, links_s=links_s, bound_s=max(alone_s, links_s), bound_is=bound_is)
    if beside is not None:
        beside_s = beside.wall_s if row.uneven else beside.step_s
        row = replace(row, bound_s=max(row.bound_s or 0.0, beside_s), bound_is="plain TCP")
    return row


def _links_s(outcome: EvaluationOutcome, group: str, cluster: ClusterFacts) -> float | None:
    """Return the gradients' time on the slowest link, at its set or measured rate; None if unknown."""
    rounds = (each for each in outcome.rounds if each.case.group == group)
    gradient_bytes = max(rank.gradient_bytes for each in rounds for rank in each.ranks)
    rate = cluster.slowest_bits_per_s
    if rate is None:
        rates = [each.two_way_bits_per_s for each in outcome.links if each.cluster == cluster.name]
        known = [each for each in rates if each is not None]
        rate = min(known, default=None) if len(known) == len(rates) else None  # others may be slower
    if rate is None or gradient_bytes == 0:
        return None
    return communication_bound_s(gradient_bytes, cluster.hosts, rate)
