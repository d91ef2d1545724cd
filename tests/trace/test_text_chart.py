"""Charts of steps as text."""

from __future__ import annotations

import pytest

from hvpipe.errors import HvpipeError
from hvpipe.forecast.simulate import StageTimes, simulate
from hvpipe.schedule.schedule import make_schedule
from hvpipe.trace.events import Event, Trace
from hvpipe.trace.text_chart import draw


def test_drawing() -> None:
    foreseen = simulate(make_schedule("1f1b", 2, 3), [StageTimes(1, 2)] * 2)
    assert draw(foreseen.trace, columns=36).splitlines() == [
        "rank 0 | F0 F1 ......B0--- F2 B1--- ...B2---",
        "rank 1 | ...F0 B0--- F1 B1--- F2 B2--- ......",
    ]


def test_drawing_with_chunks() -> None:
    foreseen = simulate(make_schedule("interleaved", 2, 2, 2), [StageTimes(1, 1)] * 4)
    assert draw(foreseen.trace, columns=40).splitlines() == [
        "rank 0 | 0F0 0F1 2F0 2F1 ....2B0 ....2B1 0B0 0B1",
        "rank 1 | ....1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 ....",
    ]


def test_drawing_an_action_too_short_for_its_label() -> None:
    trace = simulate(make_schedule("1f1b", 1, 1), [StageTimes(1, 9)]).trace
    assert draw(trace, columns=10) == "rank 0 | FB0------\n"


@pytest.mark.parametrize("trace", [Trace(), Trace((Event("x", "step", 0, "engine", 0.0, 1.0),))])
def test_drawing_nothing(trace: Trace) -> None:
    with pytest.raises(HvpipeError, match=r"events in lane 'compute'. Received: columns=100, 0 events"):
        draw(trace)


def test_drawing_replicas_names_the_stages() -> None:
    foreseen = simulate(make_schedule("1f1b", (2, 1), 2), [StageTimes(2, 2), StageTimes(1, 1)])
    assert draw(foreseen.trace, columns=32).splitlines() == [
        "rank 0 | 0F0---- ........0B0---- ........",
        "rank 1 | 0F1---- ................0B1----",
        "rank 2 | ........1F0 1B0 1F1 1B1 ........",
    ]


def test_drawing_updates_still_leaves_the_stages_out() -> None:
    """Regression: with an update, as in a forecast from a measured profile, labels were 0F0 and 1F0."""
    foreseen = simulate(make_schedule("1f1b", 2, 1), [StageTimes(1, 2)] * 2)
    update = Event("update", "update", 1, "compute", 4.0, 5.0, {"kind": "U"})
    trace = Trace((*foreseen.trace.events, update))
    assert draw(trace, columns=24).splitlines() == [
        "rank 0 | F0- ............B0-----",
        "rank 1 | ....F0- B0----- upda....",
    ]
