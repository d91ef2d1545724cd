"""Ranks that are left after a loss divide a pipeline's state; a step that did not end is taken back."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from hvpipe.keras.checkpoint.inheritance import Held, shares
from hvpipe.keras.pipeline.step_undo import StepUndo

ONCE = "optimizer/_iterations"


def held(*names: str, place: tuple[int, int, int] = (7, 1, 2), trains: bool = True) -> Held:
    return Held(place, trains, frozenset((ONCE, *names)))


def test_each_name_is_written_once() -> None:
    first, second = held("weights/0", "weights/1"), held("weights/1", "optimizer/_momentums/1")
    assert shares([first, second], 2) == [
        {ONCE, "weights/0", "weights/1"},
        {"optimizer/_momentums/1"},
    ]


def test_what_an_optimizer_has_once_comes_from_a_rank_that_trains() -> None:
    found = shares([held("weights/0", trains=False), held("weights/1")], 2)
    assert found == [{"weights/0"}, {ONCE, "weights/1"}]


def test_a_part_of_the_state_is_lost() -> None:
    assert shares([held("weights/0"), held("weights/2")], 3) is None


@pytest.mark.parametrize(
    "other", [held("weights/0", place=(8, 1, 3)), held("weights/0", place=(7, 2, 0)), None]
)
def test_ranks_at_different_places(other: Held | None) -> None:
    assert shares([held("weights/0"), other], 1) is None


def test_a_step_is_taken_back_until_it_is_counted() -> None:
    mean = keras.Variable(np.float32([1, 2]), trainable=False)
    undo = StepUndo([mean])
    undo.begin()
    mean.assign([3, 4])
    undo.undo()
    assert mean.numpy().tolist() == [1, 2]
    undo.begin()
    mean.assign([5, 6])
    undo.updated()
    undo.undo()
    assert (mean.numpy().tolist(), undo.updates) == ([5, 6], 1)
