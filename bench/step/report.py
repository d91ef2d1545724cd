"""The result of a step benchmark: every step of every rank by mode, with computing alone and the bound."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.metrics import communication_bound_s, format_time, median, relative_spread, step_bound_s, table

ALONE = "alone"
ALONE_AND_TCP = "alone+tcp"  # computing alone while plain TCP moves as many bytes as gradients would


@dataclass(frozen=True)
class ModeRound:
    """Some steps of one mode in one round: seconds of each step but the first, and per step of the whole
    round.
    """

    mode: str
    step_s: list[list[float]]  # [rank][step]
    wall_s: list[float]  # [rank], with first step and draining, per step
    counters: dict[str, float] = field(default_factory=dict)  # the growth of rank 0's

    def seconds(self) -> float:
        """Return the median step of the slowest rank."""
        return max(median(steps) for steps in self.step_s)


@dataclass(frozen=True)
class StepReport:
    """All rounds, and what bounds a step. link_bits_per_s is the set rate, None without a limit.

    Gradients cross a host's link once for all its ranks, so the bound counts hosts.
    """

    workload: str
    where: str
    versions: str
    ranks: int
    hosts: int
    batch: int
    gradient_bytes: int
    rounds: tuple[ModeRound, ...]
    link_bits_per_s: float | None = None
    measured_bits_per_s: float | None = None
    link_tool: str | None = None  # the tool that measured them

    @property
    def modes(self) -> list[str]:
        """The modes in the order in which they ran."""
        return list(dict.fromkeys(each.mode for each in self.rounds))

    def _of(self, mode: str) -> list[ModeRound]:
        return [each for each in self.rounds if each.mode == mode]

    def seconds(self, mode: str) -> float:
        """Return the median step of the slowest rank over all rounds."""
        ranks = range(self.ranks)
        return max(median([s for each in self._of(mode) for s in each.step_s[rank]]) for rank in ranks)

    def spread(self, mode: str) -> float:
        """Return the relative spread of the steps of all ranks and rounds."""
        return relative_spread([s for each in self._of(mode) for steps in each.step_s for s in steps])

    def seconds_drained(self, mode: str) -> float:
        """Return a whole round's time per step, with the first step and the draining after the last."""
        return median([max(each.wall_s) for each in self._of(mode)])

    def against_alone(self, mode: str) -> float:
        """Return this mode's step over computing alone of the same round, as a median over the rounds."""
        pairs = zip(self._of(mode), self._of(ALONE), strict=True)
        return median([mine.seconds() / alone.seconds() for mine, alone in pairs])

    def communication_s(self) -> float:
        """Return the time of the gradients on the links at their set rate."""
        return communication_bound_s(self.gradient_bytes, self.hosts, self.link_bits_per_s)

    def bound_s(self) -> float:
        """Return the larger of computing alone and the links."""
        return step_bound_s(self.seconds(ALONE), self.gradient_bytes, self.hosts, self.link_bits_per_s)

    def summary(self) -> dict[str, float]:
        """Return the main figures."""
        figures = {"computing_alone_s": self.seconds(ALONE), "links_s": self.communication_s()}
        figures["bound_s"] = self.bound_s()
        for mode in self.modes:
            if mode == ALONE_AND_TCP:
                figures["alone_and_tcp_s"] = self.seconds(mode)
            elif mode != ALONE:
                figures[f"{mode}_over_bound"] = self.seconds(mode) / self.bound_s()
                figures[f"{mode}_over_alone"] = self.against_alone(mode)
        return figures

    def to_json(self) -> str:
        """Return every step, and derived figures."""
        return json.dumps({**asdict(self), "summary": self.summary()}, indent=1)

    @staticmethod
    def from_json(text: str) -> StepReport:
        """Read what to_json wrote; derived figures are computed again."""
        data: dict[str, Any] = json.loads(text)
        data.pop("summary")
        rounds = tuple(ModeRound(**each) for each in data.pop("rounds"))
        return StepReport(rounds=rounds, **data)

    def to_text(self) -> str:
        """Return a table by mode, and the bound that it is compared with."""
        header = ["mode", "step", "+-", "with drain", "images/s", "over alone", "over bound"]
        lines = []
        for mode in self.modes:
            seconds = self.seconds(mode)
            lines.append(
                [
                    mode,
                    format_time(seconds),
                    f"{self.spread(mode):.0%}",
                    format_time(self.seconds_drained(mode)),
                    f"{self.batch * self.ranks / seconds:.4g}",
                    f"{self.against_alone(mode):.3f}",
                    f"{seconds / self.bound_s():.3f}",
                ]
            )
        links = (
            f"links {format_time(self.communication_s())}" if self.link_bits_per_s else "links without limit"
        )
        measured = ""
        if self.measured_bits_per_s is not None:
            measured = f" ({self.link_tool}, two-way: {self.measured_bits_per_s / 1e6:.1f} Mb/s)"
        return (
            f"{self.workload}\n"
            f"{self.ranks} rank{'s' if self.ranks > 1 else ''}, {self.where}; {self.versions}\n"
            f"{self.gradient_bytes / 1e6:.1f} MB of gradients; bound {format_time(self.bound_s())}: "
            f"computing {format_time(self.seconds(ALONE))}, {links}{measured}\n{table(header, lines)}"
        )

    def plot(self, path: Path) -> None:
        """Plot a bar for each mode, and the two parts of the bound as lines."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        seconds = [self.seconds(mode) for mode in self.modes]
        bars = axes.bar(self.modes, seconds, color=["#9aa5b1"] + ["#3b7dd8"] * (len(seconds) - 1))
        axes.bar_label(bars, [format_time(value) for value in seconds])
        axes.axhline(self.seconds(ALONE), color="black", linestyle=":", label="computing alone")
        if self.link_bits_per_s is not None:
            axes.axhline(
                self.communication_s(), color="black", linestyle="--", label="gradients on the links"
            )
        axes.set_ylabel("step (s)")
        axes.set_title(f"{self.workload}\n{self.ranks} ranks, {self.where}", fontsize="small")
        axes.margins(y=0.15)
        figure.legend(loc="outside lower center", ncols=2)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
