"""What each mode of hvpipe would gain in a case: forecast from the systems that ran, and measured.

The forecast takes the computing of `single` and the time of the gradients on the slowest link. Communication
hides completely behind the computing that a mode lets it overlap: no step can be shorter. The CPU time that
communication takes of computing ranks, and the cost of a compression, are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.metrics import format_time, table
from bench.report.comparisons import OURS
from bench.report.figures import ALONE, CaseFigures, by_group
from bench.systems import is_exact

_WORTH = 1.1  # a mode that trains by another algorithm is advised if it gains this much over "step"
_SHARE_OF_BYTES = {"bf16": 1 / 2, "int8": 1 / 4, "local": 1 / 8}  # "local" averages every 8 steps


@dataclass(frozen=True)
class ModeForecast:
    """A mode's step at best, and as measured if it ran, in seconds."""

    system: str
    at_best_s: float
    measured_s: float | None


def forecasts(members: Sequence[CaseFigures]) -> list[ModeForecast]:
    """Forecast every mode in a group, the fastest first; none if computing or the links are not known."""
    alone = next((row for row in members if row.case.system == ALONE), None)
    ours = next((row for row in members if row.case.system == OURS), None)
    links_s = ours.links_s if ours is not None else None
    if alone is None or links_s is None:
        return []
    computing_s = alone.step_s
    at_best = {
        "hvpipe-none": computing_s + links_s,
        OURS: max(computing_s, links_s),
        **{f"hvpipe-{name}": max(computing_s, share * links_s) for name, share in _SHARE_OF_BYTES.items()},
    }
    measured = {row.case.system: row.step_s for row in members}
    found = [ModeForecast(name, at_best_s, measured.get(name)) for name, at_best_s in at_best.items()]
    return sorted(found, key=lambda each: each.at_best_s)


def advised(found: Sequence[ModeForecast]) -> str:
    """Say in a sentence which mode to use, and what others may gain."""
    best_s = {each.system: each.at_best_s for each in found}
    gains = [each for each in found if not is_exact(each.system) and best_s[OURS] > _WORTH * each.at_best_s]
    said = f'Use overlap="step": at best {best_s["hvpipe-none"] / best_s[OURS]:.2f}x as fast as no overlap.'
    if not gains:
        return said + " Sending less would gain nothing: computing takes longer than the links."
    names = ", ".join(f"{each.system} {best_s[OURS] / each.at_best_s:.2f}x" for each in gains)
    return (
        f"{said} Links are the limit, so sending less would gain more, by another algorithm: at best {names}."
    )


def of_groups(rows: Sequence[CaseFigures]) -> dict[str, list[ModeForecast]]:
    """Return the forecasts of each group of steps whose computing and links are known."""
    groups = {name: members for name, members in by_group(rows).items() if not members[0].case.task.epochs}
    return {name: found for name, members in groups.items() if (found := forecasts(members))}


def describe(groups: Mapping[str, Sequence[ModeForecast]]) -> str:
    """Return a table and a sentence for each group."""
    header = ["mode", "at best", "measured", "over at best"]
    made = []
    for name, found in groups.items():
        lines = [
            [
                each.system,
                format_time(each.at_best_s),
                "" if each.measured_s is None else format_time(each.measured_s),
                "" if each.measured_s is None else f"{each.measured_s / each.at_best_s:.2f}x",
            ]
            for each in found
        ]
        made.append(f"{name}\n{table(header, lines)}\n{advised(found)}")
    return "\n\n".join(made)
