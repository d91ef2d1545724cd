"""results.csv: a row for each case of an evaluation, those without figures too."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from bench.figures import (
    CaseFigures,
    all_figures,
    compare_in_groups,
    failed_cases,
    rounds_by_case,
    samples,
    trained_on_shares,
)
from bench.headlines import OURS
from bench.outcome import Outcome
from bench.record import PARTS, Case

_FIGURES = (
    *("step_s", "spread", "noise", "wall_s", "samples_per_s", "first_step_s", "cpu_share", "peak_bytes"),
    *("sent_bytes", "rounds", "alone_s", "bound_s", "links_s", "links_rate", "efficiency", "over_bound"),
)
# Of ours against the row's system, in the same group.
_SPEEDUP, _REDUCTION = (f"{OURS.replace('-', '_')}_{what}" for what in ("speedup", "reduction"))

_Cells = Mapping[str, object]


def to_csv(outcome: Outcome) -> str:
    """The table as text. A row has a cell for each column; what is not known is empty."""
    rows = {row.case.key: row for row in all_figures(outcome)}
    saved = _saved(outcome, list(rows.values()))
    lines: list[_Cells] = []
    for key, rounds in rounds_by_case(outcome).items():
        row = rows.get(key)
        state = "ok" if row else ("failed" if any(each.error for each in rounds) else "skipped")
        learned = [each for each in rounds if not trained_on_shares(each)]
        accuracies = [rank.accuracy[-1] for each in learned for rank in each.ranks if rank.accuracy]
        lines.append(
            {
                **_case(rounds[0].case),
                "state": state,
                **({} if row is None else _figures(row)),
                **saved.get(key, {}),
                "accuracy": accuracies[-1] if accuracies else None,
            }
        )
    return _written(lines)


def _written(lines: list[_Cells]) -> str:
    columns = (
        *(
            "workload",
            "pixels",
            "cluster",
            "ranks",
            "samples_per_step",
            "scaling",
            "epochs",
            "system",
            "state",
        ),
        *(*_FIGURES, _SPEEDUP, _REDUCTION, *(f"{part}_s" for part in PARTS), "accuracy"),
    )
    out = io.StringIO()
    table = csv.DictWriter(out, columns, lineterminator="\n")
    table.writeheader()
    table.writerows({name: _cell(value) for name, value in line.items()} for line in lines)
    return out.getvalue()


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _case(case: Case) -> _Cells:
    task = case.task
    return {
        "workload": task.workload,
        "pixels": task.pixels,
        "cluster": case.cluster,
        "ranks": case.ranks,
        "samples_per_step": samples(case),
        "scaling": case.scaling,
        "epochs": task.epochs,
        "system": case.system,
    }


def _figures(row: CaseFigures) -> _Cells:
    figures = {name: getattr(row, name) for name in _FIGURES}
    return {**figures, **{f"{part}_s": row.parts_s.get(part) for part in PARTS}}


def _saved(outcome: Outcome, rows: list[CaseFigures]) -> dict[str, _Cells]:
    """By case, what ours saves against it."""
    found: dict[str, _Cells] = {}
    for system in {row.case.system for row in rows} - {OURS}:
        for each in compare_in_groups(rows, OURS, [system], failed_cases(outcome)):
            found[f"{each.group}/{system}"] = {_SPEEDUP: each.speedup, _REDUCTION: each.reduction}
    return found
