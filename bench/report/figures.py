"""The figures of an evaluation, from its rounds alone: steps and their noise, efficiency, bounds; cautions.

A step is the median of the slowest rank over the timed steps, without the first of each round. Its noise is
the standard error of that median.

Where steps are uneven, a step is the mean of all steps with draining. It is compared with the same mean of
the other system: between the start and drained, all work is complete.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from bench.evaluation.outcome import ClusterFacts, EvaluationOutcome
from bench.evaluation.suite import LOOPBACK
from bench.metrics import communication_bound_s, relative_spread
from bench.rounds.record import ALONE, Case, Round
from bench.systems import SYSTEMS, is_exact

BESIDE_TCP = "single-beside-tcp"
_OTHER_CORES = 0.5  # beside a round, from which on it is disturbed


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
    alone_s: float | None = None  # the same computing alone; a drained mean if this step is one
    links_s: float | None = None  # the gradients' time on the slowest link
    bound_s: float | None = None  # the largest of alone_s, links_s and the step beside plain TCP

    @property
    def rounds(self) -> int:
        """The number of rounds with figures."""
        return len(self.rounds_step_s)

    @property
    def cpu_s(self) -> float:
        """The seconds of CPU time that a step takes of a rank, in the mean."""
        return statistics.fmean(self.cores) * self.wall_s

    @property
    def efficiency(self) -> float | None:
        """The share of the throughput of all ranks computing alone, with the same library."""
        return None if self.alone_s is None else self.alone_s / self.step_s

    @property
    def over_bound(self) -> float | None:
        """The step over its bound: 1 hides everything that can be hidden."""
        return None if self.bound_s is None else self.step_s / self.bound_s


def all_figures(outcome: EvaluationOutcome) -> list[CaseFigures]:
    """Return a row for each case that has figures, with groups in the order of the suite."""
    groups: dict[str, list[CaseFigures]] = {}
    for rounds in _rounds_by_case(outcome).values():
        if good := [each for each in rounds if each.ok]:
            groups.setdefault(good[0].case.group, []).append(_case_figures(good))
    systems = list(SYSTEMS)
    rows: list[CaseFigures] = []
    for members in groups.values():
        known = {row.case.system: row for row in members}
        in_order = sorted(known, key=lambda name: systems.index(name) if name in systems else len(systems))
        for name in in_order:
            alone = SYSTEMS[name].alone if name in SYSTEMS else ALONE
            beside = known.get(BESIDE_TCP) if alone == ALONE else None
            rows.append(_with_bound(outcome, known[name], known.get(alone), beside))
    return rows


def _rounds_by_case(outcome: EvaluationOutcome) -> dict[str, list[Round]]:
    cases: dict[str, list[Round]] = {}
    for each in outcome.rounds:
        cases.setdefault(each.case.key, []).append(each)
    return cases


def not_measured(outcome: EvaluationOutcome) -> dict[str, str]:
    """Return the reason by case: any round failed, or all were skipped."""
    found = {}
    for key, rounds in _rounds_by_case(outcome).items():
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
    found = SYSTEMS.get(system)
    return found is not None and (found.adapter == SYSTEMS[ALONE].adapter or found.name == found.alone)


def pays(members: Iterable[CaseFigures]) -> bool | None:
    """Return whether an exact system of a group is faster than one host alone; None if that is unknown."""
    members = list(members)
    best, alone = fastest(members), [row for row in members if computes_alone(row.case.system)]
    if best is None or best.alone_s is None:
        return None
    host_s = min([best.alone_s, *(row.step_s for row in alone if row.case.system != BESIDE_TCP)])
    return host_s * best.case.ranks > best.step_s


def by_group(rows: Iterable[CaseFigures]) -> dict[str, list[CaseFigures]]:
    """Return the rows that are compared with each other, by group."""
    return {name: list(members) for name, members in groupby(rows, key=lambda row: row.case.group)}


def _case_figures(rounds: list[Round]) -> CaseFigures:
    case, numbers = rounds[0].case, range(len(rounds[0].ranks))
    slowest = max(numbers, key=lambda rank: statistics.median(s for r in rounds for s in r.counted(rank)))
    uneven = case.system in SYSTEMS and SYSTEMS[case.system].uneven
    steps_by_round = [each.ranks[slowest].step_s if uneven else each.counted(slowest) for each in rounds]
    ranks = [rank for each in rounds for rank in each.ranks]
    rounds_wall_s = {each.number: each.wall_s for each in rounds}
    wall_s = statistics.median(list(rounds_wall_s.values()))
    step_s = wall_s if uneven else statistics.median([step for each in steps_by_round for step in each])
    return CaseFigures(
        case,
        step_s,
        mean_noise(steps_by_round) if uneven else steps_noise(steps_by_round),
        wall_s,
        case.task.batch * case.ranks / step_s,
        statistics.median([max(rank.first_step_s for rank in each.ranks) for each in rounds]),
        tuple(statistics.fmean(each.ranks[rank].cpu_share for each in rounds) for rank in numbers),
        max(rank.peak_bytes for rank in ranks),
        max(rank.sent_bytes for rank in ranks),
        {each.number: statistics.median(steps) for each, steps in zip(rounds, steps_by_round, strict=True)},
        rounds_wall_s,
        uneven,
    )


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
    alone_s, beside_s = (of and (of.wall_s if row.uneven else of.step_s) for of in (alone, beside))
    cluster = outcome.setting.cluster(row.case.cluster)
    several = alone is not None and cluster.hosts > 1
    links_s = _links_s(outcome, row.case.group, cluster) if several else None
    known = [alone_s, links_s, beside_s] if links_s is not None or not several else [beside_s]
    bound_s = max((each for each in known if each is not None), default=None)
    return replace(row, alone_s=alone_s, links_s=links_s, bound_s=bound_s)


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


def cautions(outcome: EvaluationOutcome) -> Iterator[str]:
    """Yield what a reader must know before the figures, a sentence for each."""
    yield from outcome.setting.notes
    if beside := disturbed(outcome):
        yield f"Other work took half a core or more beside: {'; '.join(beside)}."
    groups = outcome.setting.plan.get("groups", [])
    planned = sum(
        1 if name in of.get("once", ()) else of["rounds"] for of in groups for name in of["systems"]
    )
    if (measured := sum(each.ok for each in outcome.rounds)) < planned:
        yield (
            f"{measured} of {planned} planned rounds have figures. Others failed, were skipped or are to run."
        )
    if failed := sorted(failed_cases(outcome)):
        yield f"Failed, so that their comparisons are left out: {', '.join(failed)}."


def disturbed(outcome: EvaluationOutcome) -> list[str]:
    """Return the rounds beside which other work took half a core of this machine or more, on the average.

    Known where all ranks were on this machine: their own CPU time is left out.
    """
    groups = outcome.setting.plan.get("groups", [])
    here = {each["cluster"] for each in groups if each["spec"] is not None or each["cluster"] == LOOPBACK}
    found = []
    for each in outcome.rounds:
        if not each.ok or each.case.cluster not in here or each.ranks[0].host_share is None:
            continue
        busy = each.ranks[0].host_share * outcome.setting.machine.cores
        if busy - sum(rank.cpu_share for rank in each.ranks) >= _OTHER_CORES:
            found.append(f"{each.case.key}, round {each.number + 1}")
    return found
