"""results.csv: a row for each case of an evaluation, including those without figures.

The columns are the fields of Case, Task and CaseFigures, and a few more.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from bench.evaluation.outcome import EvaluationOutcome
from bench.report.figures import CaseFigures, all_figures, computes_alone, failed_cases, rounds_by_case
from bench.report.headlines import OURS
from bench.report.speedups import compare_in_groups
from bench.rounds.record import Round

# Of hvpipe against the row's system, in the same group.
_SPEEDUP, _REDUCTION = (f"{OURS.replace('-', '_')}_{what}" for what in ("speedup", "reduction"))
_PARTS = ("case", "task", "usage")  # fields that are columns of their own, or several

_Cells = Mapping[str, object]


def to_csv(outcome: EvaluationOutcome) -> str:
    """Return the table as text. Unknown values are empty."""
    rows = {row.case.key: row for row in all_figures(outcome)}
    saved = _saved(outcome, list(rows.values()))
    lines: list[_Cells] = []
    for key, rounds in rounds_by_case(outcome).items():
        case, row = rounds[0].case, rows.get(key)
        accuracies = [rank.accuracy[-1] for each in rounds for rank in each.ranks if rank.accuracy]
        lines.append(
            {
                "key": key,
                **_plain(case),
                **_plain(case.task),
                "state": _state(rounds),
                "accuracy": accuracies[-1] if accuracies else None,
                **({} if row is None else _figures(row)),
                **saved.get(key, {}),
            }
        )
    out = io.StringIO()
    columns = dict.fromkeys(name for line in lines for name in line)
    table = csv.DictWriter(out, list(columns), lineterminator="\n")
    table.writeheader()
    table.writerows({name: _cell(value) for name, value in line.items()} for line in lines)
    return out.getvalue()


def _plain(of: Any) -> dict[str, object]:
    return {each.name: getattr(of, each.name) for each in fields(of) if each.name not in _PARTS}


def _figures(row: CaseFigures) -> _Cells:
    gpu = {f"{name}_by_rank": values for name, values in row.usage.gpu.items()}
    shown = {"rounds": row.rounds, "efficiency": row.efficiency, "over_bound": row.over_bound}
    return {**_plain(row), **shown, "cores_by_rank": row.usage.cores, **gpu}


def _cell(value: object) -> str:
    """Return a value as text. Those of several ranks or rounds are as in 11+5, unknown ones empty."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return "+".join(map(_cell, value))
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _state(rounds: Sequence[Round]) -> str:
    """Return ok, skipped, failed, or "failed in n of m" if other rounds have figures."""
    failed, good = sum(bool(each.error) for each in rounds), sum(each.ok for each in rounds)
    if failed:
        return f"failed in {failed} of {failed + good}" if good else "failed"
    return "ok" if good else "skipped"


def _saved(outcome: EvaluationOutcome, rows: list[CaseFigures]) -> dict[str, _Cells]:
    """Return by case what hvpipe saves against it."""
    found: dict[str, _Cells] = {}
    for system in {row.case.system for row in rows if not computes_alone(row.case.system)} - {OURS}:
        for each in compare_in_groups(rows, OURS, [system], failed_cases(outcome)):
            found[f"{each.group}/{system}"] = {_SPEEDUP: each.speedup, _REDUCTION: each.reduction}
    return found
