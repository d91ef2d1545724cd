"""The layouts near a layout: a boundary moved, devices exchanged, added or moved, stages merged or split."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product, takewhile
from operator import itemgetter

from hvpipe.plan.replication import Group, device_kinds
from hvpipe.search.judge import Judge, Judged
from hvpipe.search.layout import StageLayout, are_ends
from hvpipe.search.starts import Starts

# More devices than this are not moved one by one: there would be too many ways.
_FEW_DEVICES = 64
# With more stages than this, only the nearest cuts are tried.
_FEW_STAGES = 16
# The work of a cut by a rule, for each stage, as `Judge` counts it.
_CUT = 20
# Of the changes of devices, the most promising are simulated, and some of these settle: at once if their step
# is at most this much longer than the best, then the fastest of the others.
_SIMULATED, _SETTLED, _NEAR = 30, 6, 1.03


class Moves:
    """Yields the neighbours of a layout.

    Args:
        judge: The judge, for its profile, cluster and choice.
        starts: Cuts a layout whose devices have changed.
        stages: Whether the number of stages may change.
        modes: The modes that a neighbour may have.
    """

    def __init__(self, judge: Judge, starts: Starts, stages: bool, modes: Sequence[str]) -> None:
        self._judge, self._starts, self._stages, self._modes = judge, starts, stages, modes
        self._layers, self._choice = len(judge.profile.layers), judge.choice
        self._most_groups = judge.most_groups
        self._kind = device_kinds(judge.cluster)

    def boundaries(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield the layout with one boundary moved by 1, 2, 4, ... layers, small steps first."""
        step, bounds = 1, (0, *layout.ends)
        while step < self._layers:
            for place in range(len(layout.ends) - 1):
                for end in (layout.ends[place] - step, layout.ends[place] + step):
                    if bounds[place] < end < bounds[place + 2]:
                        ends = (*layout.ends[:place], end, *layout.ends[place + 1 :])
                        yield replace(layout, ends=ends)
            step *= 2

    def shifts(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield the layout with several neighbouring boundaries moved in the same direction by a layer, or
        with few stages, by 1, 2, 4, ... layers."""
        inner, step, bounds = len(layout.ends) - 1, 1, (0, *layout.ends)
        while step < (self._layers if inner < _FEW_STAGES else 2):
            for first, last in combinations(range(inner + 1), 2):
                for by in (-step, step) if last - first > 1 else ():
                    if bounds[first] < bounds[first + 1] + by and bounds[last] + by < bounds[last + 1]:
                        moved = tuple(end + by for end in layout.ends[first:last])
                        ends = (*layout.ends[:first], *moved, *layout.ends[last:])
                        yield replace(layout, ends=ends)
            step *= 2

    def pairs(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield the layout with two boundaries moved by up to two layers each, if the stages are few."""
        inner = len(layout.ends) - 1
        if inner >= _FEW_STAGES:
            return
        for one, other in combinations(range(inner), 2):
            for by, other_by in product((-2, -1, 1, 2), repeat=2):
                ends = list(layout.ends)
                ends[one] += by
                ends[other] += other_by
                if are_ends(ends, self._layers):
                    yield replace(layout, ends=tuple(ends))

    def schedules(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield the layout under the other schedules with as many chunks."""
        for name, chunks in self._choice.schedules:
            if chunks == layout.chunks and name != layout.schedule:
                yield replace(layout, schedule=name)

    def devices(self, layout: StageLayout) -> Iterator[StageLayout]:
        """Yield layouts with devices exchanged, moved, added or left out, stages merged or split, or other
        chunks."""
        for name, chunks in self._choice.schedules:
            if chunks != layout.chunks and layout.mode == "pipeline" and self._stages:
                yield from self._recut(layout.groups, replace(layout, schedule=name, chunks=chunks))
        for groups in self._changes(layout):
            yield from self._with(groups, layout)

    def any_devices(self, layout: StageLayout, draw: random.Random) -> StageLayout:
        """Return the layout after one change of its devices, drawn at random."""
        changes = list(self._changes(layout))
        cuts = list(self._with(draw.choice(changes), layout)) if changes else []
        return draw.choice(cuts or [layout])

    def _changes(self, layout: StageLayout) -> Iterator[tuple[Group, ...]]:
        """Yield other groups for a layout."""
        if len(layout.devices) > _FEW_DEVICES:
            return
        yield from self._exchanged(layout.groups, self._idle(layout))
        for groups in self._regrouped(layout.groups, self._idle(layout)):
            if max(map(len, groups)) > 1 and ("hybrid" not in self._modes or layout.chunks > 1):
                continue
            if self._stages or len(groups) == len(layout.groups):
                yield groups

    def _with(self, groups: Sequence[Group], layout: StageLayout) -> Iterator[StageLayout]:
        """Yield the layout with other groups: with its cuts if they are as many, and cut again."""
        if len(groups) == len(layout.groups):
            yield replace(layout, groups=tuple(groups))
        yield from self._recut(groups, layout)

    def _recut(self, groups: Sequence[Group], like: StageLayout) -> Iterator[StageLayout]:
        if len(groups) <= self._most_groups:
            how = replace(self._choice.usual, schedule=like.schedule, chunks=like.chunks)
            for layout in self._starts.cut(groups, how):
                self._judge.left -= _CUT * len(groups)
                yield layout

    def _exchanged(self, groups: tuple[Group, ...], idle: Group) -> Iterator[tuple[Group, ...]]:
        """Yield the groups of two stages, or two devices, exchanged; or a device for an idle one."""
        for one, other in combinations(range(len(groups)), 2):
            if self._kinds(groups[one]) != self._kinds(groups[other]):
                exchanged = list(groups)
                exchanged[one], exchanged[other] = groups[other], groups[one]
                yield tuple(exchanged)
            for a, b in self._distinct_pairs(groups[one], groups[other]):
                if len(groups[one]) + len(groups[other]) > 2:
                    exchanged = list(groups)
                    exchanged[one] = tuple(b if name == a else name for name in groups[one])
                    exchanged[other] = tuple(a if name == b else name for name in groups[other])
                    yield tuple(exchanged)
        for place, group in enumerate(groups):
            for a, b in self._distinct_pairs(group, idle):
                instead = tuple(b if name == a else name for name in group)
                yield (*groups[:place], instead, *groups[place + 1 :])

    def _regrouped(self, groups: tuple[Group, ...], idle: Group) -> Iterator[tuple[Group, ...]]:
        """Yield other groups: a device more, less or moved; two stages as one, or one as two."""
        count = len(groups)
        for name in self._one_of_each(idle):
            for place in range(count):
                yield (*groups[:place], (*groups[place], name), *groups[place + 1 :])
            for place in range(count + 1):
                yield (*groups[:place], (name,), *groups[place:])
        for place, group in enumerate(groups):
            for name in self._one_of_each(group):
                rest = tuple(other for other in group if other != name)
                without = (*groups[:place], *([rest] if rest else []), *groups[place + 1 :])
                if not without:
                    continue
                yield without
                for target in range(len(without)):
                    if not rest or target != place:
                        more = (*without[target], name)
                        yield (*without[:target], more, *without[target + 1 :])
                for target in range(len(without) + 1):
                    yield (*without[:target], (name,), *without[target:])
        for place, (one, other) in enumerate(pairwise(groups)):
            yield (*groups[:place], one + other, *groups[place + 2 :])
        for place, group in enumerate(groups):
            if len(group) > 2:
                half = len(group) // 2
                yield (*groups[:place], group[:half], group[half:], *groups[place + 1 :])

    def _idle(self, layout: StageLayout) -> Group:
        used = set(layout.devices)
        return tuple(name for name in self._kind if name not in used)

    def _kinds(self, names: Sequence[str]) -> list[Hashable]:
        return sorted(map(self._kind.__getitem__, names), key=repr)

    def _one_of_each(self, names: Sequence[str]) -> list[str]:
        """Return the first device of each kind."""
        return list({self._kind[name]: name for name in reversed(names)}.values())

    def _distinct_pairs(self, ones: Sequence[str], others: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield pairs of devices of different kinds, one for each pair of kinds."""
        for a in self._one_of_each(ones):
            for b in self._one_of_each(others):
                if self._kind[a] != self._kind[b]:
                    yield a, b


def improve(judge: Judge, moves: Moves, start: Judged) -> Judged:
    """Take moves that shorten the forecast step, until none does or the budget is spent.

    Boundaries and schedules settle first. Then the devices change: as good cuts for other devices may lie
    elsewhere, the most promising changes settle before they are compared.
    """
    best = settle(judge, moves, start)
    while judge.left > 0 and (found := _changed(judge, moves, best)) is not None:
        best = found
    return best


def try_better(judge: Judge, moves: Moves, layout: StageLayout, best: Judged) -> Judged | None:
    """Settle a layout if its bound, after its boundaries have moved, lets it beat the best."""
    layout, (missing_bytes, bound_s) = descend(judge, moves, layout)
    if best.fits and (missing_bytes or bound_s >= best.step_s):
        return None
    judged = judge.judge(layout)
    return None if judged is None else settle(judge, moves, judged)


def settle(judge: Judge, moves: Moves, start: Judged) -> Judged:
    """Move boundaries and change the schedule as long as that helps."""
    best, improved = start, True
    while improved and judge.left > 0:
        improved = False
        for neighbours in (moves.boundaries, moves.schedules, moves.shifts, moves.pairs):
            for layout in neighbours(best.layout):
                if judge.left <= 0:
                    break
                judged = judge.judge(layout, best)
                if judged is not None and judged.beats(best):
                    best, improved = judged, True
    return best


def descend(judge: Judge, moves: Moves, start: StageLayout) -> tuple[StageLayout, tuple[float, float]]:
    """Move boundaries as long as that lowers the bound of the step; return the layout and its promise."""
    best, promise, improved = start, judge.promise(start), True
    while improved and judge.left > 0:
        improved = False
        for neighbours in (moves.boundaries, moves.shifts):
            for layout in neighbours(best):
                if judge.left <= 0:
                    break
                found = judge.promise(layout)
                if found < promise:
                    best, promise, improved = layout, found, True
    return best, promise


def _changed(judge: Judge, moves: Moves, best: Judged) -> Judged | None:
    """Return a better layout with other devices or chunks; None if no promising change is better.

    Finding the changes takes at most half of the work that is left.
    """
    half = judge.left // 2
    changes = takewhile(lambda _: judge.left > half, moves.devices(best.layout))
    promising = sorted([(judge.promise(layout), layout) for layout in changes], key=itemgetter(0))
    steps_s: set[float] = set()  # equal ones are mostly of equal layouts, with like devices exchanged
    rest: list[Judged] = []
    settled = 0
    for _, layout in promising:
        if len(steps_s) == _SIMULATED:
            break
        judged = judge.judge(layout)
        if judged is None or judged.step_s in steps_s:
            continue
        if judged.fits:
            steps_s.add(judged.step_s)
        if settled == _SETTLED or not (judged.beats(best) or judged.step_s < _NEAR * best.step_s):
            rest.append(judged)
            continue
        settled += 1
        if (found := settle(judge, moves, judged)).beats(best):
            return found
    rest.sort(key=lambda one: (one.missing_bytes, one.step_s))
    for judged in rest[: _SETTLED - settled]:
        if (found := settle(judge, moves, judged)).beats(best):
            return found
    return None
