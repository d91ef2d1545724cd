"""Verification: generated schedules pass on links of any capacity; errors name the rank and action."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hvpipe.errors import HvpipeError
from hvpipe.schedule.action import Action
from hvpipe.schedule.coded import CodedSchedule
from hvpipe.schedule.program import Dataflow, Message, Program, Receive, Send, needs_of, programs
from hvpipe.schedule.schedule import NAMES, Schedule, make_schedule
from hvpipe.schedule.verify import check_links, check_messages, verify

quickly = settings(max_examples=40)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(NAMES))
    ranks = draw(st.integers(1, 5))
    chunks = draw(st.integers(2, 3)) if name == "interleaved" else 1
    return make_schedule(name, ranks, draw(st.integers(ranks if chunks > 1 else 1, 9)), chunks)


def dataflows(stages: int) -> st.SearchStrategy[Dataflow]:
    """Draw any set of edges to later stages, with or without the chain."""
    edges = [(a, b) for b in range(stages) for a in range(b)]
    some = st.lists(st.sampled_from(edges), unique=True) if edges else st.just([])
    return some.map(lambda chosen: Dataflow(stages, tuple(chosen)))


def with_actions(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    lists = list(schedule.actions)
    lists[rank] = tuple(actions)
    return replace(schedule, actions=tuple(lists))


def read(*lines: str) -> Schedule:
    return Schedule.from_text("\n".join(lines))


def shown(program: Program) -> str:
    """Return a program as text: `?0F1` is a receive, `!0F1` a send."""
    marks = {Send: "!", Receive: "?"}
    return " ".join(
        str(s) if isinstance(s, Action) else f"{marks[type(s)]}{s.message.producer}" for s in program
    )


def test_sends_and_receives_worked_out_by_hand() -> None:
    assert [shown(program) for program in verify(make_schedule("1f1b", 2, 2)).programs] == [
        "0F0 !0F0 0F1 !0F1 ?1B0 0B0 ?1B1 0B1",
        "?0F0 ?0F1 1F0 1B0 !1B0 1F1 1B1 !1B1",
    ]


def test_a_skip_connection_is_sent_directly_to_its_user() -> None:
    skip = Dataflow(3, ((0, 1), (0, 2), (1, 2)))
    assert [shown(program) for program in verify(make_schedule("gpipe", 3, 1), skip).programs] == [
        "0F0 !0F0 !0F0 ?2B0 ?1B0 0B0",
        "?0F0 1F0 !1F0 ?2B0 1B0 !1B0",
        "?0F0 ?1F0 2F0 2B0 !2B0 !2B0",
    ]


def test_all_processes_get_the_same_programs() -> None:
    code = (
        "from hvpipe.schedule.program import *; from hvpipe.schedule.schedule import make_schedule\n"
        "s = make_schedule('interleaved', 3, 4, 2)\n"
        "flow = Dataflow(6, ((0, 1), (0, 4), (1, 2), (0, 5), (2, 5)))\n"
        "print(programs(s, needs_of(s, flow)))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert len(printed) == 1


@quickly
@given(st.data(), schedules(), st.integers(0, 3))
def test_every_generated_schedule_passes(data: st.DataObject, schedule: Schedule, capacity: int) -> None:
    verify(schedule, data.draw(dataflows(schedule.stages)), capacity)
    verify(schedule, capacity=1)


@st.composite
def replicated(draw: st.DrawFn) -> Schedule:
    """Draw a schedule: 1 to 5 stages of 1 to 4 ranks, up to 24 micro-batches, equal or unequal shares."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
    ranks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    if draw(st.booleans()):
        return make_schedule(name, ranks, draw(st.integers(max(ranks), 24)))
    share = st.sampled_from([1.0, 0.7, 0.5, 0.25])
    shares = [[draw(share) for _ in range(count)] for count in ranks]
    # Of 14 micro-batches even a rank of share 1/4 beside three of 1 gets one: (0 + 1/2) / (1/4) = 2 < 5 / 1.
    return make_schedule(name, ranks, draw(st.integers(14, 24)), shares=shares)


@settings(quickly, max_examples=150)
@given(st.data(), replicated())
def test_no_schedule_with_replicas_deadlocks(data: st.DataObject, schedule: Schedule) -> None:
    dataflow = data.draw(dataflows(schedule.stages))
    for capacity in (0, 1):
        verify(schedule, capacity=capacity)
        verify(schedule, dataflow, capacity)


