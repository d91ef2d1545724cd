"""The result of a planning benchmark: every case's plans, as a table, JSON and a plot."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean


@dataclass(frozen=True)
class PlanningCase:
    """A model on a cluster. `limits` says whether devices are unequal and whether memory is scarce."""

    model: str
    devices: int
    limits: str
    bits_per_s: float


@dataclass(frozen=True)
class Result:
    """The bottlenecks of greedy and exact, and the steps of greedy and of the median random placement.

    `random_step_s` is None if no random placement fits the memory of the devices.
    """

    case: PlanningCase
    greedy_bottleneck_s: float
    exact_bottleneck_s: float
    greedy_step_s: float
    random_step_s: float | None

    @property
    def of_exact(self) -> float:
        """Greedy's bottleneck over the optimum's; 1 is as good."""
        return self.greedy_bottleneck_s / self.exact_bottleneck_s

    @property
    def speedup(self) -> float:
        """Random's step over greedy's; NaN if no random placement fits."""
        return math.nan if self.random_step_s is None else self.random_step_s / self.greedy_step_s


@dataclass(frozen=True)
class PlanningReport:
    microbatches: int
    draws: int
    results: tuple[Result, ...]

    def summary(self) -> dict[str, float]:
        of_exact = [result.of_exact for result in self.results]
        speedups = [result.speedup for result in self.results if result.random_step_s is not None]
        return {
            "cases": len(self.results),
            "greedy_of_exact_worst": max(of_exact),
            "greedy_of_exact_geometric_mean": geometric_mean(of_exact),
            "cases_with_a_random_placement_that_fits": len(speedups),
            "greedy_over_random_least": min(speedups, default=math.nan),
            "greedy_over_random_geometric_mean": geometric_mean(speedups),
        }

    def to_json(self) -> str:
        """Return every case, and derived figures."""
        return json.dumps({**asdict(self), "summary": self.summary()}, indent=1)

    def to_text(self) -> str:
        head = f"1f1b, {self.microbatches} micro-batches; random is the median of {self.draws} that fit"
        return "\n".join([head, *(f"{name} = {value:.4g}" for name, value in self.summary().items())])

    def plot(self, path: Path) -> None:
        """Plot two panels, with a column for each model and a dot for each case: of exact, over random."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        models = list(dict.fromkeys(result.case.model for result in self.results))
        kinds = list(dict.fromkeys(result.case.limits for result in self.results))
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
        for number, (limits, marker) in enumerate(zip(kinds, "osd^", strict=False)):
            rows = [result for result in self.results if result.case.limits == limits]
            x = [models.index(row.case.model) + 0.16 * (number - (len(kinds) - 1) / 2) for row in rows]
            options = {"marker": marker, "linestyle": "", "alpha": 0.7, "markersize": 5}
            left.plot(x, [row.of_exact for row in rows], label=limits, **options)
            right.plot(x, [row.speedup for row in rows], **options)
        left.axhline(1.05, color="grey", linestyle="--", linewidth=1, label="wanted at the worst")
        left.set_ylim(0.995, max(1.06, left.get_ylim()[1]))
        left.set_title("bottleneck of greedy over that of the optimum", fontsize="medium")
        right.axhline(1, color="grey", linewidth=1)
        right.set_yscale("log")
        ticks = [1, 2, 5, 10, 20, 50, 100, 200]
        right.set_yticks(ticks, [f"{tick}x" for tick in ticks])
        right.minorticks_off()
        right.set_title(f"step of random (median of {self.draws}) over that of greedy", fontsize="medium")
        for axes in (left, right):
            axes.set_xticks(range(len(models)), models)
            axes.grid(alpha=0.3, axis="y")
        left.legend(fontsize="small")
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
