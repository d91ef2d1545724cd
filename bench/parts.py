"""Where the time of a step goes: from hvpipe's own trace, and for any system against computing alone."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bench.record import RankRound, Round
from hvpipe.trace import Trace

Interval = tuple[float, float]

COMPUTING = ("forward", "backward", "update")


def parts_of_trace(trace: Trace, rank: int, warm_up: int) -> dict[str, float]:
    """Seconds of a step by part, each moment counted once: for computing, else packing, else communication.

    forward  |#####               A forward that waits for the weights that it needs counts as forward:
    reduce   |   ######           against_alone finds that out.
    backward |         ####
    parts    |fffffrrrrbbbb       and hidden: rr
    """
    steps = trace.of("step", rank)[warm_up:]
    if not steps:
        return {}
    windows = merged((step.start_s, step.end_s) for step in steps)

    def spans(*categories: str) -> list[Interval]:
        found = (event for category in categories for event in trace.of(category, rank))
        return within(merged((event.start_s, event.end_s) for event in found), windows)

    reduce = spans("reduce")
    late = within(within(merged(_waits_for_peers(trace, rank)), reduce), windows)
    taken: list[Interval] = []
    parts = {}
    for part, mine in (
        ("forward", spans("forward")),
        ("backward", spans("backward")),
        ("update", spans("update")),
        ("pack", spans("pack", "unpack")),
        ("straggler", late),
        ("communication_exposed", reduce),
    ):
        parts[part] = length(without(mine, taken))
        taken = merged([*taken, *mine])
    parts["overhead"] = length(windows) - length(taken)
    parts["communication_hidden"] = length(within(reduce, spans(*COMPUTING)))
    return {part: seconds / len(steps) for part, seconds in parts.items()}


def _waits_for_peers(trace: Trace, rank: int) -> list[Interval]:
    """From the begin of each of this rank's reduces until the last rank has begun it too."""
    starts: dict[str, list[list[float]]] = defaultdict(list)
    for each in trace.ranks():
        of_rank = defaultdict(list)
        for event in trace.of("reduce", each):
            of_rank[event.name].append(event.start_s)
        for name, found in of_rank.items():
            starts[name].append(found)
    last_start_s = {
        name: [max(together) for together in zip(*found, strict=False)] for name, found in starts.items()
    }
    seen: dict[str, int] = defaultdict(int)
    waits = []
    for event in trace.of("reduce", rank):
        number, seen[event.name] = seen[event.name], seen[event.name] + 1
        if number < len(last_start_s[event.name]):
            waits.append((event.start_s, min(event.end_s, last_start_s[event.name][number])))
    return waits


def against_alone(round_: Round, alone: Round) -> Round:
    """A round with parts told by those of the same task computing alone (system `single`).

    What a system takes beyond computing alone is its communication, as far as it shows, with whatever the
    framework adds: only a system that tells more has them apart.
    """
    if not (round_.ok and alone.ok) or not round_.ranks or round_.case.system == "single":
        return round_
    ranks = tuple(
        _rank_against(mine, alone.ranks[min(number, len(alone.ranks) - 1)])
        for number, mine in enumerate(round_.ranks)
    )
    return replace(round_, ranks=ranks)


def _rank_against(mine: RankRound, alone: RankRound) -> RankRound:
    computing = {part: alone.parts_s[part] for part in COMPUTING if part in alone.parts_s}
    parts = dict(mine.parts_s)
    known = all(part in parts for part in COMPUTING)
    if not known:
        parts.update(computing)
        rest_s = statistics.fmean(mine.step_s) - sum(computing.values()) - parts.get("input", 0.0)
        parts["communication_exposed"] = max(0.0, rest_s)
        return replace(mine, parts_s=parts)
    # In "step" forward waits for weights on their way: beyond computing alone, that is exposed.
    excess_s = max(0.0, parts["forward"] - computing.get("forward", parts["forward"]))
    parts["forward"] -= excess_s
    parts["communication_exposed"] = parts.get("communication_exposed", 0.0) + excess_s
    # What it waited for ran beside it, and had been counted as hidden.
    parts["communication_hidden"] = max(0.0, parts.get("communication_hidden", 0.0) - excess_s)
    return replace(mine, parts_s=parts)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that at least one covers, as disjoint intervals in order."""
    found: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if found and start_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_s))
        else:
            found.append((start_s, end_s))
    return found


def within(intervals: Sequence[Interval], windows: Sequence[Interval]) -> list[Interval]:
    """What both cover; each disjoint and in order."""
    common = ((max(a, c), min(b, d)) for a, b in intervals for c, d in windows if a < d and c < b)
    return sorted(common)


def without(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """What the first cover and the second do not; each disjoint and in order."""
    left = list(intervals)
    for c, d in taken:
        left = [piece for a, b in left for piece in ((a, min(b, c)), (max(a, d), b)) if piece[0] < piece[1]]
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Seconds that disjoint intervals cover."""
    return sum(end_s - start_s for start_s, end_s in intervals)
