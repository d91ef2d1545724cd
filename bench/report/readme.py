"""The comparison of bench/README.md, rewritten from an evaluation between two comments."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.errors import BenchError
from bench.evaluation.outcome import EvaluationOutcome
from bench.metrics import format_time
from bench.report.comparisons import HEADER, comparisons
from bench.report.figures import (
    ALONE,
    CaseFigures,
    all_figures,
    by_group,
    cautions,
    computes_alone,
    fastest,
    not_measured,
)
from bench.systems import SYSTEMS, is_exact

BEGIN, END = "<!-- comparison: hvpipe bench readme -->", "<!-- comparison: end -->"


def rewrite(path: Path, outcome: EvaluationOutcome) -> str:
    """Put the comparison between the comments. Return in words what was done."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"The table goes into a file that can be read. Received: {path}") from error
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise BenchError(f"{path} should have the lines {BEGIN} and {END}, once, in this order")
    head, _, rest = text.partition(BEGIN)
    new = f"{head}{BEGIN}\n{comparison(outcome)}\n{END}{rest.partition(END)[2]}"
    if new == text:
        return "as it was"
    path.write_text(new, encoding="utf-8")
    return "rewritten"


def comparison(outcome: EvaluationOutcome) -> str:
    """Return the comparisons, and the steps: rows for groups, columns for systems."""
    rows = all_figures(outcome)
    groups = [members for members in by_group(rows).values() if not members[0].case.task.epochs]
    if not groups:
        raise BenchError("The table wants an evaluation with figures of steps. Received: none")
    systems = list(dict.fromkeys(each.case.system for each in outcome.rounds if not each.case.task.epochs))
    systems.sort(key=lambda system: system != ALONE)
    compared = [[f"`{system}`", *cells] for system, *cells in (c.cells() for c in comparisons(outcome, rows))]
    found = [*_table(HEADER, compared), "", _wrapped(_MEANS), "", _wrapped(_how(outcome, systems)), ""]
    if said := [*cautions(outcome)]:
        found += [*map(_wrapped, said), ""]
    without = {key: why.partition(",")[0] for key, why in not_measured(outcome).items()}
    lines = [[_what(members[0]), *_cells(members, systems, without)] for members in groups]
    header = ["what is trained", *(f"`{name}`" for name in systems)]
    return "\n".join([*found, *_table(header, lines)])


_MEANS = (
    "Speedups are geometric means over the cases, reductions of time are arithmetic means: 26.5 % less time "
    "is 1.36x. The first timed step of a round counts for no system."
)


def _how(outcome: EvaluationOutcome, systems: list[str]) -> str:
    uneven = ", ".join(f"`{name}`" for name in systems if name in SYSTEMS and SYSTEMS[name].uneven)
    others = ", ".join(f"`{name}`" for name in systems if not is_exact(name) and not computes_alone(name))
    setting = outcome.setting
    means = f" (mean where steps are uneven: {uneven})" if uneven else ""
    algorithms = f" ({others}: other algorithms)" if others else ""
    return (
        f"Median step{means}, {setting.machine.describe()}, {setting.started[:10]}. In bold: the fastest "
        f"system that trains exactly{algorithms}. `{ALONE}` is computing without sharing."
    )


def _wrapped(text: str) -> str:
    """Break a paragraph of Markdown into lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(header)} |",
        "|---" * len(header) + "|",
        *(f"| {' | '.join(cells)} |" for cells in lines),
    ]


def _what(row: CaseFigures) -> str:
    task = row.case.task
    return f"{task.workload}, {task.pixels}, {task.batch} a rank, {row.case.cluster}"


def _cells(members: list[CaseFigures], systems: list[str], without: Mapping[str, str]) -> list[str]:
    """Return a step for each system, or the word in `without` for a case that failed or was skipped."""
    measured = [row for row in members if row.case.key not in without]
    steps = {row.case.system: row.step_s for row in measured}
    best = fastest(measured)
    cells = []
    for system in systems:
        why = without.get(f"{members[0].case.group}/{system}", "")
        text = format_time(steps[system]) if system in steps else why
        cells.append(f"**{text}**" if best is not None and system == best.case.system else text)
    return cells
