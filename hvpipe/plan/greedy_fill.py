"""Filling: give stage after stage the largest prefix of the remaining layers that it can take in time T."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hvpipe.plan.span_costs import Bench, Seat, Spans, Vector

Used = tuple[int, ...]
"""How many devices of each kind are in use."""

Places = npt.NDArray[np.intp]

Cut = tuple[Seat, int]
"""A stage of a filled pipeline: its seat and where its layers end."""

# Ends kept of one stage on each of the two fronts of `_worth_keeping`.
_FRONT = 3
# Of each stage so many sets of used devices, each with one more of every kind, are gone on with at most.
_WAYS, _FEWEST_SETS = 192, 4


@dataclass(frozen=True)
class Seats:
    """Who may sit where: for each stage of the pipeline the seats to choose from, and how many of each kind.

    A fixed order of devices has one seat to choose at each stage. In a circle of so many `devices` a stage is
    on the same one as the stage a round before, and together they have its memory, each at most a `share`.
    """

    levels: Sequence[Sequence[Seat]]
    counts: Sequence[int]
    devices: int = 0
    share: float = 1.0

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
        return sum(self._left(used, stages))

    def fastest_behind(self, used: Used, stages: int) -> dict[int, float]:
        """For each kind that may be next, the speed of the `stages` fastest devices that it leaves."""
        left = self._left(used, stages + 1)
        together, spare = sum(left[:stages]), left[stages]
        return {kind: together - max(0.0, speed - spare) for kind, speed in self.speeds.items()}

    def _left(self, used: Used, at_most: int) -> list[float]:
        """The speeds of the devices that are left, the fastest first."""
        speeds: list[float] = []
        for kind, speed in self.speeds.items():
            speeds += [speed] * min(at_most - len(speeds), self.counts[kind] - used[kind])
            if len(speeds) == at_most:
                break
        return speeds


@dataclass(frozen=True)
class Breadth:
    """How much filling keeps at each stage: so many sets of used devices, and of each its largest ends.

    Where there are fewer sets, there is room for more ends of each.
    """

    sets: int
    ends: int

    def among(self, kinds: int) -> Breadth:
        """What is kept among so many kinds: of many, fewer sets, as each goes on with every kind."""
        return Breadth(min(self.sets, max(_FEWEST_SETS, _WAYS // kinds)), self.ends)


@dataclass(frozen=True)
class _Filled:
    """Stages filled up to `end`; `before` is the pipeline without the last of them.

    In a circle `held_bytes` is what is in use of each device, that of the next stage first.
    """

    end: int
    seat: Seat | None = None
    before: _Filled | None = None
    held_bytes: tuple[int, ...] = ()

    def with_stage(self, spans: Spans, seat: Seat, end: int) -> _Filled:
        """One stage more."""
        held_bytes = self.held_bytes
        if held_bytes:
            more_bytes = spans.memory_bytes(self.end, end, seat)
            held_bytes = (*held_bytes[1:], held_bytes[0] + more_bytes)
        return _Filled(end, seat, self, held_bytes)


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
    breadth = breadth.among(len(seats.speeds))
    beam: dict[Used, list[_Filled]] = {
        (0,) * len(seats.counts): [_Filled(0, held_bytes=(0,) * seats.devices)]
    }
    for number, level in enumerate(seats.levels):
        left = seats.stages - number - 1
        found: dict[Used, list[_Way]] = {}
        bench = Bench.of(level)
        for used, filled in beam.items():
            taken = [used[seat.kind] == seats.counts[seat.kind] for seat in level]
            free = [seat for seat, is_taken in zip(level, taken, strict=True) if not is_taken]
            if not free:
                continue
            among = bench.without(taken) if len(free) < len(level) else bench
            nexts = [(*used[: s.kind], used[s.kind] + 1, *used[s.kind + 1 :]) for s in free]
            least = _least_ends(spans, seats, free, used, limit_s, left)
            for before in filled:
                if before.held_bytes:
                    among = bench.within(seats.share, before.held_bytes[0])
                all_ends = _ends(spans, before.end, among, limit_s, (least, spans.count - left))
                for now, seat, ends in zip(nexts, free, all_ends, strict=True):
                    if ends.size:
                        found.setdefault(now, []).append((ends, seat, before))
        beam = _furthest(spans, seats, found, limit_s, breadth)
    best = next(iter(beam.values()), None)
    return _cuts(best[0]) if best else None


def _least_ends(
    spans: Spans, seats: Seats, free: Sequence[Seat], used: Used, limit_s: float, left: int
) -> Places:
    """For each seat the end up to which it has to come, so that the fastest `left` others can do the rest."""
    if not left:
        return np.full(len(free), spans.count, np.intp)
    if not math.isfinite(limit_s):
        return np.zeros(len(free), np.intp)
    behind = seats.fastest_behind(used, left)
    rest_s = limit_s * np.array([behind[seat.kind] for seat in free])
    places: Places = spans.compute_s.searchsorted((spans.compute_s[-1] - rest_s) * (1 - 1e-9))
    return places


def _ends(
    spans: Spans, start: int, among: Bench, limit_s: float, between: tuple[Places, int]
) -> list[Places]:
    """For each seat the ends in `between` at which a stage that starts at `start` fits, in rising order.

    Behind the upper bound each stage to come still gets a layer.
    """
    least, furthest = np.maximum(between[0], start + 1), between[1]
    if math.isfinite(limit_s):
        reach_s = spans.compute_s[start] + limit_s * among.fastest * (1 + 1e-12)
        furthest = min(furthest, int(spans.compute_s.searchsorted(reach_s, "right")) - 1)
    first = int(least.min())
    if furthest < first:
        return [_NOWHERE] * len(least)
    costs = spans.costs_of_all_s(start, first, furthest, among)
    fitting = (costs <= limit_s) & (costs != np.inf)
    return [row[low - first :].nonzero()[0] + low for row, low in zip(fitting, least.tolist(), strict=True)]


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
    least_wasteful = list(found)
    if len(found) > breadth.sets:
        wasted = ((_waste_s(spans, seats, used, ways, limit_s), used) for used, ways in found.items())
        least_wasteful = [used for _, used in sorted(wasted)[: breadth.sets]]
    kept: dict[Used, list[_Filled]] = {}
    largest = breadth.ends * max(1, breadth.sets // max(1, len(found)))
    for used in least_wasteful:
        ways = found[used]
        ends, first = np.unique(np.concatenate([way[0] for way in ways]), return_index=True)
        behind = np.cumsum([way[0].size for way in ways])
        worthy = _worth_keeping(spans, ends, largest)
        origin = behind.searchsorted(first[ends.searchsorted(worthy)], "right")
        kept[used] = [
            ways[way][2].with_stage(spans, ways[way][1], end) for end, way in zip(worthy, origin, strict=True)
        ]
    return kept


def _waste_s(spans: Spans, seats: Seats, used: Used, ways: list[_Way], limit_s: float) -> float:
    """What the devices in use could have computed in `limit_s`, less what they do at best."""
    offered = sum(count * seats.speeds.get(kind, 0.0) for kind, count in enumerate(used))
    furthest = max(int(ends[-1]) for ends, _, _ in ways)
    return float((offered * limit_s if math.isfinite(limit_s) else 0) - spans.compute_s[furthest])


def _cuts(filled: _Filled) -> list[Cut]:
    cuts: list[Cut] = []
    at: _Filled | None = filled
    while at is not None and at.seat is not None:
        cuts.append((at.seat, at.end))
        at = at.before
    return cuts[::-1]
