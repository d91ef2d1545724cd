"""Every layout of a small problem, and the search of them all."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from hvpipe.plan.replication import Group, device_kinds
from hvpipe.search.judge import Judge
from hvpipe.search.layout import StageLayout

MOST_DEVICES, MOST_LAYOUTS = 6, 50_000
"""Problems with more devices or layouts are searched by moves."""


def every_layout(judge: Judge, stages: int | None, modes: Sequence[str]) -> list[StageLayout] | None:
    """Return every cut on every sequence of groups under every schedule; None if there are too many.

    Of sequences that differ only by devices of the same kind, it has one.

    Args:
        judge: The judge, for its profile, cluster and choice.
        stages: The number of stages; None for any.
        modes: "pipeline", "hybrid", or both.
    """
    names = tuple(device.name for device in judge.cluster.devices)
    layers, most = len(judge.profile.layers), judge.most_groups
    if len(names) > MOST_DEVICES or math.comb(layers - 1, min(len(names), layers) - 1) > MOST_LAYOUTS:
        return None
    found: list[StageLayout] = []
    for groups in _sequences(names, device_kinds(judge.cluster)):
        replicated = max(map(len, groups)) > 1
        if len(groups) > most or ("hybrid" if replicated else "pipeline") not in modes:
            continue
        for name, chunks in judge.choice.schedules:
            count = len(groups) * chunks
            if count > layers or stages not in (None, count) or (chunks > 1 and replicated):
                continue
            if len(found) + math.comb(layers - 1, count - 1) > MOST_LAYOUTS:
                return None
            for inner in combinations(range(1, layers), count - 1):
                found.append(StageLayout(groups, (*inner, layers), name, chunks))
    return found


def judge_all(judge: Judge, layouts: Sequence[StageLayout], reserve: int) -> bool:
    """Judge the layouts, those that compute least first; skip those that cannot become the best of a mode.

    Args:
        judge: The judge; its best layouts are the result.
        layouts: The layouts.
        reserve: The budget to leave.

    Returns:
        Whether the budget sufficed, so that no layout is better than the judge's best.
    """
    usual = judge.choice.usual
    busiest_s = [
        max(judge.busy_s(layout, replace(usual, schedule=layout.schedule, chunks=layout.chunks)))
        for layout in layouts
    ]
    for busy_s, layout in sorted(zip(busiest_s, layouts, strict=True), key=lambda pair: pair[0]):
        best = judge.best.get(layout.mode)
        if best is None or busy_s < best.step_s:
            if judge.left < reserve:
                return False
            judge.judge(layout, best)
    return True


def _sequences(names: Group, kinds: Mapping[str, Hashable]) -> Iterator[tuple[Group, ...]]:
    """Yield the sequences of disjoint groups of some of the devices, one for each sequence of kinds."""
    seen = set()

    def extended(groups: tuple[Group, ...], left: Group) -> Iterator[tuple[Group, ...]]:
        for size in range(1, len(left) + 1):
            for group in combinations(left, size):
                longer = (*groups, group)
                key = tuple(tuple(sorted(repr(kinds[name]) for name in one)) for one in longer)
                if key not in seen:
                    seen.add(key)
                    yield longer
                    yield from extended(longer, tuple(name for name in left if name not in group))

    yield from extended((), names)
