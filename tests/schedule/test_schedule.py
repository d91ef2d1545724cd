"""Schedules: golden texts worked out by hand, docstring pictures, text and JSON round trips, bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvpipe.errors import HvpipeError
from hvpipe.schedule import algorithms
from hvpipe.schedule.action import Action
from hvpipe.schedule.schedule import NAMES, Schedule, deal, make_schedule

quickly = settings(max_examples=60)


@st.composite
def schedules(draw: st.DrawFn, most_ranks: int = 6, most_microbatches: int = 14) -> Schedule:
    name = draw(st.sampled_from(NAMES))
    ranks = draw(st.integers(1, most_ranks))
    chunks = draw(st.integers(2, 3)) if name == "interleaved" else 1
    least = ranks if name == "interleaved" else 1
    return make_schedule(name, ranks, draw(st.integers(least, most_microbatches)), chunks)


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
        # More stages than micro-batches: the last stage has nothing to run between I and W.
        ("zb-h1", 3, 1, 1, "F0 I0 W0\nF0 I0 W0\nF0 I0 W0\n"),
        # As in Megatron-LM: (chunks - 1) * ranks + 2 * (ranks - rank - 1) warm-up forwards.
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
    assert make_schedule(name, ranks, microbatches, chunks).to_text() == f"{name}:\n{golden}"


@pytest.mark.parametrize(
    ("function", "made"),
    [
        ("gpipe", [make_schedule("gpipe", 3, 4)]),
        (
            "one_f_one_b",
            [
                make_schedule("1f1b", 3, 4),
                make_schedule("1f1b", (2, 1), 6),
                make_schedule("eager-1f1b", 3, 6),
            ],
        ),
        ("zb_h1", [make_schedule("zb-h1", 3, 4)]),
        ("interleaved", [make_schedule("interleaved", 2, 4, 2)]),
    ],
)
def test_the_pictures_in_the_docstrings_are_right(function: str, made: list[Schedule]) -> None:
    pictures = [part for part in getattr(algorithms, function).__doc__.split("\n\n") if " | " in part]
    for picture, schedule in zip(pictures, made, strict=True):
        lines = re.findall(r"(?:stage \d|rank \d|       ) \| (.*)", picture)
        drawn = [re.findall(r"\b\d*[FBIW]\d\b", line) for line in lines]
        assert drawn == [[_label(schedule, action) for action in actions] for actions in schedule.actions]


def _label(schedule: Schedule, action: Action) -> str:
    return str(action) if schedule.name == "interleaved" else f"{action.kind}{action.microbatch}"


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (3, 7), (4, 7), (4, 9), (5, 23), (8, 64)])
def test_interleaved_groups_are_never_smaller_than_the_ranks(ranks: int, microbatches: int) -> None:
    groups = algorithms._groups(ranks, microbatches)
    assert [i for group in groups for i in group] == list(range(microbatches))
    assert ranks <= min(map(len, groups)) <= max(map(len, groups)) <= min(map(len, groups)) + 1


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "golden"),
    [
        ("gpipe", (1, 2), 3, "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F2 1B0 1B2\n1F1 1B1\n"),
        # Stage 1 warms up with ceil(1 x (1 + 0) / 1) = 1, stage 0 with ceil(1 x (1 + 1) / 2) = 1.
        (
            "1f1b",
            (2, 1, 1),
            4,
            "0F0 0F2 0B0 0B2\n0F1 0F3 0B1 0B3\n1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
            "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3\n",
        ),
        # ... and here with ceil(3 x (1 + 0) / 2) = 2.
        (
            "1f1b",
            (2, 3),
            6,
            "0F0 0F2 0F4 0B0 0B2 0B4\n0F1 0F3 0F5 0B1 0B3 0B5\n"
            "1F0 1B0 1F3 1B3\n1F1 1B1 1F4 1B4\n1F2 1B2 1F5 1B5\n",
        ),
        # One rank precedes stage 1: its W's run floor(1 / 2) = 0 micro-batches after its I's, stage 2's 3.
        (
            "zb-h1",
            (1, 2, 1),
            4,
            "0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3\n"
            "1F0 1F2 1I0 1W0 1I2 1W2\n1F1 1F3 1I1 1W1 1I3 1W3\n"
            "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3\n",
        ),
    ],
)
def test_golden_text_with_replicas(name: str, ranks: tuple[int, ...], microbatches: int, golden: str) -> None:
    assert make_schedule(name, ranks, microbatches).to_text() == f"{name}:\n{golden}"


def test_ranks_and_stages_are_looked_up_in_the_schedule() -> None:
    schedule = make_schedule("1f1b", (2, 1, 1), 4)
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (4, 3, 4)
    assert [schedule.ranks_of(stage) for stage in range(3)] == [(0, 1), (2,), (3,)]
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0,), (0,), (1,), (2,)]
    assert [schedule.rank_of(Action("B", i, 0)) for i in range(4)] == [0, 1, 0, 1]
    assert schedule.ranks_of(3) == ()
    with pytest.raises(HvpipeError, match=r"^No rank runs 3F0"):
        schedule.rank_of(Action("F", 0, 3))
    assert make_schedule("interleaved", 2, 2, 3).stages_of(1) == (1, 3, 5)


@pytest.mark.parametrize(
    ("count", "shares", "hands"),
    [
        (5, (1, 1), [(0, 2, 4), (1, 3)]),
        (4, (0.1, 0.1, 0.1), [(0, 3), (1,), (2,)]),
        # (0 + 1/2) / (1/4) = 2 comes before the third micro-batch of the first rank at 5/2.
        (10, (1, 0.25), [(0, 1, 3, 4, 5, 6, 8, 9), (2, 7)]),
        (1, (1, 3), [(), (0,)]),
    ],
)
def test_deal_by_hand(count: int, shares: tuple[float, ...], hands: list[tuple[int, ...]]) -> None:
    assert deal(count, shares) == hands


@quickly
@given(st.integers(0, 40), st.lists(st.sampled_from([0.25, 0.5, 1, 1.5, 3]), min_size=1, max_size=4))
def test_any_number_of_micro_batches_is_dealt_in_proportion(count: int, shares: list[float]) -> None:
    hands = deal(count, shares)
    assert sorted(i for hand in hands for i in hand) == list(range(count))
    for share, hand in zip(shares, hands, strict=True):
        # No rank is ahead of another by a whole micro-batch (Webster's rounding).
        for other, others in zip(shares, hands, strict=True):
            assert not hand or (len(hand) - 0.5) / share <= (len(others) + 0.5) / other


@st.composite
def replicated(draw: st.DrawFn) -> Schedule:
    ranks = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    return make_schedule(draw(st.sampled_from(NAMES[:3])), ranks, draw(st.integers(3, 12)))


@quickly
@given(schedules() | replicated())
def test_text_and_json_round_trip(schedule: Schedule) -> None:
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


def test_a_schedule_is_read_back_from_its_file(tmp_path: Path) -> None:
    make_schedule("zb-h1", (2, 1), 4).write(tmp_path / "schedule.json")
    assert Schedule.read(tmp_path / "schedule.json") == make_schedule("zb-h1", (2, 1), 4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"format": "hvpipe-plan"},
            '"format": "hvpipe-schedule". Received: a plan, with format=.hvpipe-plan.',
        ),
        ({"stages": 0}, "stages should be a whole number of at least 1. Received: stages=0"),
        ({"actions": ["0F0 0B0", "1F0 1G0"]}, r"actions\[1\]: an action should read F0.*Received: '1G0'"),
        ({"actions": ["0F0", ""]}, r"some actions for each rank.*numbers of actions=\[1, 0\]"),
        ({"actions": "0F0"}, "actions should be a list of texts"),
    ],
)
def test_json_that_is_not_a_schedule(change: dict[str, object], says: str) -> None:
    with pytest.raises(HvpipeError, match=says):
        Schedule.from_json(make_schedule("1f1b", 2, 1).to_json() | change)


def test_text_with_comments_blank_lines_and_stages() -> None:
    text = "# mine\n\n0F0 0B0  # rank 0\n  1F0 1I0 1W0\n\n"
    read = Schedule.from_text(text)
    assert (read.name, read.ranks, read.stages, read.microbatches) == ("custom", 2, 2, 1)
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
        (f"F{'0' * 5000}", r"line 1: .*Received: 'F00"),
        ("F0 B-1", r"line 1: .*Received: 'B-1'"),
        ("F0 B0\n1f1b:", r"line 2: .*Received: '1f1b:'"),
        ("", "plan.txt is empty: a schedule should have a line for each rank"),
        ("1f1b:\n# nothing\n", "plan.txt is empty: a schedule should have a line for each rank"),
    ],
)
def test_text_that_is_not_a_schedule(text: str, says: str) -> None:
    with pytest.raises(HvpipeError, match=says):
        Schedule.from_text(text, "plan.txt")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1f2b", 2, 4), r"one of gpipe, 1f1b, eager-1f1b, zb-h1, interleaved. Received: schedule='1f2b'"),
        (("1f1b", 0, 4), "at least one rank.*Received: ranks=0, microbatches=4"),
        (("gpipe", 2, 0), "one micro-batch. Received: ranks=2, microbatches=0"),
        (("1f1b", 2, 4, 2), "need schedule='interleaved'. Received: schedule='1f1b', chunks=2"),
        (("interleaved", 2, 4), "2 or more chunks .* Received: chunks=1"),
        (("interleaved", 4, 3, 2), "as many micro-batches as ranks. Received: microbatches=3, ranks=4"),
        (
            ("interleaved", (2, 1), 4, 2),
            r"zb-h1. Received: schedule='interleaved', ranks=\(2, 1\)",
        ),
        (("1f1b", (2, 0), 4), r"one rank, for each stage, .*Received: ranks=\(2, 0\)"),
        (("1f1b", (), 4), r"Received: ranks=\(\)"),
        (
            ("1f1b", (1, 3), 2),
            "Each rank of stage 1 should .*microbatches=2 for 3 ranks in shares of 1, 1, 1",
        ),
    ],
)
def test_schedules_that_cannot_be_made(arguments: tuple[str, int, int], says: str) -> None:
    with pytest.raises(HvpipeError, match=says):
        make_schedule(*arguments)


@pytest.mark.parametrize("shares", [[(1, 1)], [(1,), (1,)], [(1, 0), (1,)], [(1, float("nan")), (1,)]])
def test_shares_that_do_not_fit(shares: list[tuple[float, ...]]) -> None:
    with pytest.raises(HvpipeError, match=r"above 0 for each of its ranks. Received: ranks=\(2, 1\)"):
        make_schedule("1f1b", (2, 1), 4, shares=shares)


@pytest.mark.parametrize(("kind", "microbatch", "stage"), [("X", 0, 0), ("F", -1, 0), ("B", 0, -1)])
def test_values_that_are_not_an_action(kind: str, microbatch: int, stage: int) -> None:
    with pytest.raises(HvpipeError, match=f"Received: {stage}{kind}{microbatch}"):
        Action(kind, microbatch, stage)


@pytest.mark.parametrize("lists", [(), ((Action("F", 0, 0),), ())])
def test_a_rank_without_actions(lists: tuple[tuple[Action, ...], ...]) -> None:
    with pytest.raises(HvpipeError, match=r"stages=1, microbatches=1, numbers of actions="):
        Schedule("short", 1, 1, lists)
