"""The result of a step benchmark: every step of every rank by mode, against computing alone and the bound."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.metrics import communication_bound_s, format_time, median, relative_spread, step_bound_s, table

ALONE = "alone"
ALONE_AND_TCP = "alone+tcp"  # computing alone while plain TCP moves the bytes that gradients would


@dataclass(frozen=True)
class ModeRound:
    """Some steps of one mode in one round: seconds of each but the first, and of the whole round a step."""

    mode: str
    step_s: list[list[float]]  # [rank][step]
    wall_s: list[float]  # [rank], first step and draining included, over the number of steps
    counters: dict[str, float] = field(default_factory=dict)  # rank 0's, what they grew by

    def seconds(self) -> float:
        """The median step of the slowest rank."""
        return max(median(steps) for steps in self.step_s)


@dataclass(frozen=True)
class StepReport:
    """All rounds, and what bounds a step: link_bits_per_s is the rate that was set, None without a limit.

    The gradients cross a host's link once for all its ranks: the bound counts hosts.
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
    link_tool: str | None = None  # what measured them

    @property
    def modes(self) -> list[str]:
        """In the order in which they ran."""
        return list(dict.fromkeys(each.mode for each in self.rounds))

    def _of(self, mode: str) -> list[ModeRound]:
        return [each for each in self.rounds if each.mode == mode]

    def seconds(self, mode: str) -> float:
        """The median step over all rounds, of the slowest rank."""
        ranks = range(self.ranks)
        return max(median([s for each in self._of(mode) for s in each.step_s[rank]]) for rank in ranks)

    def spread(self, mode: str) -> float:
        """Relative spread of the steps of all ranks and rounds."""
        return relative_spread([s for each in self._of(mode) for steps in each.step_s for s in steps])

    def seconds_drained(self, mode: str) -> float:
        """A whole round's time over its steps: with the first step and what remains to do after the last."""
        return median([max(each.wall_s) for each in self._of(mode)])

    def against_alone(self, mode: str) -> float:
        """The median over the rounds of this mode's step over the same round's computing alone."""
        pairs = zip(self._of(mode), self._of(ALONE), strict=True)
        return median([mine.seconds() / alone.seconds() for mine, alone in pairs])

    def communication_s(self) -> float:
        """What the gradients need on the links at their set rate."""
        return communication_bound_s(self.gradient_bytes, self.hosts, self.link_bits_per_s)

    def bound_s(self) -> float:
        """The larger of computing alone and the links."""
        return step_bound_s(self.seconds(ALONE), self.gradient_bytes, self.hosts, self.link_bits_per_s)

    def summary(self) -> dict[str, float]:
        """The figures that targets are set for."""
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
        """Every step, and what is derived."""
        return json.dumps({**asdict(self), "summary": self.summary()}, indent=1)

    @staticmethod
    def from_json(text: str) -> StepReport:
        """Read what to_json wrote; derived figures are computed again."""
        data: dict[str, Any] = json.loads(text)
        data.pop("summary")
        rounds = tuple(ModeRound(**each) for each in data.pop("rounds"))
        return StepReport(rounds=rounds, **data)

    def to_text(self) -> str:
        """A table by mode, and the bound it is held against."""
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
        """A bar for each mode, and the two parts of the bound as lines."""
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
