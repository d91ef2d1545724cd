"""The page of an evaluation, made with the template page.html.j2, and its figures on a terminal."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.evaluation.outcome import EvaluationOutcome
from bench.metrics import table
from bench.report import sections
from bench.report.figures import CaseFigures, all_figures, by_group, not_measured
from bench.report.headlines import OURS, answer, cautions, comparisons, headlines
from bench.report.learning import SHARE
from hvpipe.atomic_file import atomic_file

_FOLDER = Path(__file__).parent
_SHOWN_AS_JSON = ("step_s", "cpu_s", "noise", "samples_per_s", "efficiency", "over_bound")


def write_page(outcome: EvaluationOutcome, folder: Path) -> Path:
    """Write report.html into the folder, and return its path."""
    text = page(outcome).encode()
    with atomic_file(folder / "report.html") as file:
        file.write(text)
    return folder / "report.html"


def page(outcome: EvaluationOutcome) -> str:
    setting, rows = outcome.setting, all_figures(outcome)
    machine = setting.machine
    shown: dict[str, Any] = {
        "title": setting.title,
        "measured_on": f"{setting.started[:10]}, {machine.describe()}, hvpipe {machine.hvpipe}",
        "style": (_FOLDER / "page.css").read_text(encoding="utf-8"),
        "notices": cautions(outcome),
        "ours": OURS,
        "share_to_reach": f"{SHARE:.0%}",
        # One sentence, one figure and one table; all else is folded.
        "answer": answer(outcome, rows),
        "curve": sections.curve(rows),
        "cases": sections.case_by_case(outcome, rows),
        "headlines": headlines(outcome, rows),
        "steps": sections.steps(outcome, rows),
        "learning": sections.time_to_accuracy(outcome),
        "links": sections.links(outcome),
        "not_measured": sections.not_measured(outcome),
        "clusters": [f"{each.name}: {each.description}" for each in setting.clusters],
        "systems": sections.systems(outcome),
    }
    answered = shown["answer"] or shown["curve"] or shown["cases"].rows
    figures = {"Time to accuracy": shown["learning"], "Step time by system": shown["steps"]}
    shown["opened"] = None if answered else next((title for title, made in figures.items() if made), None)
    return render("page.html.j2", shown) + "\n"


def render(template: str, shown: dict[str, Any]) -> str:
    """Fill in a template of this folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=".html" in template,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["wrap"] = _wrapped
    return environment.get_template(template).render(shown)


def _wrapped(text: str, indent: str = "") -> str:
    """Break a paragraph of Markdown into lines of at most 120 characters."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def show_figures(outcome: EvaluationOutcome, *, as_json: bool) -> str:
    """Return headlines and a table of every group, for people or as JSON."""
    rows = all_figures(outcome)
    if as_json:
        return _as_json(outcome, rows)
    parts = cautions(outcome)
    parts += [f"{head.title}: {head.figure} ({head.detail})" for head in headlines(outcome, rows)]
    for name, members in by_group(rows).items():
        shown = sections.step_table(members)
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
        "cautions": cautions(outcome),
        "cases": cases,
        "not_measured": not_measured(outcome),
    }
    return json.dumps(figures, indent=1)
