"""When a rank computed, told from its trace: what only waited for communication is left out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from statistics import median

from hvpipe.trace.events import Event, Trace

COMPUTE = ("forward", "backward", "update")
"""Categories of the trace that computing can hide communication behind."""

Interval = tuple[float, float]

_WHOLE_FORWARD = "forward"  # of a data parallel step; a pipeline's forwards are named by their actions


def computing(trace: Trace, rank: int) -> dict[str, list[Interval]]:
    """By category of COMPUTE, when this rank computed; disjoint intervals in order.

    Of an update a trace knows its end and when its bucket had been reduced: in between it may have waited for
    the next step or for other buckets. It counts from the last thing before its end that it may have waited
    for. A forward waits for weights on their way: what it takes beyond a forward beside which nothing was
    reduced counts as waiting, as far as there was a reduce, up to the end of the last one.

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
    """The time that at least one of the events covers, as disjoint intervals in order."""
    return merged((event.start_s, event.end_s) for event in events)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that at least one covers, as disjoint intervals in order."""
    found: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if found and start_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_s))
        else:
            found.append((start_s, end_s))
    return found


def within(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """What both cover; each disjoint and in order."""
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
    """Seconds that disjoint intervals cover."""
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
    whole = [event for event in forwards if event.name == _WHOLE_FORWARD]
    found = [(event.start_s, event.end_s) for event in forwards if event.name != _WHOLE_FORWARD]
    if not whole:
        return merged(found)
    beside = [within([(event.start_s, event.end_s)], reduces) for event in whole]
    alone_s = _alone_s(whole, beside)
    for event, reducing in zip(whole, beside, strict=True):
        found += _without_waiting((event.start_s, event.end_s), reducing, event.duration_s - alone_s)
    return merged(found)


def _alone_s(forwards: Sequence[Event], beside: Sequence[Sequence[Interval]]) -> float:
    """What a forward takes beside no reduce, the slow first one left out; else what the shortest takes."""
    alone = [event.duration_s for event, reducing in zip(forwards, beside, strict=True) if not reducing]
    later = alone[1:] if not beside[0] else alone
    return median(later) if later else min(event.duration_s for event in forwards)


def _without_waiting(forward: Interval, reducing: Sequence[Interval], waited_s: float) -> list[Interval]:
    """A forward less the last `waited_s` of the time in which there was a reduce beside it."""
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
