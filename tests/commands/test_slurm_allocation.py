"""What Slurm says of an allocation."""

from __future__ import annotations

import pytest

from hvpipe.commands.slurm import slots


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("2(x2)", (2, 2)),
        ("2(x3),1", (2, 2, 2, 1)),
        ("4", (4,)),
        ("", ()),
        ("two", ()),
    ],
)
def test_the_tasks_of_each_node(text: str, found: tuple[int, ...]) -> None:
    assert slots({"SLURM_TASKS_PER_NODE": text}) == found
    assert slots({}) == ()
