"""The comparison of bench/README.md, rewritten from an evaluation between two comments."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.errors import BenchError
from bench.evaluation.outcome import EvaluationOutcome
from bench.metrics import format_time
from bench.report.figures import (
    ALONE,
    CaseFigures,
    all_figures,
    by_group,
    computes_alone,
    fastest,
    is_exact,
    not_measured,
)
from bench.report.headlines import cautions, headlines
from bench.systems import SYSTEMS

BEGIN, END = "<!-- comparison: hvpipe bench readme -->", "<!-- comparison: end -->"
_WIDTH = 120  # of a Markdown line


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
    """Return the headlines as a list, and a Markdown table: rows for groups, columns for systems."""
    rows = all_figures(outcome)
    groups = [members for members in by_group(rows).values() if not members[0].case.task.epochs]
    if not groups:
        raise BenchError("The table wants an evaluation with figures of steps. Received: none")
    systems = list(dict.fromkeys(each.case.system for each in outcome.rounds if not each.case.task.epochs))
    systems.sort(key=lambda system: system != ALONE)
    without = {key: why.partition(",")[0] for key, why in not_measured(outcome).items()}
    lines = [
        _wrapped(f"- {head.title}: **{head.figure}** ({head.detail})", indent="  ")
        for head in headlines(outcome, rows)
    ]
    machine, date = outcome.setting.machine.describe(), outcome.setting.started[:10]
    lines += [
        "",
        _wrapped(
            "Speedups are geometric means over the cases, reductions of time are arithmetic means: "
            "26.5 % less time is 1.36x. The first timed step of a round counts for no system."
        ),
        "",
        _wrapped(
            f"Median step{_means(systems)}, {machine}, {date}. In bold: the fastest system that trains "
            f"exactly{_others(systems)}. `{ALONE}` is computing without sharing."
        ),
        "",
        *(_wrapped(each) for each in cautions(outcome)),
        "",
    ]
    lines.append(f"| what is trained | {' | '.join(f'`{system}`' for system in systems)} |")
    lines.append("|---" * (1 + len(systems)) + "|")
    lines += [
        f"| {_what(members[0])} | {' | '.join(_cells(members, systems, without))} |" for members in groups
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def _means(systems: Sequence[str]) -> str:
    """Return which systems' steps are means, in parentheses."""
    uneven = [f"`{system}`" for system in systems if system in SYSTEMS and SYSTEMS[system].uneven]
    return f" (mean where steps are uneven: {', '.join(uneven)})" if uneven else ""


def _others(systems: Sequence[str]) -> str:
    """Name the systems that train by other algorithms, in brackets."""
    names = [f"`{each}`" for each in systems if not is_exact(each) and not computes_alone(each)]
    return f" ({', '.join(names)}: other algorithms)" if names else ""


def _wrapped(text: str, indent: str = "") -> str:
    """Break a paragraph into lines of at most 120 characters."""
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _what(row: CaseFigures) -> str:
    task = row.case.task
    size = "+".join(map(str, task.shares)) if task.shares else f"{task.batch} a rank"
    return f"{task.workload}, {task.pixels}, {size}, {row.case.cluster}"


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
