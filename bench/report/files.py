"""The page of an evaluation, and its figures on a terminal."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from bench.evaluation.outcome import EvaluationOutcome
from bench.metrics import table
from bench.report import modes
from bench.report.figures import CaseFigures, all_figures, by_group, not_measured
from bench.report.headlines import cautions, comparisons, headlines
from bench.report.page import page
from bench.report.sections import step_table
from hvpipe.atomic_file import atomic_file

_SHOWN_AS_JSON = ("step_s", "cpu_s", "noise", "samples_per_s", "efficiency", "over_bound")


def write_page(outcome: EvaluationOutcome, folder: Path) -> Path:
    """Write report.html into the folder, and return its path."""
    text = page(outcome).encode()
    with atomic_file(folder / "report.html") as file:
        file.write(text)
    return folder / "report.html"


def show_figures(outcome: EvaluationOutcome, *, as_json: bool) -> str:
    """Return headlines and a table of every group, for people or as JSON."""
    rows = all_figures(outcome)
    if as_json:
        return _as_json(outcome, rows)
    parts = cautions(outcome)
    parts += [f"{head.title}: {head.figure} ({head.detail})" for head in headlines(outcome, rows)]
    for name, members in by_group(rows).items():
        shown = step_table(members)
        parts.append(f"\n{name}\n{table(shown.header, shown.rows)}")
    parts += [f"{key}: {why}" for key, why in not_measured(outcome).items()]
    return "\n".join(parts)


def _as_json(outcome: EvaluationOutcome, rows: list[CaseFigures]) -> str:
    cases = [{"key": row.case.key, **{name: getattr(row, name) for name in _SHOWN_AS_JSON}} for row in rows]
    compared = [
        {"against": title, **asdict(each), "reduction": each.reduction, "interval": each.interval}
        for title, found in comparisons(outcome, rows).items()
        for each in found
    ]
    figures = {
        "headlines": [asdict(head) for head in headlines(outcome, rows)],
        "comparisons": compared,
        "advice": modes.advice(rows),
        "cautions": cautions(outcome),
        "cases": cases,
        "not_measured": not_measured(outcome),
    }
    return json.dumps(figures, indent=1)
