"""Schedules: golden texts worked out by hand, the pictures in the docstrings, text out and in, bad input."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvpipe import schedule as module
from hvpipe.errors import HvpipeError
from hvpipe.schedule import NAMES, Action, Schedule, make

quickly = settings(deadline=None, max_examples=60, derandomize=True)


@st.composite
def schedules(draw: st.DrawFn, most_ranks: int = 6, most_microbatches: int = 14) -> Schedule:
    name = draw(st.sampled_from(NAMES))
    ranks = draw(st.integers(1, most_ranks))
    chunks = draw(st.integers(2, 3)) if name == "interleaved" else 1
    least = ranks if name == "interleaved" else 1
    return make(name, ranks, draw(st.integers(least, most_microbatches)), chunks)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "chunks", "golden"),
    [
        ("gpipe", 2, 3, 1, "F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2\n"),
        ("gpipe", 1, 2, 1, "F0 F1 B0 B1\n"),
        ("1f1b", 1, 2, 1, "F0 B0 F1 B1\n"),
        ("1f1b", 2, 3, 1, "F0 F1 B0 F2 B1 B2\nF0 B0 F1 B1 F2 B2\n"),
        # Fewer micro-batches than stages: the first two stages never alternate.
        ("1f1b", 4, 2, 1, "F0 F1 B0 B1\nF0 F1 B0 B1\nF0 F1 B0 B1\nF0 B0 F1 B1\n"),
        ("zb-h1", 1, 2, 1, "F0 I0 W0 F1 I1 W1\n"),
        ("zb-h1", 2, 3, 1, "F0 F1 I0 W0 F2 I1 W1 I2 W2\nF0 I0 F1 I1 W0 F2 I2 W1 W2\n"),
        # More stages than micro-batches: the last stage has nothing to put between its W's.
        ("zb-h1", 3, 1, 1, "F0 I0 W0\nF0 I0 W0\nF0 I0 W0\n"),
        # As Megatron-LM has it: (chunks - 1) ranks + 2 (ranks - rank - 1) forwards to warm up.
        (
            "interleaved",
            2,
            2,
            2,
            "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1\n",
        ),
        # Five micro-batches on two ranks: groups of three and two.
        (
            "interleaved",
            2,
            5,
            2,
            "0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4\n"
            "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4\n",
        ),
    ],
)
def test_golden_text(name: str, ranks: int, microbatches: int, chunks: int, golden: str) -> None:
    assert make(name, ranks, microbatches, chunks).to_text() == f"{name}:\n{golden}"


@pytest.mark.parametrize(
    ("function", "made"),
    [
        ("gpipe", make("gpipe", 3, 4)),
        ("one_f_one_b", make("1f1b", 3, 4)),
        ("zb_h1", make("zb-h1", 3, 4)),
        ("interleaved", make("interleaved", 2, 4, 2)),
    ],
)
def test_the_picture_in_the_docstring_is_true(function: str, made: Schedule) -> None:
    doc = getattr(module, function).__doc__
    lines = re.findall(r"(?:stage|rank) \d \| (.*)", doc)
    drawn = [" ".join(re.findall(r"\b\d*[FBIW]\d\b", line)) for line in lines]
    assert f"{made.name}:\n" + "\n".join(drawn) + "\n" == made.to_text()


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (3, 7), (4, 7), (4, 9), (5, 23), (8, 64)])
def test_interleaved_groups_are_never_smaller_than_the_ranks(ranks: int, microbatches: int) -> None:
    groups = module._groups(ranks, microbatches)
    assert [i for group in groups for i in group] == list(range(microbatches))
    assert ranks <= min(map(len, groups)) <= max(map(len, groups)) <= min(map(len, groups)) + 1


@quickly
@given(schedules())
def test_text_out_and_in(schedule: Schedule) -> None:
    assert Schedule.from_text(schedule.to_text()) == schedule


def test_text_with_comments_blank_lines_and_stages() -> None:
    text = "# mine\n\n0F0 0B0  # rank 0\n  1F0 1I0 1W0\n\n"
    read = Schedule.from_text(text)
    assert (read.name, read.ranks, read.microbatches, read.chunks) == ("custom", 2, 1, 1)
    assert read.actions == (
        (Action("F", 0, 0), Action("B", 0, 0)),
        (Action("F", 0, 1), Action("I", 0, 1), Action("W", 0, 1)),
    )


def test_a_name_of_several_words() -> None:
    assert Schedule.from_text("my own one:\nF0 B0\n").name == "my own one"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("F0 B0\nF0 G0", r"plan.txt, line 2: an action should read F0.*Received: 'G0'"),
        ("1f1b:\n\nF0 b0", r"plan.txt, line 3: .*Received: 'b0'"),
        ("F0 F B0", r"line 1: .*Received: 'F'"),
        ("F0 B-1", r"line 1: .*Received: 'B-1'"),
        ("F0 B0\n1f1b:", r"line 2: .*Received: '1f1b:'"),
        ("", "a line for each rank. Received: plan.txt: none"),
        ("1f1b:\n# nothing\n", "a line for each rank. Received: plan.txt: none"),
    ],
)
def test_text_that_is_no_schedule(text: str, says: str) -> None:
    with pytest.raises(HvpipeError, match=says):
        Schedule.from_text(text, "plan.txt")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1f2b", 2, 4), r"one of gpipe, 1f1b, zb-h1, interleaved. Received: schedule='1f2b'"),
        (("1f1b", 0, 4), "at least one rank.*Received: ranks=0, microbatches=4"),
        (("gpipe", 2, 0), "one micro-batch. Received: ranks=2, microbatches=0"),
        (("1f1b", 2, 4, 2), "need schedule='interleaved'. Received: schedule='1f1b', chunks=2"),
        (("interleaved", 2, 4), "2 or more chunks .* Received: chunks=1"),
        (("interleaved", 4, 3, 2), "as many micro-batches as ranks. Received: microbatches=3, ranks=4"),
    ],
)
def test_schedules_that_cannot_be_made(arguments: tuple[str, int, int], says: str) -> None:
    with pytest.raises(HvpipeError, match=says):
        make(*arguments)


@pytest.mark.parametrize(("kind", "microbatch", "stage"), [("X", 0, 0), ("F", -1, 0), ("B", 0, -1)])
def test_no_action(kind: str, microbatch: int, stage: int) -> None:
    with pytest.raises(HvpipeError, match=f"Received: {stage}{kind}{microbatch}"):
        Action(kind, microbatch, stage)


def test_a_schedule_with_a_list_too_few() -> None:
    with pytest.raises(HvpipeError, match="ranks=2, microbatches=1, chunks=1, 1 lists"):
        Schedule("short", 2, 1, 1, ((Action("F", 0, 0),),))
