"""results.csv: a row for each case of an evaluation, including those without figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from bench.evaluation.outcome import EvaluationOutcome
from bench.report.figures import (
    CaseFigures,
    all_figures,
    computes_alone,
    failed_cases,
    rounds_by_case,
    samples,
    trained_on_shares,
)
from bench.report.headlines import OURS
from bench.report.speedups import compare_in_groups
from bench.rounds.record import PARTS, Case, Round

_CASE = (
    *("key", "workload", "pixels", "batch", "shares", "threads", "seed", "warm_up", "steps", "cluster"),
    *("ranks", "samples_per_step", "scaling", "epochs", "system", "state"),
)
_FIGURES = (
    *("step_s", "noise", "wall_s", "samples_per_s", "first_step_s", "cpu_share", "peak_bytes"),
    *("sent_bytes", "rounds", "alone_s", "bound_s", "links_s", "links_rate", "efficiency", "over_bound"),
)
# Of hvpipe against the row's system, in the same group.
_SPEEDUP, _REDUCTION = (f"{OURS.replace('-', '_')}_{what}" for what in ("speedup", "reduction"))
_PARTS = tuple(f"{part}_s" for part in PARTS)

_Cells = Mapping[str, object]


def to_csv(outcome: EvaluationOutcome) -> str:
    """Return the table as text. Every row has a cell for each column; unknown values are empty."""
    rows = {row.case.key: row for row in all_figures(outcome)}
    saved = _saved(outcome, list(rows.values()))
    lines: list[_Cells] = []
    for key, rounds in rounds_by_case(outcome).items():
        row = rows.get(key)
        learned = [each for each in rounds if not trained_on_shares(each)]
        accuracies = [rank.accuracy[-1] for each in learned for rank in each.ranks if rank.accuracy]
        lines.append(
            {
                **_case(rounds[0].case),
                "state": _state(rounds),
                **({} if row is None else _figures(row)),
                **saved.get(key, {}),
                "accuracy": accuracies[-1] if accuracies else None,
            }
        )
    return _written(lines)


def _written(lines: Sequence[_Cells]) -> str:
    """Write the lines, with columns for the GPU quantities that were sampled."""
    gpu = sorted({name for line in lines for name in line if name.startswith("gpu_")})
    columns = [*_CASE, *_FIGURES, _SPEEDUP, _REDUCTION, *_PARTS, "parts_rank", "accuracy", "cores_by_rank"]
    out = io.StringIO()
    table = csv.DictWriter(out, [*columns, *gpu], lineterminator="\n")
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
        "key": case.key,
        "workload": task.workload,
        "pixels": task.pixels,
        "batch": None if task.shares else task.batch,
        "shares": _by_rank(task.shares),
        "threads": task.threads,
        "seed": task.seed,
        "warm_up": task.warm_up,
        "steps": task.steps,
        "cluster": case.cluster,
        "ranks": case.ranks,
        "samples_per_step": samples(case),
        "scaling": case.scaling,
        "epochs": task.epochs,
        "system": case.system,
    }


def _state(rounds: Sequence[Round]) -> str:
    """Return ok, skipped, failed, or "failed in n of m" if other rounds have figures."""
    failed, good = sum(bool(each.error) for each in rounds), sum(each.ok for each in rounds)
    if failed:
        return f"failed in {failed} of {failed + good}" if good else "failed"
    return "ok" if good else "skipped"


def _figures(row: CaseFigures) -> _Cells:
    return {
        **{name: getattr(row, name) for name in _FIGURES},
        **{f"{part}_s": row.parts_s.get(part) for part in PARTS},
        "parts_rank": row.parts.rank,
        "cores_by_rank": _by_rank(row.usage.cores),
        **{f"{name}_by_rank": _by_rank(values) for name, values in row.usage.gpu.items()},
    }


def _by_rank(values: Iterable[float | None]) -> str:
    """Return a value for each rank, as in 11+5. Unknown values are empty."""
    return "+".join("" if value is None else f"{value:.6g}" for value in values)


def _saved(outcome: EvaluationOutcome, rows: list[CaseFigures]) -> dict[str, _Cells]:
    """Return by case what hvpipe saves against it."""
    found: dict[str, _Cells] = {}
    for system in {row.case.system for row in rows if not computes_alone(row.case.system)} - {OURS}:
        for each in compare_in_groups(rows, OURS, [system], failed_cases(outcome)):
            found[f"{each.group}/{system}"] = {_SPEEDUP: each.speedup, _REDUCTION: each.reduction}
    return found
