"""Turning a rank's records into a timeline, with the expected spans worked out by hand."""

from __future__ import annotations

from hvpipe.trace.events import Event, Trace
from hvpipe.trace.run_report import hidden_share
from hvpipe.trace.timeline import Raw, events_of_rank


def mark(name: str, at_s: float) -> Raw:
    return ("mark", name, at_s, at_s)


def spans(events: list[Event], category: str) -> list[tuple[str, float, float]]:
    return [(e.name, e.start_s, e.end_s) for e in events if e.category == category]


# Two steps of "step": bucket b is packed before bucket a, and both are updated in the next step.
#
#   0    1    2    3    4    5    6    7    8    9   10   11   12
#   step 0                             step 1
#   forward   |backward                forward   |backward
#                  pack b    pack a                   pack b  a
#                  reduce b......
#                            reduce a.....
#                                      update a  b
TWO_STEPS = [
    mark("step", 0.0),
    mark("forward", 2.0),
    ("pack", "b", 3.0, 3.5),
    ("wait", "b", 3.5, 3.6),
    ("reduce", "b", 3.6, 5.0),
    ("pack", "a", 5.0, 5.5),
    ("wait", "a", 5.5, 5.5),
    ("reduce", "a", 5.5, 6.5),
    mark("step", 7.0),
    ("unpack", "a", 7.0, 7.1),
    mark("update a", 7.3),
    ("unpack", "b", 7.4, 7.5),
    mark("update b", 8.0),
    mark("forward", 9.0),
    ("pack", "b", 10.0, 10.4),
    ("pack", "a", 11.0, 11.4),
    ("reduce", "a", 11.4, 12.0),
]


def test_a_step_runs_to_the_next_and_the_last_to_the_end() -> None:
    events = events_of_rank(TWO_STEPS, 3)
    assert spans(events, "step") == [("step 0", 0.0, 7.0), ("step 1", 7.0, 12.0)]
    assert {event.rank for event in events} == {3}


def test_forward_runs_from_the_step_to_the_loss() -> None:
    assert spans(events_of_rank(TWO_STEPS, 0), "forward") == [("forward", 0.0, 2.0), ("forward", 7.0, 9.0)]


def test_backward_runs_from_the_loss_to_the_last_pack_of_its_step() -> None:
    found = spans(events_of_rank(TWO_STEPS, 0), "backward")
    assert found == [("backward", 2.0, 5.5), ("backward", 9.0, 11.4)]


def test_an_update_runs_from_the_unpack_of_its_bucket() -> None:
    assert spans(events_of_rank(TWO_STEPS, 0), "update") == [("a", 7.1, 7.3), ("b", 7.5, 8.0)]


def test_spans_that_the_engine_measured_are_kept() -> None:
    events = events_of_rank(TWO_STEPS, 0)
    for category in ("pack", "wait", "reduce", "unpack"):
        told = [(n, s, e) for c, n, s, e in TWO_STEPS if c == category]
        assert spans(events, category) == told


def test_overlapping_spans_are_in_separate_lanes() -> None:
    lanes = {event.category: event.lane for event in events_of_rank(TWO_STEPS, 0)}
    assert lanes["forward"] == lanes["backward"] == "compute"
    assert len({lanes[c] for c in ("step", "forward", "wait", "reduce", "pack", "unpack", "update")}) == 7


def test_events_are_ordered_by_start() -> None:
    events = events_of_rank(TWO_STEPS[::-1], 0)
    assert [e.start_s for e in events] == sorted(e.start_s for e in events)
    assert spans(events, "backward") == [("backward", 2.0, 5.5), ("backward", 9.0, 11.4)]


def test_a_pack_as_the_last_record_still_ends_backward() -> None:
    raw = [mark("step", 0.0), mark("forward", 1.0), ("pack", "a", 2.0, 3.0)]
    assert spans(events_of_rank(raw, 0), "backward") == [("backward", 1.0, 3.0)]


def test_a_step_begins_with_its_batch_even_if_the_engine_is_notified_after_the_loss() -> None:
    raw = [
        *(mark("begin", 0.0), mark("forward", 1.0), mark("step", 1.1), ("pack", "a", 2.0, 3.0)),
        *(mark("begin", 4.0), mark("forward", 5.0), mark("step", 5.1), ("pack", "a", 6.0, 7.0)),
    ]
    events = events_of_rank(raw, 0)
    assert spans(events, "step") == [("step 0", 0.0, 4.0), ("step 1", 4.0, 7.0)]
    assert spans(events, "forward") == [("forward", 0.0, 1.0), ("forward", 4.0, 5.0)]
    assert spans(events, "backward") == [("backward", 1.0, 3.0), ("backward", 5.0, 7.0)]


def test_a_step_without_packs_has_no_backward() -> None:
    # For example the second step of gradient accumulation, which sends nothing.
    raw = [
        mark("step", 0.0),
        mark("forward", 1.0),
        ("pack", "a", 2.0, 3.0),
        mark("step", 4.0),
        mark("forward", 5.0),
        mark("step", 6.0),
    ]
    assert spans(events_of_rank(raw, 0), "backward") == [("backward", 1.0, 3.0)]


def test_updates_of_a_bucket_belong_to_the_last_unpack_before_them() -> None:
    raw = [
        ("unpack", "a", 1.0, 1.5),
        mark("update a", 2.0),
        ("unpack", "a", 3.0, 3.5),
        mark("update a", 4.0),
    ]
    assert spans(events_of_rank(raw, 0), "update") == [("a", 1.5, 2.0), ("a", 3.5, 4.0)]


def test_marks_without_their_counterpart_are_skipped() -> None:
    # An update without its unpack, a loss before any step: the recording began in between.
    raw = [mark("update a", 0.5), mark("forward", 1.0), mark("something else", 2.0), mark("step", 3.0)]
    assert [e.category for e in events_of_rank(raw, 0)] == ["step"]


def test_gradients_that_stay_on_a_gpu_give_no_computing_spans() -> None:
    # The CPU packs nothing. Marks give the time at which the preceding work was enqueued, not done.
    raw = [
        mark("step", 0.0),
        mark("forward", 0.1),
        ("wait", "a", 0.2, 0.3),
        ("reduce", "a", 0.3, 0.9),
        mark("update a", 1.1),
        mark("step", 1.2),
        ("reduce", "a", 1.3, 1.9),
    ]
    events = events_of_rank(raw, 0)
    assert spans(events, "step") == [("step 0", 0.0, 1.2), ("step 1", 1.2, 1.9)]
    assert spans(events, "reduce") == [("a", 0.3, 0.9), ("a", 1.3, 1.9)]
    assert {event.category for event in events} == {"step", "wait", "reduce"}
    assert hidden_share(Trace(tuple(events))) is None


def test_nothing_recorded() -> None:
    assert events_of_rank([], 0) == []


def test_actions_and_transfers_of_a_pipeline_have_their_own_spans() -> None:
    raw = [
        ("step", "training step", 0.0, 4.0),
        ("forward", "0F0", 0.5, 1.0),
        ("transfer", "0F0 for 1F0", 1.0, 1.5),
        ("backward", "0B0", 2.0, 3.0),
    ]
    found = [(e.name, e.category, e.lane) for e in events_of_rank(raw, 1)]
    assert found == [
        ("training step", "step", "steps"),
        ("0F0", "forward", "compute"),
        ("0F0 for 1F0", "transfer", "transfer"),
        ("0B0", "backward", "compute"),
    ]
