"""The result of the pipeline benchmark: step times by placement, with the simulated ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, geometric_mean, median

from bench.metrics import format_time, relative_spread, table

_CLOSE = 0.10  # relative to the simulated step
_NEAR = 0.03  # relative to the fastest plan


@dataclass(frozen=True)
class MeasuredPlan:
    """One plan: seconds of its steps by rank, the simulated step, and the schedule's lower bound."""

    method: str
    stages: int
    step_s: list[list[float]]
    forecast_s: float
    bound_s: float | None = None

    def seconds(self) -> float:
        """Return the median step of the slowest rank."""
        return max(median(steps) for steps in self.step_s)


@dataclass(frozen=True)
class PipelineReport:
    """All plans of one workload on one cluster. The first is compared with the others."""

    workload: str
    where: str
    schedule: str
    microbatches: int
    ranks: int
    batch: int
    cases: tuple[MeasuredPlan, ...]

    def to_text(self) -> str:
        head = (
            f"{self.workload}\n{self.ranks} ranks, {self.where}; {self.schedule}, "
            f"{self.microbatches} micro-batches; a random placement runs the batch as one\n"
        )
        first = self.cases[0].seconds()
        rows = [
            [
                case.method,
                format_time(case.seconds()),
                f"{100 * relative_spread(case.step_s[0]):.0f} %",
                format_time(case.forecast_s),
                f"{case.seconds() / case.forecast_s:.2f}",
                "" if case.bound_s is None else f"{case.seconds() / case.bound_s:.2f}",
                f"{100 * (1 - first / case.seconds()):.0f} %",
            ]
            for case in self.cases
        ]
        titles = ["placement", "step", "spread", "simulated", "step / simulated", "step / bound"]
        return head + table([*titles, f"saved by {self.cases[0].method}"], rows)

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def summary(reports: Mapping[str, PipelineReport]) -> str:
    """Return a table of all cases, and the main figures."""
    every = [case for report in reports.values() for case in report.cases]
    others = [method for method in dict.fromkeys(map(_method, every)) if method != "greedy"]
    titles = ["case", "micro-batches", "greedy", "over simulated", "over bound"]
    rows = []
    for name, report in reports.items():
        greedy = report.cases[0]
        bound = "" if greedy.bound_s is None else f"{greedy.seconds() / greedy.bound_s:.2f}"
        row = [name, str(report.microbatches), format_time(greedy.seconds()), f"{_over(greedy):.2f}", bound]
        for method in others:
            middle = _middle(report, method)
            row += [format_time(middle.seconds()), f"{_saved(greedy, middle):.0%}"] if middle else ["", ""]
        rows.append(row)
    lines = [table([*titles, *(title for method in others for title in (method, "saved"))], rows)]
    for what, cases in (("greedy plans", [p for p in every if p.method == "greedy"]), ("all plans", every)):
        close = sum(abs(_over(case) - 1) <= _CLOSE for case in cases)
        lines.append(f"{what} within {_CLOSE:.0%} of the simulation: {close} of {len(cases)}")
    for method in others:
        pairs = [(each.cases[0], middle) for each in reports.values() if (middle := _middle(each, method))]
        speedups = [middle.seconds() / greedy.seconds() for greedy, middle in pairs]
        lines.append(
            f"greedy against {method}: {fmean(_saved(*pair) for pair in pairs):.0%} less time (arithmetic "
            f"mean), {geometric_mean(speedups):.2f}x (geometric mean), worst {min(speedups):.2f}x"
        )
    if best := [ratio for report in reports.values() for ratio in _chosen_over_fastest(report)]:
        near = sum(ratio <= 1 + _NEAR for ratio in best)
        lines.append(
            f"the chosen plan within {_NEAR:.0%} of the fastest one measured: {near} of {len(best)}; "
            f"{geometric_mean(best):.3f}x (geometric mean), worst {max(best):.3f}x"
        )
    return "\n".join(lines)


def _method(case: MeasuredPlan) -> str:
    """Return the method. A draw of random also has its number in its name: "random 0"."""
    return case.method.split()[0]


def _middle(report: PipelineReport, method: str) -> MeasuredPlan | None:
    """Return the draw of the method with the median step, the upper of two; None if it was not measured."""
    draws = sorted((case for case in report.cases if _method(case) == method), key=MeasuredPlan.seconds)
    return draws[len(draws) // 2] if draws else None


def _saved(greedy: MeasuredPlan, other: MeasuredPlan) -> float:
    """Return the share of the other plan's step that greedy saves."""
    return 1 - greedy.seconds() / other.seconds()


def _chosen_over_fastest(report: PipelineReport) -> list[float]:
    """Return the step of the chosen plan, if it was measured, over the shortest one."""
    fastest_s = min(case.seconds() for case in report.cases)
    return [case.seconds() / fastest_s for case in report.cases if case.method == "chosen"]


def _over(case: MeasuredPlan) -> float:
    """Return the measured step over the simulated one."""
    return case.seconds() / case.forecast_s
