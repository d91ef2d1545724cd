"""The figures of an evaluation on a terminal, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from statistics import geometric_mean, median

from bench.evaluation.outcome import EvaluationOutcome
from bench.metrics import format_time, table
from bench.report.comparisons import HEADER, OURS, comparisons
from bench.report.figures import CaseFigures, all_figures, by_group, cautions, failed_cases, not_measured
from bench.report.learning import learning

_SHOWN_AS_JSON = ("step_s", "cpu_s", "noise", "samples_per_s", "efficiency", "over_bound")


def to_text(outcome: EvaluationOutcome) -> str:
    """Return the comparisons, a table of every group, and how it was measured."""
    rows, setting = all_figures(outcome), outcome.setting
    hvpipe = f"hvpipe {setting.machine.hvpipe}"
    parts = [f"{setting.title}: {setting.started[:10]}, {setting.machine.describe()}, {hvpipe}"]
    parts += cautions(outcome)
    if compared := [each.cells() for each in comparisons(outcome, rows)]:
        parts.append(f"\n{table(HEADER, compared)}")
    parts += _over_bound(outcome, rows)
    for name, members in by_group(rows).items():
        case = members[0].case
        trained = case.task.describe([row.rounds for row in members])
        where = outcome.setting.cluster(case.cluster).description
        parts.append(f"\n{name}\n{where}; {trained}\n{_step_table(members)}")
    return "\n".join([*parts, *_learned(outcome), "", *_measured_how(outcome)])


def to_json(outcome: EvaluationOutcome) -> str:
    rows = all_figures(outcome)
    cases = [{"key": row.case.key, **{name: getattr(row, name) for name in _SHOWN_AS_JSON}} for row in rows]
    compared = [
        {**asdict(each), "speedup": each.speedup, "reduction": each.reduction, "interval": each.interval}
        for each in comparisons(outcome, rows)
    ]
    figures = {
        "comparisons": compared,
        "cautions": [*cautions(outcome)],
        "cases": cases,
        "not_measured": not_measured(outcome),
    }
    return json.dumps(figures, indent=1)


def _over_bound(outcome: EvaluationOutcome, rows: Sequence[CaseFigures]) -> Iterator[str]:
    """Yield the mean of hvpipe's steps over their bounds."""
    failed = failed_cases(outcome)
    ours = [row for row in rows if row.case.system == OURS and not row.case.task.epochs]
    found = [row.over_bound for row in ours if row.over_bound is not None and row.case.key not in failed]
    if found:
        cases = f"{len(found)} case{'s' if len(found) > 1 else ''}"
        yield f"{OURS} over its bound: {geometric_mean(found):.2f}x, the geometric mean of {cases}"


def _step_table(members: Sequence[CaseFigures]) -> str:
    """Return a row for each system of a group, with the columns that have figures."""
    columns: dict[str, Callable[[CaseFigures], str]] = {
        "system": lambda row: row.case.system,
        "step": lambda row: format_time(row.step_s),
        "noise": lambda row: f"{row.noise:.0%}",
        "with drain": lambda row: format_time(row.wall_s),
        "samples/s": lambda row: f"{row.samples_per_s:.3g}",
        "efficiency": lambda row: "" if row.efficiency is None else f"{row.efficiency:.0%}",
        "over bound": lambda row: "" if row.over_bound is None else f"{row.over_bound:.2f}",
        "CPU, cores by rank": lambda row: " / ".join(f"{cores:.2f}" for cores in row.cores if cores),
        "CPU a step": lambda row: format_time(row.cpu_s) if row.cpu_s else "",
        "memory": lambda row: f"{row.peak_bytes / 1e6:.0f} MB" if row.peak_bytes else "",
        "sent a step": lambda row: f"{row.sent_bytes / 1e6:.1f} MB" if row.sent_bytes else "",
        "first step": lambda row: format_time(row.first_step_s),
    }
    cells = {title: [show(row) for row in members] for title, show in columns.items()}
    kept = {title: column for title, column in cells.items() if any(column)}
    return table(list(kept), zip(*kept.values(), strict=True))


def _learned(outcome: EvaluationOutcome) -> Iterator[str]:
    """Yield for each training by epochs what every system learned, the fastest first."""
    epochs = {each.case.group: each.case.task.epochs for each in outcome.rounds}
    for group, (target, learned) in learning(outcome).items():
        after = f"accuracy after {epochs[group]} epochs"
        header = ["system", f"time to about {target:.1%}", "over the fastest", after, "seeds"]
        rows = [
            [
                each.system,
                each.describe(),
                f"{each.seconds / learned[0].seconds:.2f}x" if each.reaches else "",
                f"{median(list(each.last)):.1%}",
                str(len(each.last)),
            ]
            for each in learned
        ]
        yield f"\n{group}\n{table(header, rows)}"


def _measured_how(outcome: EvaluationOutcome) -> Iterator[str]:
    """Yield the rates of the links, what each system says about itself, and what has no figures."""
    for link in outcome.links:
        yield f"{link.cluster}: {link.describe()}"
    notes: dict[str, dict[str, None]] = {}
    for each in outcome.rounds:
        notes.setdefault(each.case.system, {}).update(dict.fromkeys((*each.notes, each.versions)))
    for system, said in notes.items():
        if words := "; ".join(filter(None, said)):
            yield f"{system}: {words}"
    for key, why in not_measured(outcome).items():
        yield f"{key}: {why}"
