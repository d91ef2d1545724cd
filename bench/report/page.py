"""report.html: one self-contained page for desktops, phones, dark mode and paper."""

from __future__ import annotations

from html import escape
from pathlib import Path

from bench.evaluation.outcome import EvaluationOutcome
from bench.report import modes
from bench.report.figures import CaseFigures, all_figures
from bench.report.headlines import BEST_EXACT, HOROVOD, answer, cautions, headlines, left_out
from bench.report.markup import around, element
from bench.report.page_measured import case_by_case, curve, steps
from bench.report.page_more import (
    gpus,
    links,
    not_measured,
    scaling,
    time_to_accuracy,
    utilization,
)

# A browser prints a folded section without its content.
_PRINTS_ALL = (
    'addEventListener("beforeprint",()=>document.querySelectorAll("details").forEach(d=>d.open=true))'
)
_HOW = (
    "The systems of a group train the same model on the same data, with the same seed and threads. They "
    "take turns, round after round. A round is a set of fresh processes that warm up before timed steps.",
    "A step is the median of the slowest rank over the timed steps, without the first of each round. That "
    "one counts for no system: one that collects gradients in the next step has nothing to collect in it.",
    "Noise is the standard error of the median.",
    "Rounds of hvpipe-local have at least 24 timed steps. It averages every 8 steps, and waits for the last "
    "average at the end of the round, so fewer steps would count that wait more often than training does.",
    "Steps of tf-ps and hvpipe-local are uneven. So their step is the mean of all with draining, and it is "
    "compared with the same mean of the other system.",
    "Computing alone means that every rank trains at once without sharing. Efficiency is its step over this "
    "step.",
    "The bound is the step of single-beside-tcp: computing alone while a plain TCP stream sends as many "
    "bytes. Where that did not run, it is the larger of computing alone and the gradients' time on the "
    "slowest link at its set rate, which no protocol quite reaches; without a set rate at the measured one.",
    "Bytes sent are those of TCP/IP by the host's counters, which do not see InfiniBand.",
    "Over cases, speedups are averaged geometrically and reductions of time arithmetically.",
)


def page(outcome: EvaluationOutcome) -> str:
    setting = outcome.setting
    rows = all_figures(outcome)
    answers = (
        element("p", said, "answer") if (said := answer(outcome, rows)) else "",
        curve(rows),
        case_by_case(outcome, rows, (BEST_EXACT, HOROVOD)),
    )
    sections = {
        "All results": _cards(outcome, rows),
        "Case by case": case_by_case(outcome, rows),
        "Which mode to use": around("ul", (element("li", each) for each in modes.advice(rows))),
        "Step time by system": steps(outcome, rows),
        "Scaling": scaling(rows),
        "Utilization over time": utilization(outcome),
        "GPUs": gpus(rows),
        "Time to accuracy": time_to_accuracy(outcome),
        "Links": links(outcome),
        "Not measured": not_measured(outcome),
        "How it was measured": _how(outcome),
    }
    figures = ("Time to accuracy", "Step time by system")
    opened = "" if any(answers) else next((title for title in figures if sections[title]), "")
    body = [
        element("h1", setting.title),
        element(
            "p", f"{setting.started[:10]}, {setting.machine.describe()}, hvpipe {setting.machine.hvpipe}"
        ),
        *(element("p", each, "notice") for each in (*cautions(outcome), left_out(outcome)) if each),
        *answers,
        *(
            _section(title, made, title == opened)
            for title, made in sections.items()
            if made and made != "<ul></ul>"
        ),
        f"<script>{_PRINTS_ALL}</script>",
    ]
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(setting.title)}</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _section(title: str, made: str, opened: bool) -> str:
    """Return a section that opens on a click, or is open."""
    summary = around("summary", [element("h2", title)])
    return f'<details class="section"{" open" if opened else ""}>{summary}{made}</details>'


def _cards(outcome: EvaluationOutcome, rows: list[CaseFigures]) -> str:
    cards = [
        around("div", [element("span", h.title), element("b", h.figure), element("small", h.detail)], "card")
        for h in headlines(outcome, rows)
    ]
    return around("div", cards, "cards") if cards else ""


def _how(outcome: EvaluationOutcome) -> str:
    """Describe how it was measured, and what each system says about itself."""
    notes: dict[str, list[str]] = {}
    for each in outcome.rounds:
        said = notes.setdefault(each.case.system, [])
        said += [note for note in (*each.notes, each.versions) if note and note not in said]
    clusters = [f"{each.name}: {each.description}" for each in outcome.setting.clusters]
    return "".join(
        [
            around("ul", (element("li", each) for each in _HOW)),
            element("h3", "Clusters"),
            around("ul", (element("li", each) for each in clusters)),
            element("h3", "Systems"),
            around(
                "ul", (element("li", f"{name}: {'; '.join(said)}") for name, said in notes.items() if said)
            ),
        ]
    )
