"""What an evaluation shows, in a few figures: hvpipe against the others, efficiency, the bound."""

from __future__ import annotations

from dataclasses import dataclass

from bench.figures import (
    ALONE,
    BEST_NATIVE,
    NATIVE,
    CaseFigures,
    Means,
    by_group,
    compare_in_groups,
    limited_by_links,
    means,
    shares_gain,
    tensorflow_versions,
)
from bench.metrics import geometric_mean
from bench.outcome import Outcome

OURS = "hvpipe-step"
_AGAINST = (
    (BEST_NATIVE, NATIVE),
    ("Horovod, tuned", ("horovod-tuned",)),
    ("Horovod", ("horovod",)),
    ("hvpipe without overlap", ("hvpipe-none",)),
)


@dataclass(frozen=True)
class Headline:
    """One result: its title, the figure, and what it is the figure of."""

    title: str
    figure: str
    detail: str


def headlines(outcome: Outcome, rows: list[CaseFigures]) -> list[Headline]:
    """The results that there are figures for."""
    limited = limited_by_links(outcome, rows)
    found = []
    for title, baselines in _AGAINST:
        mean = means(compare_in_groups(limited or rows, OURS, baselines))
        if mean is not None:
            where = "on links up to 1 Gb/s" if limited else "on links that are faster or have no set rate"
            found.append(_against(title, mean, where))
    ours = [row for row in rows if row.case.system == OURS and not row.case.task.epochs]
    ratios = [row.over_bound for row in ours if row.over_bound is not None]
    if ratios:
        detail = "the larger of computing alone and the links at their set rate; geometric mean of"
        found.append(
            Headline(
                "step over its bound", f"{geometric_mean(ratios):.2f}x", f"{detail} {_cases(len(ratios))}"
            )
        )
    found += [
        Headline(
            f"{gain.system}, shares by speed",
            f"{gain.speedup:.2f}x",
            f"samples per second of equal shares, {gain.group}",
        )
        for gain in shares_gain(rows)
        if gain.system != ALONE
    ]
    return found + _scaling(rows)


def cautions(outcome: Outcome) -> list[str]:
    """What a reader must know before the figures."""
    versions = tensorflow_versions(outcome)
    said = ", ".join(f"{version} ({', '.join(systems)})" for version, systems in versions.items())
    mixed = [f"Not all was measured on the same TensorFlow: {said}."] if len(versions) > 1 else []
    return [*outcome.setting.notes, *mixed]


def _against(title: str, mean: Means, where: str) -> Headline:
    slower = f"; slower in {', '.join(mean.slower_in)}" if mean.slower_in else "; slower in none"
    return Headline(
        f"{OURS} against {title}",
        f"{mean.speedup:.2f}x, {abs(mean.reduction):.0%} {'less' if mean.reduction >= 0 else 'more'} time",
        f"geometric mean of the speedups, arithmetic mean of the reductions, {_cases(mean.groups)} {where}; "
        f"worst {mean.worst_speedup:.2f}x{slower}",
    )


def _scaling(rows: list[CaseFigures]) -> list[Headline]:
    """Efficiency on the largest number of ranks that was measured, every system in order."""
    groups = [members for members in by_group(rows).values() if _measures_scaling(members)]
    if not groups:
        return []
    largest = max(groups, key=lambda members: (members[0].case.ranks, len(members)))
    ranked = sorted((row for row in largest if row.case.system != ALONE), key=lambda row: row.step_s)
    efficiencies = ", ".join(f"{row.case.system} {row.efficiency:.0%}" for row in ranked)
    return [
        Headline(
            f"scaling efficiency, {ranked[0].case.ranks} ranks",
            f"{ranked[0].efficiency:.0%} ({ranked[0].case.system})",
            f"throughput over that of all ranks computing alone, {ranked[0].case.group}: {efficiencies}",
        )
    ]


def _measures_scaling(members: list[CaseFigures]) -> bool:
    others = [row for row in members if row.case.system != ALONE]
    return bool(others) and others[0].efficiency is not None and not others[0].case.task.epochs


def _cases(count: int) -> str:
    return f"{count} case{'' if count == 1 else 's'}"
