"""Where the time of a step goes: from hvpipe's own trace, and for any system against computing alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from bench.rounds.record import RankRound, Round
from hvpipe.trace.computing_time import COMPUTE, Interval, computing, length, merged, union, within
from hvpipe.trace.events import Trace

ALONE = "single"  # the system that computes without sharing


def parts_of_trace(trace: Trace, rank: int, skip: int) -> dict[str, float]:
    """Return the seconds of a step by part, without the first `skip` steps.

    Each moment counts once: as computing, else as packing, else as communication.

        forward  |#####
        reduce   |   ######
        backward |         ####
        parts    |fffffrrrrbbbb       and hidden: rr

    Where a forward or an update only waits, it counts as communication, as far as the trace tells
    (hvpipe.trace.computing_time). against_alone finds the rest.
    """
    steps = trace.of("step", rank)[skip:]
    if not steps:
        return {}
    windows = union(steps)

    def spans(*categories: str) -> list[Interval]:
        return within(union(event for each in categories for event in trace.of(each, rank)), windows)

    computed = {part: within(found, windows) for part, found in computing(trace, rank).items()}
    if not any(computed.values()):  # on GPUs a trace does not have it
        return {}
    reduce = spans("reduce")
    late = within(within(merged(_waits_for_peers(trace, rank)), reduce), windows)
    taken: list[Interval] = []
    parts = {}
    for part, mine in (
        *computed.items(),
        ("pack", spans("pack", "unpack")),
        ("straggler", late),
        ("communication_exposed", reduce),
    ):
        parts[part] = length(without(mine, taken))
        taken = merged([*taken, *mine])
    parts["overhead"] = length(windows) - length(taken)
    beside = merged(interval for found in computed.values() for interval in found)
    parts["communication_hidden"] = length(within(reduce, beside))
    return {part: seconds / len(steps) for part, seconds in parts.items()}


def _waits_for_peers(trace: Trace, rank: int) -> list[Interval]:
    """Return the intervals from the start of each reduce of this rank until the last rank starts it too."""
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
    """Return a round with its parts compared with those of the same task computing alone (system `single`).

    Computing counts as what it takes alone. hvpipe tells what the rest is: communication, waits, overhead,
    and computing slowed down. For a system that does not tell, the rest is one part. The round is unchanged
    if `alone` does not time all of its computing, as in trainings by epochs.
    """
    if not (round_.ok and alone.ok) or not round_.ranks or round_.case.system == ALONE:
        return round_
    if not tells_computing(alone):
        return round_
    ranks = tuple(
        _rank_against(mine.wall_s, mine, alone.ranks[min(number, len(alone.ranks) - 1)])
        for number, mine in enumerate(round_.ranks)
    )
    return replace(round_, ranks=ranks)


def tells_computing(alone: Round) -> bool:
    """Return whether every rank has a time for each part of computing."""
    return all(part in rank.parts_s for rank in alone.ranks for part in COMPUTE)


def _rank_against(mean_step_s: float, mine: RankRound, alone: RankRound) -> RankRound:
    computing_s = {part: alone.parts_s[part] for part in COMPUTE}
    parts = dict(mine.parts_s)
    if not all(part in parts for part in COMPUTE):
        parts.update(computing_s)
        rest_s = mean_step_s - sum(computing_s.values()) - parts.get("input", 0.0)
        parts["beyond_computing_alone"] = max(0.0, rest_s)
        return replace(mine, parts_s=parts)
    excess_s = {part: max(0.0, parts[part] - computing_s[part]) for part in COMPUTE}
    parts.update({part: parts[part] - excess_s[part] for part in COMPUTE})
    parts["computing_slowed"] = excess_s["backward"] + excess_s["update"]
    # In mode "step" forward waits for weights that still travel: exposed communication.
    waited_s = excess_s["forward"]
    parts["communication_exposed"] = parts.get("communication_exposed", 0.0) + waited_s
    # That communication ran beside the waiting forward, and so was counted as hidden.
    parts["communication_hidden"] = max(0.0, parts.get("communication_hidden", 0.0) - waited_s)
    return replace(mine, parts_s=parts)


def without(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Return what the first intervals cover and the second do not. All are disjoint and in order."""
    left = list(intervals)
    for c, d in taken:
        left = [piece for a, b in left for piece in ((a, min(b, c)), (max(a, d), b)) if piece[0] < piece[1]]
    return left
