"""Computing time as opposed to waiting time, on traces written by hand."""

from __future__ import annotations

import pytest

from hvpipe.trace.computing_time import computing, length, union, within
from hvpipe.trace.events import Event, Trace
from hvpipe.trace.run_report import hidden_share


def event(category: str, start_s: float, end_s: float, name: str | None = None) -> Event:
    return Event(name or category, category, 0, category, start_s, end_s)


def test_union_of_nested_touching_and_separate_intervals() -> None:
    events = [
        event("pack", 5, 6),
        event("pack", 0, 4),
        event("pack", 1, 2),
        event("pack", 4, 5),
        event("pack", 8, 9),
    ]
    assert union(events) == [(0, 6), (8, 9)]
    assert union([]) == []


def test_the_intersection_of_two_lists() -> None:
    assert within([(0, 2), (3, 6)], [(1, 4), (5, 9)]) == [(1, 2), (3, 4), (5, 6)]
    assert within([(0, 1)], [(1, 2)]) == []


# step 0                        step 1
# forward 0..3   backward 3..6  forward 6..9
# pack         5      6
# reduce a      5..5.5
# reduce b             6..6.5
# update a      5.5           7       starts when the next step does, after b's reduce
# update b                6.5    7.2
PUT_OFF = (
    event("step", 0, 6),
    event("step", 6, 12),
    event("forward", 0, 3),
    event("backward", 3, 6),
    event("pack", 4.9, 5, "a"),
    event("pack", 5.9, 6, "b"),
    event("reduce", 5, 5.5, "a"),
    event("reduce", 6, 6.5, "b"),
    event("update", 5.5, 7, "a"),
    event("update", 6.5, 7.2, "b"),
)


def test_an_update_counts_from_the_last_event_it_may_have_waited_for() -> None:
    assert computing(Trace(PUT_OFF), 0)["update"] == [(6.5, 7.2)]
    assert hidden_share(Trace(PUT_OFF)) == pytest.approx(0.5)  # a's reduce, during backward


def test_an_update_overlaps_the_next_buckets_reduce() -> None:
    # backward | 0####4                     hidden: 5..6 of 4..8
    # reduce   |      4 a 5  5  b   8
    # update   |           5 a 6     8 b 9
    trace = Trace(
        (
            event("backward", 0, 4),
            event("reduce", 4, 5, "a"),
            event("reduce", 5, 8, "b"),
            event("update", 5, 6, "a"),
            event("update", 8, 9, "b"),
        )
    )
    assert computing(trace, 0)["update"] == [(5, 6), (8, 9)]
    assert hidden_share(trace) == pytest.approx(0.25)


def test_the_first_update_of_a_trace_has_no_known_wait() -> None:
    assert computing(Trace((event("update", 1, 2),)), 0)["update"] == [(1, 2)]


def test_a_forward_counts_without_its_wait_for_weights() -> None:
    # A forward alone takes 2 s (20..22). The one at 10 takes 7 s and overlaps 3.5 + 2 s of reduces:
    # it waited for the last 5 s of these.
    trace = Trace(
        (
            event("forward", 0, 4),  # slow start
            event("forward", 20, 22),
            event("forward", 10, 17),
            event("reduce", 9, 13.5),
            event("reduce", 14, 16),
        )
    )
    assert computing(trace, 0)["forward"] == [(0, 4), (10, 10.5), (13.5, 14), (16, 17), (20, 22)]
    assert hidden_share(trace) == pytest.approx(0.5 / 6.5)


def test_a_forward_waits_at_most_as_long_as_the_reduces() -> None:
    trace = Trace(
        (event("forward", 0, 1), event("forward", 2, 3), event("forward", 4, 9), event("reduce", 5, 6))
    )
    assert computing(trace, 0)["forward"] == [(0, 1), (2, 3), (4, 5), (6, 9)]


def test_if_every_forward_overlaps_a_reduce_the_shortest_is_the_reference() -> None:
    trace = Trace((event("forward", 0, 2), event("forward", 4, 7), event("reduce", 1, 6)))
    assert computing(trace, 0)["forward"] == [(0, 2), (4, 5), (6, 7)]


def test_the_forwards_of_a_pipeline_wait_for_nothing() -> None:
    trace = Trace(
        (
            event("forward", 0, 1, "F0"),
            event("forward", 1, 4, "F1"),
            event("reduce", 2, 4),
            event("step", 0, 9),
        )
    )
    found = computing(trace, 0)
    assert found["forward"] == [(0, 4)]
    assert length(found["forward"]) == 4
