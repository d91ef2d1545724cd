"""Two evaluations beside each other: what became slower or faster by more than the noise of both."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bench.figures import CaseFigures, all_figures
from bench.metrics import format_time, geometric_mean, table
from bench.outcome import Outcome

LEAST_CHANGE = 0.05  # smaller ones are not reported, however quiet the machine
_ERRORS = 2.0  # standard errors of the ratio

Verdict = Literal["slower", "faster", "the same", "gone", "new", "another task"]


@dataclass(frozen=True)
class Change:
    """A case before and after; `allowed` is how far from 1 the ratio may be without meaning anything.

    Of "another task" (other threads, steps, seed) there is no ratio: the two say nothing of each other.
    """

    key: str
    verdict: Verdict
    before_s: float | None = None
    after_s: float | None = None
    ratio: float | None = None
    allowed: float | None = None


@dataclass(frozen=True)
class Differences:
    """All cases of both; `same_machine` is False where figures should not be held together: the machine is
    another, or a cluster of the same name."""

    changes: tuple[Change, ...]
    same_machine: bool

    @property
    def regressed(self) -> bool:
        """Whether any case is slower beyond noise, or gone."""
        return any(each.verdict in ("slower", "gone") for each in self.changes)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "regressed": self.regressed}

    def to_text(self) -> str:
        """A table for people, what changed first."""
        order = ("slower", "gone", "another task", "faster", "new", "the same")
        rows = [
            [
                each.key,
                "" if each.before_s is None else format_time(each.before_s),
                "" if each.after_s is None else format_time(each.after_s),
                "" if each.ratio is None else f"{each.ratio:.3f}",
                "" if each.allowed is None else f"{each.allowed:.0%}",
                each.verdict,
            ]
            for each in sorted(self.changes, key=lambda each: order.index(each.verdict))
        ]
        lines = (
            [] if self.same_machine else ["Measured on different machines or clusters: ratios say little."]
        )
        lines.append(table(["case", "before", "after", "ratio", "noise allows", "verdict"], rows))
        ratios = [each.ratio for each in self.changes if each.ratio is not None]
        if ratios:
            lines.append(f"geometric mean of the ratios: {geometric_mean(ratios):.3f}, {len(ratios)} cases")
        counts = {verdict: sum(each.verdict == verdict for each in self.changes) for verdict in order}
        lines.append(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
        return "\n".join(lines)


def compare(before: Outcome, after: Outcome) -> Differences:
    """Every case of either."""
    old = {row.case.key: row for row in all_figures(before)}
    new = {row.case.key: row for row in all_figures(after)}
    changes = [_change(key, old.get(key), new.get(key)) for key in dict.fromkeys((*old, *new))]
    machines = [each.setting.machine for each in (before, after)]
    same = (machines[0].cpu, machines[0].cores) == (machines[1].cpu, machines[1].cores)
    names = [{each.name: each.description for each in of.setting.clusters} for of in (before, after)]
    alike = all(names[0][name] == names[1][name] for name in names[0].keys() & names[1].keys())
    return Differences(tuple(changes), same and alike)


def _change(key: str, old: CaseFigures | None, new: CaseFigures | None) -> Change:
    if old is None or new is None:
        before_s, after_s = (None if row is None else row.step_s for row in (old, new))
        return Change(key, "gone" if new is None else "new", before_s, after_s)
    if old.case.task != new.case.task:
        return Change(key, "another task", old.step_s, new.step_s)
    ratio = new.step_s / old.step_s
    allowed = max(LEAST_CHANGE, _ERRORS * math.hypot(old.noise, new.noise))
    verdict: Verdict = "the same"
    # On a scale of factors: as far above 1 as below.
    if abs(math.log(ratio)) > math.log1p(allowed):
        verdict = "slower" if ratio > 1 else "faster"
    return Change(key, verdict, old.step_s, new.step_s, ratio, allowed)
