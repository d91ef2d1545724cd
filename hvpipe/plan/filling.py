"""Filling: give stage after stage the largest prefix of the remaining layers that it can take in time T."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvpipe.plan.spans import Seat, Spans, Vector

Places = npt.NDArray[np.intp]

Cut = tuple[Seat, int]
"""A stage of a filled pipeline: its seat and where its layers end."""

# Ends kept of one stage on each of its two fronts (see `_worth_keeping`).
_LARGEST, _ENDS = 6, 3


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

    @property
    def fastest(self) -> float:
        """The speed of all stages together if the fastest devices are taken."""
        speeds = {seat.kind: seat.speed for level in self.levels for seat in level}
        every = sorted((s for kind, s in speeds.items() for _ in range(self.counts[kind])), reverse=True)
        return sum(every[: self.stages])


@dataclass(frozen=True)
class _Filled:
    """Stages filled up to `end`; `before` is the pipeline without the last of them."""

    end: int
    seat: Seat | None = None
    before: _Filled | None = None


def fill(spans: Spans, seats: Seats, limit_s: float, width: int) -> list[Cut] | None:
    """Cut the layers so that each stage takes at most `limit_s` and fits its memory; None where filling fails.

    The order of the devices is found on the way: of all ways to use up the same devices, those are kept that
    got furthest, and of all sets of devices used, the `width` that wasted the least of `limit_s`. With a width
    of all sets (few kinds of devices) every order is looked at.

    Costs are not monotone, as the sizes of cuts jump: every end is looked at, not only up to the first that is
    too much. The furthest end may be a bad one, where it hands on a large tensor that the next stage has no
    time to receive: so next to it a few shorter ones are kept, each with a smaller cut than all that are longer.
    """
    beam: dict[tuple[int, ...], list[_Filled]] = {(0,) * len(seats.counts): [_Filled(0)]}
    for number, level in enumerate(seats.levels):
        left = seats.stages - number - 1
        found: dict[tuple[int, ...], list[_Filled]] = {}
        for used, filled in beam.items():
            for seat in level:
                if used[seat.kind] == seats.counts[seat.kind]:
                    continue
                now = (*used[: seat.kind], used[seat.kind] + 1, *used[seat.kind + 1 :])
                for before in filled:
                    ends = _ends(spans, before.end, seat, limit_s, left)
                    if ends:
                        found.setdefault(now, []).extend(_Filled(end, seat, before) for end in ends)
        beam = _furthest(spans, found, level, limit_s, width)
    best = next(iter(beam.values()), None)
    return _cuts(best[0]) if best else None


def _ends(spans: Spans, start: int, seat: Seat, limit_s: float, left: int) -> list[int]:
    """The largest end of a stage that starts at `start`, then shorter ones with ever smaller cuts.

    Each of the `left` stages behind it needs a layer; the last stage has to take all.
    """
    furthest = spans.count - left
    if math.isfinite(limit_s):
        reach_s = spans.compute_s[start] + limit_s * seat.speed
        furthest = min(furthest, int(np.searchsorted(spans.compute_s, reach_s * (1 + 1e-12), "right")) - 1)
    if furthest <= start or (left == 0 and furthest < spans.count):
        return []
    costs = spans.costs_s(start, furthest, seat)
    if left == 0:
        return [spans.count] if costs[-1] <= limit_s and costs[-1] != np.inf else []
    fitting = np.flatnonzero((costs <= limit_s) & (costs != np.inf)) + (start + 1)
    return _worth_keeping(spans, fitting)


def _worth_keeping(spans: Spans, ends: Places) -> list[int]:
    """Of ends in rising order: the largest, each shorter one with a smaller cut than all that are larger,
    and likewise from the other side, largest first.

    A short stage may be right where more stages are asked for than are of use: it leaves layers, and cheap
    cuts between them, for the others.
    """
    if ends.size == 0:
        return []
    cuts = spans.cut_bytes[ends]
    down, up = _records(cuts[::-1])[:_ENDS], _records(cuts)[-_ENDS:]
    kept = {*ends[-_LARGEST:].tolist(), *ends[::-1][down].tolist(), *ends[up].tolist()}
    return sorted(kept, reverse=True)


def _records(values: Vector) -> Places:
    """The first place, and each whose value is below all before it."""
    smallest = np.minimum.accumulate(values)
    return np.concatenate(([0], np.flatnonzero(smallest[1:] < smallest[:-1]) + 1))


def _furthest(
    spans: Spans,
    found: dict[tuple[int, ...], list[_Filled]],
    level: Sequence[Seat],
    limit_s: float,
    width: int,
) -> dict[tuple[int, ...], list[_Filled]]:
    """Of each set of used devices the furthest fillings, of all sets the `width` least wasteful."""
    speed = {seat.kind: seat.speed for seat in level}
    kept: dict[tuple[int, ...], list[_Filled]] = {}
    waste_s: dict[tuple[int, ...], float] = {}
    for used, filled in found.items():
        first_to: dict[int, _Filled] = {}
        for one in filled:
            first_to.setdefault(one.end, one)
        ends = _worth_keeping(spans, np.array(sorted(first_to)))
        kept[used] = [first_to[end] for end in ends]
        offered = sum(count * speed.get(kind, 0.0) for kind, count in enumerate(used))
        waste_s[used] = (offered * limit_s if math.isfinite(limit_s) else 0.0) - spans.compute_s[ends[0]]
    if len(kept) <= width:
        return kept
    return {used: kept[used] for used in sorted(kept, key=lambda used: (waste_s[used], used))[:width]}


def _cuts(filled: _Filled) -> list[Cut]:
    cuts: list[Cut] = []
    at: _Filled | None = filled
    while at is not None and at.seat is not None:
        cuts.append((at.seat, at.end))
        at = at.before
    return cuts[::-1]
