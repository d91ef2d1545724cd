"""The sections of the report about steps: how long, by system."""

from __future__ import annotations

from collections.abc import Collection

from bench.evaluation.outcome import EvaluationOutcome
from bench.metrics import format_time
from bench.report.figures import ALONE, CaseFigures, by_group, computes_alone, fastest
from bench.report.headlines import OURS, comparisons
from bench.report.markup import around, element, figure, table
from bench.report.plots import bars, lines
from bench.report.speedups import BEST_NATIVE, Comparison, less_or_more

_NAMES = (
    *(ALONE, "tf-ps", "tf-mwms", "horovod", "horovod-tuned"),
    *("hvpipe-none", "hvpipe-backward", "hvpipe-step", "hvpipe-stale", "tf-mwms-tuned"),
    *("hvpipe-local", "hvpipe-int8"),
)


def system_colour(name: str) -> int:
    """Return the colour of a system, the same in every plot: TensorFlow orange, Horovod purple, hvpipe blue,
    green.
    """
    return _NAMES.index(name) if name in _NAMES else len(_NAMES)


def curve(rows: list[CaseFigures]) -> str:
    """Plot, for each number of ranks, throughput over the ratio of communication to computing."""
    plots = []
    known = [row for row in rows if _is_on_curve(row)]
    for ranks in sorted({row.case.ranks for row in known}):
        series: dict[str, tuple[list[float], list[float]]] = {}
        for row in sorted((row for row in known if row.case.ranks == ranks), key=_communication):
            x, y = series.setdefault(row.case.system, ([], []))
            x.append(_communication(row))
            y.append(row.against_one_host or 0.0)
        ratios = [2 ** (number / 4) for number in range(-20, 17)]
        theory = {
            "ideal overlap": (ratios, [ranks / max(1.0, ratio) for ratio in ratios]),
            "no overlap": (ratios, [ranks / (1 + ratio) for ratio in ratios]),
            "one host": (ratios, [1.0 for _ in ratios]),
        }
        colours = {name: system_colour(name) for name in series}
        labels = ("communication : computing", "throughput, one host = 1")
        title = f"{ranks} ranks"
        drawn = lines(title, {**theory, **series}, colours, labels, float(ranks), points=tuple(series))
        plots.append(figure(title, drawn))
    words = (
        "Communication is the time of the gradients on the slowest link, computing is a step that shares "
        "nothing. Left of 1, ideal overlap hides all communication. Below the line of one host, a cluster "
        "does not pay."
    )
    return around("div", plots, "plots") + element("p", words, "quiet") if plots else ""


def _is_on_curve(row: CaseFigures) -> bool:
    task = row.case.task
    alone = computes_alone(row.case.system)
    return row.links_s is not None and not alone and not task.shares and not task.epochs


def _communication(row: CaseFigures) -> float:
    """Return communication over computing; where links have no limit, at the plot's left end."""
    return max((row.links_s or 0.0) / (row.alone_s or 1.0), 1 / 32)


def steps(outcome: EvaluationOutcome, rows: list[CaseFigures]) -> str:
    """Return a plot and a table for each group."""
    made = []
    for name, members in by_group(rows).items():
        marks = {}
        first = members[0]
        if first.bound_s is not None:
            marks[f"bound ({first.bound_is})" if first.bound_is else "bound"] = first.bound_s
        drawing = bars(
            f"step time, {name}",
            {row.case.system: row.step_s for row in members},
            [system_colour(row.case.system) for row in members],
            marks,
        )
        task = members[0].case.task.describe([row.rounds for row in members])
        description = f"{outcome.setting.cluster(members[0].case.cluster).description}; {task}"
        made += [
            element("h3", name),
            element("p", description, "quiet"),
            around("div", [figure("Median step of the slowest rank", drawing), _table(members)], "beside"),
        ]
    return "".join(made)


def _table(members: list[CaseFigures]) -> str:
    best = fastest(members)
    header = (
        *("system", "step", "noise", "with drain", "samples/s", "efficiency", "over bound"),
        *("CPU, cores by rank", "CPU a step", "memory", "sent a step"),
    )
    lines = [
        [
            row.case.system,
            format_time(row.step_s),
            f"{row.noise:.0%}",
            format_time(row.wall_s),
            f"{row.samples_per_s:.3g}",
            "" if row.efficiency is None else f"{row.efficiency:.0%}",
            "" if row.over_bound is None else f"{row.over_bound:.2f}",
            " / ".join(f"{cores:.2f}" for cores in row.usage.cores),
            format_time(row.cpu_s),
            f"{row.peak_bytes / 1e6:.0f} MB",
            f"{row.sent_bytes / 1e6:.1f} MB" if row.sent_bytes else "",
        ]
        for row in members
    ]
    return table(header, lines, None if best is None else members.index(best))


def case_by_case(outcome: EvaluationOutcome, rows: list[CaseFigures], titles: Collection[str] = ()) -> str:
    """Return what hvpipe saves in each case: a row for each group, a column for each baseline in `titles`."""
    against = {k: found for k, found in comparisons(outcome, rows).items() if not titles or k in titles}
    if not against:
        return ""
    found = {(title, each.group): each for title, compared in against.items() for each in compared}
    groups = [group for group in by_group(rows) if any((title, group) in found for title in against)]
    lines = [
        [group, *(_saved(found.get((title, group)), title.startswith(BEST_NATIVE)) for title in against)]
        for group in groups
    ]
    words = (
        f"The speedup of {OURS} with its 95 % interval over rounds, and the time that it saves. A tie is an "
        "interval that holds 1x. Groups in which one of the compared systems failed are left out."
    )
    return table(["case", *(f"against {title}" for title in against)], lines) + element("p", words, "quiet")


def _saved(compared: Comparison | None, named: bool) -> str:
    if compared is None:
        return ""
    tie = ", a tie" if compared.verdict == "tie" else ""
    text = f"{compared.describe()}, {less_or_more(compared.reduction)}{tie}"
    return f"{text} ({compared.baseline})" if named else text
