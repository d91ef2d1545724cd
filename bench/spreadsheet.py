"""results.csv: a row for each case of an evaluation, those without figures too."""

from __future__ import annotations

import csv
import io

from bench.figures import CaseFigures, all_figures, rounds_by_case, samples
from bench.outcome import Outcome
from bench.record import PARTS, Case

_CASE = ("workload", "pixels", "cluster", "ranks", "samples_per_step", "scaling", "epochs", "system", "state")
_FIGURES = (
    *("step_s", "spread", "noise", "wall_s", "samples_per_s", "first_step_s", "cpu_share", "peak_bytes"),
    *("sent_bytes", "rounds", "alone_s", "bound_s", "efficiency", "over_bound"),
)


def to_csv(outcome: Outcome) -> str:
    """The table as text."""
    out = io.StringIO()
    parts = tuple(f"{part}_s" for part in PARTS)
    table = csv.writer(out, lineterminator="\n")
    table.writerow([*_CASE, *_FIGURES, *parts, "accuracy"])
    rows = {row.case.key: row for row in all_figures(outcome)}
    for key, rounds in rounds_by_case(outcome).items():
        row = rows.get(key)
        state = "ok" if row else ("failed" if any(each.error for each in rounds) else "skipped")
        accuracies = [rank.accuracy[-1] for each in rounds for rank in each.ranks if rank.accuracy]
        figures = [""] * (len(_FIGURES) + len(parts)) if row is None else _figures(row)
        accuracy = f"{accuracies[-1]:.6g}" if accuracies else ""
        table.writerow([*_case(rounds[0].case), state, *figures, accuracy])
    return out.getvalue()


def _case(case: Case) -> list[str]:
    task = case.task
    values = (task.workload, task.pixels, case.cluster, case.ranks, samples(case), case.scaling, task.epochs)
    return [*map(str, values), case.system]


def _figures(row: CaseFigures) -> list[str]:
    values = [getattr(row, name) for name in _FIGURES] + [row.parts_s.get(part) for part in PARTS]
    return ["" if value is None else f"{value:.6g}" for value in values]
