"""The main results of an evaluation: hvpipe against the others, efficiency, the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from bench.evaluation.outcome import EvaluationOutcome
from bench.evaluation.suite import LOOPBACK
from bench.report.figures import CaseFigures, by_group, computes_alone, failed_cases, pays
from bench.report.learning import best_of, learning
from bench.report.speedups import (
    BEST_NATIVE,
    EXACT_NATIVE,
    NATIVE,
    Comparison,
    Means,
    compare_in_groups,
    less_or_more,
    means,
)

OURS = "hvpipe-step"
_OPT_IN = "hvpipe-local"
_OTHER_CORES = 0.5
_WHERE = {
    True: ", where a cluster is faster than one host",
    False: ", where one host alone is faster",
    None: "",
}
"""The three kinds of cases: see `pays`."""
BEST_EXACT = "best native TensorFlow that trains the same"
HOROVOD = "Horovod, tuned"
_AGAINST = (
    (BEST_NATIVE, NATIVE),
    (BEST_EXACT, EXACT_NATIVE),
    (HOROVOD, ("horovod-tuned",)),
    ("Horovod", ("horovod",)),
    ("hvpipe without overlap", ("hvpipe-none",)),
)


@dataclass(frozen=True)
class Headline:
    """One result: its title, the figure, and what the figure refers to."""

    title: str
    figure: str
    detail: str


def headlines(outcome: EvaluationOutcome, rows: list[CaseFigures]) -> list[Headline]:
    """Return the results that have figures: first of the cases in which a cluster is worth having."""
    failed = failed_cases(outcome)
    worth: dict[bool | None, list[CaseFigures]] = {True: [], False: [], None: []}
    for members in by_group(rows).values():
        worth[pays(members)] += members
    found = []
    for title, baselines in _AGAINST:
        for pay, where in _WHERE.items():
            compared = compare_in_groups(worth[pay], OURS, baselines, failed)
            mean = means(compared)
            if mean is not None:
                said = _ran_in(compared, worth[pay], baselines)
                found.append(_against(OURS, f"{title}{where}", mean, [said] if said else []))
    opt_in = compare_in_groups(rows, _OPT_IN, NATIVE, failed)
    if (mean := means(opt_in)) is not None:
        found.append(_against(_OPT_IN, BEST_NATIVE, mean, [_ran_in(opt_in, rows, NATIVE)]))
    ours = [row for row in rows if row.case.system == OURS and not row.case.task.epochs]
    bounded = [row for row in ours if row.over_bound is not None and row.case.key not in failed]
    if bounded:
        found.append(
            Headline(
                "step over its bound",
                f"{geometric_mean([row.over_bound or 1.0 for row in bounded]):.2f}x",
                f"{_bounds(bounded)}; geometric mean of {_cases(len(bounded))}",
            )
        )
    return found + _scaling(rows) + _learning(outcome)


def comparisons(outcome: EvaluationOutcome, rows: Sequence[CaseFigures]) -> dict[str, list[Comparison]]:
    """Compare hvpipe with each baseline, case by case, on all links."""
    failed = failed_cases(outcome)
    found = {title: compare_in_groups(rows, OURS, baselines, failed) for title, baselines in _AGAINST}
    return {title: compared for title, compared in found.items() if compared}


def cautions(outcome: EvaluationOutcome) -> list[str]:
    """Return what a reader must know before the figures."""
    found = list(outcome.setting.notes)
    if beside := disturbed(outcome):
        found.append(f"Other work took half a core or more beside: {'; '.join(beside)}.")
    groups = outcome.setting.plan.get("groups", [])
    planned = sum(
        1 if name in of.get("once", ()) else of["rounds"] for of in groups for name in of["systems"]
    )
    if (measured := sum(each.ok for each in outcome.rounds)) < planned:
        found.append(
            f"{measured} of {planned} planned rounds have figures. Others failed, were skipped or are to run."
        )
    if failed := sorted(failed_cases(outcome)):
        found.append(f"Failed, so that their comparisons are left out: {', '.join(failed)}.")
    return found


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


def _bounds(rows: Sequence[CaseFigures]) -> str:
    """Say what the bounds of these cases are."""
    beside = [row for row in rows if row.bound_is == "plain TCP"]
    tcp = "computing alone while a plain TCP stream sends as many bytes"
    if len(beside) == len(rows):
        return tcp
    rates = [row for row in rows if row.bound_is == "links as measured"]
    rate = f"their set rate ({_cases(len(rates))}: measured)" if rates else "their set rate"
    links = f"the larger of computing alone and the links at {rate}"
    return f"{tcp} ({_cases(len(beside))}), else {links}" if beside else links


def _ran_in(compared: Sequence[Comparison], rows: Sequence[CaseFigures], baselines: Sequence[str]) -> str:
    """Say in how many of the cases each baseline ran, if the best of several counts."""
    if len(baselines) < 2:
        return ""
    groups = {each.group for each in compared}
    ran = {name: sum(r.case.system == name and r.case.group in groups for r in rows) for name in baselines}
    return "ran: " + ", ".join(f"{name} in {count} of {len(groups)}" for name, count in ran.items())


def _against(system: str, title: str, mean: Means, also: Sequence[str]) -> Headline:
    counts = {name: mean.verdicts.count(name) for name in ("faster", "tie", "slower", "")}
    words = ", ".join(f"{count} {name or 'of one round'}" for name, count in counts.items() if count)
    slower = (
        f"below 1x in {', '.join(mean.slower_in)}" if mean.slower_in else f"worst {mean.worst.describe()}"
    )
    return Headline(
        f"{system} against {title}",
        f"{mean.speedup:.2f}x{_interval(mean)}, {less_or_more(mean.reduction)} time",
        "; ".join([f"{_cases(mean.groups)}: {words}", slower, *also]),
    )


def _interval(mean: Means) -> str:
    return "" if mean.interval is None else f" ({mean.interval[0]:.2f} to {mean.interval[1]:.2f})"


def _scaling(rows: list[CaseFigures]) -> list[Headline]:
    """Return the efficiency of every system on the largest measured number of ranks."""
    groups = []
    for members in by_group(rows).values():
        sharing = [row for row in members if not computes_alone(row.case.system)]
        if sharing and sharing[0].efficiency is not None and not sharing[0].case.task.epochs:
            groups.append(sorted(sharing, key=lambda row: row.step_s))
    if not groups:
        return []
    best, *_ = ranked = max(groups, key=lambda members: (members[0].case.ranks, len(members)))
    efficiencies = ", ".join(f"{row.case.system} {row.efficiency:.0%}" for row in ranked)
    detail = f"throughput over that of all ranks computing alone, {best.case.group}: {efficiencies}"
    return [
        Headline(
            f"scaling efficiency, {best.case.ranks} ranks",
            f"{best.efficiency:.0%} ({best.case.system})",
            detail + ("; one round" if best.rounds == 1 else ""),
        )
    ]


def _learning(outcome: EvaluationOutcome) -> list[Headline]:
    """Compare the time to accuracy of hvpipe's best mode with TensorFlow's and Horovod's best."""
    found = []
    for group, (target, learned) in learning(outcome).items():
        ours = best_of(learned, [each.system for each in learned if each.system.startswith("hvpipe")])
        for title, names in ((BEST_NATIVE, NATIVE), ("Horovod", ("horovod", "horovod-tuned"))):
            theirs = best_of(learned, names)
            if ours is None or theirs is None:
                continue
            detail = f"{ours.system}: {ours.describe()}; {theirs.system}: {theirs.describe()}; {group}"
            figure = f"{theirs.seconds / ours.seconds:.2f}x"
            found.append(Headline(f"time to {target:.1%} accuracy against {title}", figure, detail))
    return found


def _cases(count: int) -> str:
    return f"{count} case{'' if count == 1 else 's'}"
