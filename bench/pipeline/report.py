"""The result of the pipeline benchmark: step times by placement, with the simulated ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from bench.metrics import format_time, relative_spread, table


@dataclass(frozen=True)
class MeasuredPlan:
    """One plan: seconds of its steps by rank, the simulated step, and the schedule's lower bound.

    `busy` has for each rank the seconds per step of each kind of computing, measured and simulated.
    """

    method: str
    stages: int
    step_s: list[list[float]]
    forecast_s: float
    bound_s: float | None = None
    busy: list[dict[str, tuple[float, float]]] = field(default_factory=list)

    def seconds(self) -> float:
        """Return the median step of the slowest rank."""
        return max(median(steps) for steps in self.step_s)


def _beside(measured_s: float, simulated_s: float) -> str:
    return f"{format_time(measured_s)} ({format_time(simulated_s)})"


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
        whole = table([*titles, f"saved by {self.cases[0].method}"], rows)
        return "\n\n".join([head + whole, *self._computing()])

    def _computing(self) -> Iterator[str]:
        """Yield a table of the ranks' computing for each pipeline, which shows where simulation and step
        differ.
        """
        for case in self.cases:
            if case.busy:
                kinds = list(case.busy[0])
                rows = [
                    [f"rank {rank}", *(_beside(*of_rank[kind]) for kind in kinds)]
                    for rank, of_rank in enumerate(case.busy)
                ]
                yield f"{case.method}, measured (simulated)\n" + table(["", *kinds], rows)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> PipelineReport:
        """Read what asdict returned, perhaps through JSON."""
        return PipelineReport(**{**data, "cases": tuple(MeasuredPlan(**case) for case in data["cases"])})
