"""Finds when a rank computed, according to its trace, without the time that it waited for communication."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from statistics import median

from hvpipe.trace.events import Event, Trace

Interval = tuple[float, float]

WHOLE_FORWARD = "forward"  # in a data-parallel step; a pipeline's forwards have the names of their actions


def computing(trace: Trace, rank: int) -> dict[str, list[Interval]]:
    """Return when this rank computed, by category, as disjoint intervals in order.

    Update: the trace has the update's end, and the end of its bucket's reduction. In between the update may
    have waited for the next step or for other buckets. So it counts from the last event before its end that
    it may have waited for.

    Forward: it may wait for weights that still travel. Its time beyond that of a forward without a concurrent
    reduce counts as waiting, but only while a reduce was under way, up to the end of the last reduce.

    reduce    |  ######
    forward   |#########      4 without a reduce: it waited 5
    computing |###     #
    """
    reduces = union(trace.of("reduce", rank))
    return {
        "forward": _forwards(trace.of("forward", rank), reduces),
        "backward": union(trace.of("backward", rank)),
        "update": _updates(trace, rank),
    }


def union(events: Iterable[Event]) -> list[Interval]:
    """Return the time that at least one event covers, as disjoint intervals in order."""
    return merged((event.start_s, event.end_s) for event in events)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the time that at least one interval covers, as disjoint intervals in order."""
    found: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if found and start_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_s))
        else:
            found.append((start_s, end_s))
    return found


def within(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """Return the time that both cover; each argument is disjoint and in order."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start_s, end_s = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start_s < end_s:
            found.append((start_s, end_s))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the seconds that disjoint intervals cover."""
    return sum(end_s - start_s for start_s, end_s in intervals)


def _updates(trace: Trace, rank: int) -> list[Interval]:
    awaited = [event.end_s for what in ("pack", "reduce", "unpack") for event in trace.of(what, rank)]
    awaited += [step.start_s for step in trace.of("step", rank)]
    updates = trace.of("update", rank)
    awaited = sorted([*awaited, *(update.end_s for update in updates)])
    found = []
    for update in updates:
        place = bisect_left(awaited, update.end_s)
        found.append((max(update.start_s, awaited[place - 1]) if place else update.start_s, update.end_s))
    return merged(found)


def _forwards(forwards: Sequence[Event], reduces: Sequence[Interval]) -> list[Interval]:
    whole = [event for event in forwards if event.name == WHOLE_FORWARD]
    found = [(event.start_s, event.end_s) for event in forwards if event.name != WHOLE_FORWARD]
    if not whole:
        return merged(found)
    starts, ends = [start_s for start_s, _ in reduces], [end_s for _, end_s in reduces]
    beside = []
    for event in whole:
        near = reduces[bisect_left(ends, event.start_s) : bisect_left(starts, event.end_s)]
        beside.append(within([(event.start_s, event.end_s)], near))
    alone_s = _alone_s(whole, beside)
    for event, reducing in zip(whole, beside, strict=True):
        found += _without_waiting((event.start_s, event.end_s), reducing, event.duration_s - alone_s)
    return merged(found)


def _alone_s(forwards: Sequence[Event], beside: Sequence[Sequence[Interval]]) -> float:
    """Return the median seconds of forwards without a reduce beside them, or else of the shortest forward.

    The first forward is slow and does not count.
    """
    alone = [event.duration_s for event, reducing in zip(forwards, beside, strict=True) if not reducing]
    later = alone[1:] if not beside[0] else alone
    return median(later) if later else min(event.duration_s for event in forwards)


def _without_waiting(forward: Interval, reducing: Sequence[Interval], waited_s: float) -> list[Interval]:
    """Return a forward without the last `waited_s` seconds that had a reduce beside them."""
    start_s, end_s = forward
    found = []
    for begin_s, done_s in reversed(reducing):
        if waited_s <= 0:
            break
        wait_s = min(waited_s, done_s - begin_s)
        found.append((done_s, end_s))
        end_s = done_s - wait_s
        waited_s -= wait_s
    return [(a, b) for a, b in [*found, (start_s, end_s)] if a < b]
