"""The files of an evaluation: results.json, results.csv, report.html; and its figures on a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from bench.evaluation.outcome import EvaluationOutcome
from bench.metrics import format_time, table
from bench.report.advice import advice
from bench.report.figures import CaseFigures, all_figures, by_group, not_measured
from bench.report.headlines import cautions, comparisons, headlines
from bench.report.page import page
from bench.report.spreadsheet import to_csv
from hvpipe.atomic_file import atomic_file


def write_outputs(outcome: EvaluationOutcome, folder: Path) -> list[Path]:
    """Write the three files into the folder, each atomically. Return their paths."""
    outputs: dict[str, Callable[[EvaluationOutcome], str]] = {
        "results.json": EvaluationOutcome.to_json,
        "results.csv": to_csv,
        "report.html": page,
    }
    for name, make in outputs.items():
        text = make(outcome).encode()
        with atomic_file(folder / name) as file:
            file.write(text)
    return [folder / name for name in outputs]


def show_figures(outcome: EvaluationOutcome, *, as_json: bool) -> str:
    """Return headlines, advice and a table of every group, for people or as JSON."""
    rows = all_figures(outcome)
    if as_json:
        return _as_json(outcome, rows)
    parts = cautions(outcome)
    parts += [f"{head.title}: {head.figure} ({head.detail})" for head in headlines(outcome, rows)]
    parts += [f"advice: {text}" for text in advice(outcome, rows)]
    for name, members in by_group(rows).items():
        lines = [
            [
                row.case.system,
                format_time(row.step_s),
                f"{row.noise:.0%}",
                f"{row.samples_per_s:.3g}",
                "" if row.efficiency is None else f"{row.efficiency:.0%}",
                "" if row.over_bound is None else f"{row.over_bound:.2f}",
            ]
            for row in members
        ]
        header = ["system", "step", "noise", "samples/s", "efficiency", "over bound"]
        parts.append(f"\n{name}\n{table(header, lines)}")
    parts += [f"{key}: {why}" for key, why in not_measured(outcome).items()]
    return "\n".join(parts)


def _as_json(outcome: EvaluationOutcome, rows: list[CaseFigures]) -> str:
    cases = [
        {
            "key": row.case.key,
            "step_s": row.step_s,
            "cpu_s": row.cpu_s,
            "noise": row.noise,
            "samples_per_s": row.samples_per_s,
            "efficiency": row.efficiency,
            "over_bound": row.over_bound,
        }
        for row in rows
    ]
    heads = [{"title": h.title, "figure": h.figure, "detail": h.detail} for h in headlines(outcome, rows)]
    compared = [
        {
            "against": title,
            "group": each.group,
            "baseline": each.baseline,
            "speedup": each.speedup,
            "reduction": each.reduction,
            "interval": each.interval,
        }
        for title, found in comparisons(outcome, rows).items()
        for each in found
    ]
    figures = {
        "headlines": heads,
        "comparisons": compared,
        "advice": advice(outcome, rows),
        "cautions": cautions(outcome),
        "cases": cases,
        "not_measured": not_measured(outcome),
    }
    return json.dumps(figures, indent=1)
