"""report.html: one self-contained page for desktops, phones, dark mode and paper."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from bench.evaluation.outcome import EvaluationOutcome
from bench.report.advice import advice
from bench.report.figures import all_figures
from bench.report.headlines import cautions, headlines
from bench.report.markup import around, element
from bench.report.page_measured import breakdown, case_by_case, curve, steps
from bench.report.page_more import (
    accuracy,
    gpus,
    links,
    not_measured,
    pipelines,
    scaling,
    time_to_accuracy,
    utilization,
)

_HOW = (
    "The systems of a group train the same model on the same data, with the same seed and threads. They "
    "take turns, round after round. A round is a set of fresh processes that warm up before timed steps.",
    "A step is the median of the slowest rank over the timed steps, without the first of each round. That "
    "one counts for no system: one that collects gradients in the next step has nothing to collect in it.",
    "Spread is half the distance between the quartiles of the steps. Noise is the standard error of the "
    "median.",
    "Steps of tf-ps and hvpipe-local are uneven. So their step is the mean of all with draining, and it is "
    "compared with the same mean of the other system. Its spread is the standard deviation.",
    "Computing alone means that every rank trains at once without sharing. Efficiency is its step over this "
    "step.",
    "The bound is the larger of computing alone and the time of the gradients on the slowest link at its set "
    "rate, which no protocol quite reaches. Without a set rate it uses the measured one, and without either "
    "there is no bound.",
    "Bytes sent are those of TCP/IP by the host's counters, which do not see InfiniBand.",
    "Over cases, speedups are averaged geometrically and reductions of time arithmetically.",
)


def page(outcome: EvaluationOutcome) -> str:
    """Return the whole page."""
    setting = outcome.setting
    rows = all_figures(outcome)
    sections: tuple[tuple[str, Callable[[], str]], ...] = (
        ("Where a cluster pays", lambda: curve(rows)),
        ("What to change", lambda: around("ul", (element("li", each) for each in advice(outcome, rows)))),
        ("Step time by system", lambda: steps(outcome, rows)),
        ("Case by case", lambda: case_by_case(outcome, rows)),
        ("Scaling", lambda: scaling(rows)),
        ("Where the time goes", lambda: breakdown(rows)),
        ("Utilization over time", lambda: utilization(outcome)),
        ("GPUs", lambda: gpus(rows)),
        ("Time to accuracy", lambda: time_to_accuracy(outcome)),
        ("The same accuracy", lambda: accuracy(outcome)),
        ("Pipelines", lambda: pipelines(outcome)),
        ("Links", lambda: links(outcome)),
        ("Not measured", lambda: not_measured(outcome)),
        ("How it was measured", lambda: _how(outcome)),
    )
    cards = (
        around("div", [element("span", h.title), element("b", h.figure), element("small", h.detail)], "card")
        for h in headlines(outcome, rows)
    )
    body = [
        element("h1", setting.title),
        element(
            "p", f"{setting.started[:10]}, {setting.machine.describe()}, hvpipe {setting.machine.hvpipe}"
        ),
        *(element("p", each, "notice") for each in cautions(outcome)),
        around("div", cards, "cards"),
    ]
    for title, make in sections:
        made = make()
        if made and made != "<ul></ul>":
            body += [element("h2", title), made]
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(setting.title)}</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


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