@quickly
@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.integers(4, 24),
)
def test_peak_stash_of_replicas(name: str, replicas: list[int], m: int) -> None:
    expected: list[list[int]] = []
    behind = 0  # micro-batches in flight on the later stages
    for stage, count in reversed(list(enumerate(replicas))):
        warmup = math.ceil(behind / count)
        put_off = sum(replicas[:stage]) // count if name == "zb-h1" else 0
        most = m if name == "gpipe" else warmup + 1 + put_off
        expected.insert(0, [min(most, len(range(replica, m, count))) for replica in range(count)])
        behind = (warmup + 1) * count
    assert verify(make_schedule(name, replicas, m)).peak_stash == tuple(chain.from_iterable(expected))


@quickly
@given(st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.integers(1, 8), st.integers(1, 20))
def test_peak_stash(name: str, p: int, m: int) -> None:
    expected = {
        "gpipe": [m] * p,
        "1f1b": [min(m, p - s) for s in range(p)],
        "zb-h1": [min(m, p)] * p,
    }
    assert verify(make_schedule(name, p, m)).peak_stash == tuple(expected[name])


@quickly
@given(st.integers(1, 6), st.integers(0, 12), st.integers(2, 4))
def test_peak_stash_of_interleaved(p: int, more: int, v: int) -> None:
    m = p + more
    group = -(-m // (m // p))
    expected = [min((v - 1) * group + 2 * (p - r) - 1, m * v) for r in range(p)]
    assert verify(make_schedule("interleaved", p, m, v)).peak_stash == tuple(expected)


def test_peak_stash_by_size() -> None:
    assert CodedSchedule.of(make_schedule("1f1b", 3, 4)).peak_stash([100, 10, 1]) == [300, 20, 1]


@quickly
@given(st.data(), schedules())
def test_a_missing_or_repeated_action_is_refused(data: st.DataObject, schedule: Schedule) -> None:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    actions = list(schedule.actions[rank])
    place = data.draw(st.integers(0, len(actions) - 1))
    action = actions[place]
    says = f"Rank {rank} should run .*micro-batch {action.microbatch} on stage {action.stage}. Received: "
    with pytest.raises(HvpipeError, match=says):
        verify(with_actions(schedule, rank, actions[:place] + actions[place + 1 :]))
    again = data.draw(st.integers(0, len(actions)))
    with pytest.raises(HvpipeError, match=f"Rank {rank} should run {action} once. Received: 2 times"):
        verify(with_actions(schedule, rank, [*actions[:again], action, *actions[again:]]))


def can_run(schedule: Schedule) -> bool:
    """Return whether some order runs each action after its inputs and its rank's previous action."""
    before = {action: set(needed) for action, needed in needs_of(schedule).items()}
    for actions in schedule.actions:
        for first, then in pairwise(actions):
            before[then].add(first)
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


@quickly
@given(st.data(), schedules())
def test_swapped_actions_are_refused_only_if_no_order_is_left(
    data: st.DataObject, schedule: Schedule
) -> None:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    actions = list(schedule.actions[rank])
    first, then = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
    assume(first != then)
    actions[first], actions[then] = actions[then], actions[first]
    swapped = with_actions(schedule, rank, actions)
    if can_run(swapped):
        verify(swapped, capacity=0)
    else:
        with pytest.raises(HvpipeError, match=r"Rank \d should run|rank \d at \d+[FBIW]\d+ waits for"):
            verify(swapped)


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (read("F0 B0", "F0"), "Rank 1 should run F and B, or F, I and W, .*on stage 1. Received: F"),
        (read("F0 I0 W0", "F0 I0"), "Rank 1 .* Received: F I"),
        (read("F0 B0 I0 W0"), "Rank 0 .* Received: F B I W"),
        (read("F0 B0 F2 B2"), "micro-batch 1 on stage 0. Received: none"),
        (read("F0 B0 0F1", "F0 B0 0B1"), "Rank 0 should run 0B1. Received: it is on rank 1"),
        (read("0F0 0B0 0F1", "0B1"), "Rank 0 should run 0B1. Received: it is on rank 1"),
        (read("0F0 0B0", "0F0 0B0"), "One rank should run 0F0. Received: ranks 0, 1"),
        (
            read("0F0 0B0", "0F1 0B1 0F2"),
            "Rank 1 should run F and B, .* of micro-batch 2 on stage 0. Received: F",
        ),
        (
            read("0F0 0B0", "0F1 0B1 0F3 0B3"),
            "A rank should run F and B, .* of micro-batch 2 on stage 0.*none",
        ),
        (read("1F0 1B0"), "A rank should run F and B, .* of micro-batch 0 on stage 0. Received: none"),
        (read("B0 F0", "F0 B0"), "Rank 0 should run 0F0 before 0B0. Received: after it"),
        (read("F0 W0 I0"), "Rank 0 should run 0I0 before 0W0"),
        (
            read("F0 F1 B0 B1", "F1 B1 F0 B0", "F0 B0 F1 B1"),
            r"rank 0 at 0B0 waits for 1B0 of rank 1; rank 1 at 1B1 waits for 2B1 of rank 2; "
            "rank 2 at 2F0 waits for 1F0 of rank 1",
        ),
        # On one rank: chunk 1 before chunk 0.
        (read("1F0 0F0 1B0 0B0"), "rank 0 at 1F0 waits for 0F0 of rank 0"),
    ],
)
def test_schedules_broken_by_hand_are_refused(schedule: Schedule, says: str) -> None:
    with pytest.raises(HvpipeError, match=says):
        verify(schedule)


