"""report.html: what the template page.html.j2 shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.evaluation.outcome import EvaluationOutcome
from bench.report import modes, sections
from bench.report.figures import all_figures
from bench.report.headlines import BEST_EXACT, HOROVOD, OURS, answer, cautions, headlines, left_out
from bench.report.learning import SHARE


def page(outcome: EvaluationOutcome) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = Path(__file__).parent
    setting, rows = outcome.setting, all_figures(outcome)
    machine = setting.machine
    main_cases = sections.case_by_case(outcome, rows, (BEST_EXACT, HOROVOD))
    shown: dict[str, Any] = {
        "title": setting.title,
        "measured_on": f"{setting.started[:10]}, {machine.describe()}, hvpipe {machine.hvpipe}",
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "notices": [each for each in (*cautions(outcome), left_out(outcome)) if each],
        "ours": OURS,
        "share_to_reach": f"{SHARE:.0%}",
        # One sentence, one figure and one table; all else is folded.
        "answer": answer(outcome, rows),
        "curve": sections.curve(rows),
        "main_cases": main_cases,
        "headlines": headlines(outcome, rows),
        "cases": sections.case_by_case(outcome, rows),
        "advice": modes.advice(rows),
        "steps": sections.steps(outcome, rows),
        "scaling": sections.scaling(rows),
        "utilization": sections.utilization(outcome),
        "gpus": sections.gpus(rows),
        "learning": sections.time_to_accuracy(outcome),
        "links": sections.links(outcome),
        "not_measured": sections.not_measured(outcome),
        "clusters": [f"{each.name}: {each.description}" for each in setting.clusters],
        "systems": sections.systems(outcome),
    }
    answered = shown["answer"] or shown["curve"] or main_cases.rows
    figures = {"Time to accuracy": shown["learning"], "Step time by system": shown["steps"]}
    shown["opened"] = None if answered else next((title for title, made in figures.items() if made), None)
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("page.html.j2").render(shown) + "\n"
