"""Filling: give stage after stage the largest prefix of the remaining layers that it can take in time T."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hvpipe.plan.spans import Seat, Spans, Vector

Used = tuple[int, ...]
"""How many devices of each kind are in use."""

Places = npt.NDArray[np.intp]

Cut = tuple[Seat, int]
"""A stage of a filled pipeline: its seat and where its layers end."""

# Ends kept of one stage on each of the two fronts of `_worth_keeping`.
_FRONT = 3


@dataclass(frozen=True)
class Seats:
    """Who may sit where: for each stage of the pipeline the seats to choose from, and how many of each kind.

    A fixed order of devices has one seat to choose at each stage.
    """

    levels: Sequence[Sequence[Seat]]
    counts: Sequence[int]

    @property
    def stages(self) -> int:
        return len(self.levels)

    @cached_property
    def speeds(self) -> dict[int, float]:
        """The speed of each kind of device, the fastest first."""
        speeds = {seat.kind: seat.speed for level in self.levels for seat in level}
        return dict(sorted(speeds.items(), key=lambda pair: -pair[1]))

    def fastest(self, used: Used, stages: int) -> float:
        """The speed of `stages` more devices together, the fastest that are left."""
        speed = 0.0
        for kind, one in self.speeds.items():
            taken = min(stages, self.counts[kind] - used[kind])
            speed, stages = speed + taken * one, stages - taken
        return speed


@dataclass(frozen=True)
class Breadth:
    """How much filling keeps at each stage: so many sets of used devices, and of each its largest ends.

    Where there are fewer sets, there is room for more ends of each.
    """

    sets: int
    ends: int


@dataclass(frozen=True)
class _Filled:
    """Stages filled up to `end`; `before` is the pipeline without the last of them."""

    end: int
    seat: Seat | None = None
    before: _Filled | None = None


_Way = tuple[Places, Seat, _Filled]
"""Ends that a stage can have, its seat, and what is before it."""

_NOWHERE: Places = np.empty(0, np.intp)


def fill(spans: Spans, seats: Seats, limit_s: float, breadth: Breadth) -> list[Cut] | None:
    """Cut the layers so that each stage takes at most `limit_s` and fits its memory; None where that fails.

    The order of the devices is found on the way: of all ways to use up the same devices, those are kept that
    got furthest, and of all sets of used devices, those that wasted the least of `limit_s`. Where `breadth`
    has room for all sets (few kinds of devices), every order is looked at.

    Costs are not monotone, as the sizes of cuts jump: every end is looked at, not only up to the first that
    is too much. The furthest may be a bad one, where it hands on a large tensor that the next stage has no
    time to receive: so a few shorter ones are kept as well (`_worth_keeping`).
    What has wasted more than the devices left could make up for is dropped.
    """
    total_s = spans.compute_s[-1]
    beam: dict[Used, list[_Filled]] = {(0,) * len(seats.counts): [_Filled(0)]}
    for number, level in enumerate(seats.levels):
        left = seats.stages - number - 1
        found: dict[Used, list[_Way]] = {}
        for used, filled in beam.items():
            for seat in level:
                if used[seat.kind] == seats.counts[seat.kind]:
                    continue
                now = (*used[: seat.kind], used[seat.kind] + 1, *used[seat.kind + 1 :])
                least = 0
                if left and math.isfinite(limit_s):
                    rest_s = limit_s * seats.fastest(now, left)
                    least = int(spans.compute_s.searchsorted((total_s - rest_s) * (1 - 1e-9)))
                for before in filled:
                    ends = _ends(spans, before.end, seat, limit_s, (least, spans.count - left))
                    if ends.size:
                        found.setdefault(now, []).append((ends, seat, before))
        beam = _furthest(spans, seats, found, limit_s, breadth)
    best = next(iter(beam.values()), None)
    return _cuts(best[0]) if best else None


def _ends(spans: Spans, start: int, seat: Seat, limit_s: float, between: tuple[int, int]) -> Places:
    """The ends in `between` at which a stage that starts at `start` fits, in rising order.

    Behind the upper bound each stage to come still gets a layer; the last stage has to take all.
    """
    least, furthest = max(between[0], start + 1), between[1]
    if furthest == spans.count:
        least = furthest
    if math.isfinite(limit_s):
        reach_s = spans.compute_s[start] + limit_s * seat.speed * (1 + 1e-12)
        furthest = min(furthest, int(spans.compute_s.searchsorted(reach_s, "right")) - 1)
    if furthest < least:
        return _NOWHERE
    costs = spans.costs_s(start, furthest, seat)[least - start - 1 :]
    fitting: Places = ((costs <= limit_s) & (costs != np.inf)).nonzero()[0] + least
    return fitting


def _worth_keeping(spans: Spans, ends: Places, largest: int) -> list[int]:
    """Of ends in rising order the largest so many; and, from both sides, some with ever smaller cuts.

    From the right: shorter ends that hand on less than all larger ones. From the left: short stages, right
    where more stages are asked for than are of use: they leave the others layers and cheap cuts.
    """
    if ends.size <= largest:
        return [int(end) for end in ends[::-1]]
    cuts = spans.cut_bytes[ends]
    down, up = _records(cuts[::-1])[:_FRONT], _records(cuts)[-_FRONT:]
    kept = {*ends[-largest:].tolist(), *ends[::-1][down].tolist(), *ends[up].tolist()}
    return sorted(kept, reverse=True)


def _records(values: Vector) -> Places:
    """The first place, and each whose value is below all before it."""
    smallest = np.minimum.accumulate(values)
    return np.concatenate(([0], np.flatnonzero(smallest[1:] < smallest[:-1]) + 1))


def _furthest(
    spans: Spans, seats: Seats, found: dict[Used, list[_Way]], limit_s: float, breadth: Breadth
) -> dict[Used, list[_Filled]]:
    """Of each set of used devices the fillings worth keeping, of all sets the least wasteful."""
    kept: dict[Used, list[_Filled]] = {}
    waste_s: dict[Used, float] = {}
    largest = breadth.ends * max(1, breadth.sets // max(1, len(found)))
    for used, ways in found.items():
        ends, first = np.unique(np.concatenate([way[0] for way in ways]), return_index=True)
        behind = np.cumsum([way[0].size for way in ways])
        worthy = _worth_keeping(spans, ends, largest)
        origin = behind.searchsorted(first[ends.searchsorted(worthy)], "right")
        kept[used] = [_Filled(end, *ways[way][1:]) for end, way in zip(worthy, origin, strict=True)]
        offered = sum(count * seats.speeds.get(kind, 0.0) for kind, count in enumerate(used))
        waste_s[used] = (offered * limit_s if math.isfinite(limit_s) else 0) - spans.compute_s[worthy[0]]
    if len(kept) <= breadth.sets:
        return kept
    return {used: kept[used] for used in sorted(kept, key=lambda used: (waste_s[used], used))[: breadth.sets]}


def _cuts(filled: _Filled) -> list[Cut]:
    cuts: list[Cut] = []
    at: _Filled | None = filled
    while at is not None and at.seat is not None:
        cuts.append((at.seat, at.end))
        at = at.before
    return cuts[::-1]