def test_actions_beyond_the_number_of_micro_batches_are_refused() -> None:
    with pytest.raises(HvpipeError, match=r"Rank 0 should run micro-batches below 1 .* Received: 0F1"):
        verify(replace(read("F0 B0 F1 B1"), microbatches=1))


CIRCLE = [Message(Action("F", i, a), Action("F", i, a + 1), a % 2, 1 - a % 2) for a in (0, 1) for i in (0, 1)]


def test_full_links() -> None:
    """Both ranks send two messages before they receive any, so links that hold fewer deadlock."""
    forth0, forth1, back0, back1 = CIRCLE
    made = (
        (Send(forth0), Send(forth1), Receive(back0), Receive(back1)),
        (Send(back0), Send(back1), Receive(forth0), Receive(forth1)),
    )
    check_links(made, capacity=2)
    with pytest.raises(HvpipeError, match=r"hold 1 messages.*rank 0 at the send of 0F1 .*; rank 1 at .* 1F1"):
        check_links(made, capacity=1)


def test_a_rank_that_never_gets_its_message() -> None:
    (forth0, *_) = CIRCLE
    with pytest.raises(HvpipeError, match=r"rank 1 at 1F0, for its messages"):
        check_links(((), (Receive(forth0), forth0.consumer)))


def test_receives_in_another_order_than_the_sends() -> None:
    forth0, forth1, *_ = CIRCLE
    with pytest.raises(HvpipeError, match=r"Rank 1 should receive from rank 0 .* 0F0 for 1F0 .*, where 0F1"):
        check_links(((Send(forth0), Send(forth1)), (Receive(forth1), Receive(forth0))))


def test_programs_that_lack_a_send_or_a_receive() -> None:
    schedule = make_schedule("1f1b", 2, 1)
    needs = needs_of(schedule)
    first, second = programs(schedule, needs)
    check_messages(schedule, needs, (first, second))
    unsent = tuple(step for step in first if not isinstance(step, Send))
    with pytest.raises(HvpipeError, match=r"0F0 for 1F0 \(rank 0 to 1\): sent 0 times, received 1 times"):
        check_messages(schedule, needs, (unsent, second))
    deaf = tuple(step for step in second if not isinstance(step, Receive))
    with pytest.raises(HvpipeError, match=r"Rank 1 should have 0F0 of rank 0 before 1F0. Received: no rece"):
        check_messages(schedule, needs, (first, deaf))
    with pytest.raises(HvpipeError, match=r"sent 2 times"):
        check_messages(schedule, needs, ((*first, first[1]), second))
    with pytest.raises(HvpipeError, match=r"Rank 0 should send its own results. Received: 0F0"):
        check_messages(schedule, needs, ((first[1], first[0], *first[2:]), second))
    with pytest.raises(HvpipeError, match=r"Rank 1's program should run its actions"):
        check_messages(schedule, needs, (first, second[:-2]))


@pytest.mark.parametrize("edges", [((1, 1),), ((2, 1),), ((0, 3),), ((-1, 0),), ((0, 1), (0, 1))])
def test_edges_that_are_no_dataflow(edges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(HvpipeError, match=r"one of 3 stages to a later one. Received: edges="):
        Dataflow(3, edges)


def test_a_dataflow_of_another_model() -> None:
    with pytest.raises(HvpipeError, match=r"the schedule's 3 stages. Received: 4 stages"):
        verify(make_schedule("1f1b", 3, 3), Dataflow.chain(4))


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(HvpipeError, match=r"capacity=-1"):
        verify(make_schedule("1f1b", 2, 2), capacity=-1)
