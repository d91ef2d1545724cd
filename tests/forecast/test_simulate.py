"""Simulated steps: closed forms, cases worked out by hand, transfers, the lower bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvpipe.errors import HvpipeError
from hvpipe.forecast.lower_bound import lower_bound_s
from hvpipe.forecast.simulate import Contention, StageTimes, links, ports, simulate
from hvpipe.schedule.program import Dataflow
from hvpipe.schedule.schedule import NAMES, Schedule, make_schedule
from hvpipe.trace.events import CATEGORIES, Trace

quickly = settings(max_examples=25)

# p in 2..8, m in p..64. Times are whole seconds, so that sums are exact.
seconds = st.integers(1, 9)
sizes = st.integers(2, 8).flatmap(lambda p: st.tuples(st.just(p), st.integers(p, 64)))


def makespan(name: str, p: int, m: int, cost: StageTimes, chunks: int = 1) -> float:
    schedule = make_schedule(name, p, m, chunks)
    costs = [cost] * schedule.stages
    foreseen = simulate(schedule, costs)
    bound_s = lower_bound_s(schedule, costs)
    assert foreseen.makespan_s >= bound_s
    if name != "zb-h1":  # zb-h1 could be shorter with a larger stash
        assert foreseen.makespan_s == bound_s
    return foreseen.makespan_s


@quickly
@given(st.sampled_from(["gpipe", "1f1b"]), sizes, seconds, seconds)
def test_closed_form_of_gpipe_and_1f1b(name: str, size: tuple[int, int], f: int, b: int) -> None:
    p, m = size
    assert makespan(name, p, m, StageTimes(f, b)) == (m + p - 1) * (f + b)


@quickly
@given(sizes, seconds, seconds, st.integers(2, 4))
def test_closed_form_of_interleaved(size: tuple[int, int], f: int, b: int, v: int) -> None:
    """f and b are the times of one chunk. The formula also holds if p does not divide m."""
    p, m = size
    assert makespan("interleaved", p, m, StageTimes(f, b), v) == m * v * (f + b) + (p - 1) * (f + b)


@quickly
@given(sizes, seconds, seconds, seconds)
def test_closed_form_of_zb_h1(size: tuple[int, int], f: int, i: int, w: int) -> None:
    """The bubble is (p - 1) (F + I - W) if W <= min(F, I), and (p - 1) max(F, I) otherwise."""
    p, m = size
    expected = m * (f + i + w) + (p - 1) * max(f, i, f + i - w)
    assert makespan("zb-h1", p, m, StageTimes(f, i + w, w)) == expected
    if w <= min(f, i):
        assert expected == m * (f + i + w) + (p - 1) * (f + i - w)


@pytest.mark.parametrize("p", range(2, 9))
@pytest.mark.parametrize("m", [8, 9, 15])
def test_equal_parts(p: int, m: int) -> None:
    """F = I = W = 1, B = 2: the bubbles given in the papers."""
    whole = StageTimes(1, 2, 1)
    assert makespan("gpipe", p, m, whole) == makespan("1f1b", p, m, whole) == 3 * m + 3 * (p - 1)
    assert makespan("interleaved", p, m, whole, 2) == 6 * m + 3 * (p - 1)
    assert makespan("zb-h1", p, m, whole) == 3 * m + p - 1


@quickly
@given(sizes, seconds, seconds, st.integers(1, 3))
def test_equal_replicas_of_every_stage_match_that_many_pipelines(
    size: tuple[int, int], f: int, b: int, replicas: int
) -> None:
    p, m = size
    schedule = make_schedule("1f1b", (replicas,) * p, m * replicas)
    assert simulate(schedule, [StageTimes(f, b)] * p).makespan_s == (m + p - 1) * (f + b)


def test_two_replicas_of_a_stage_that_takes_twice_as_long() -> None:
    """Ranks 0 and 1 take turns; in between, rank 2 is never idle. In steady state all ranks are equally busy.

    rank 0 | 0F0--- 0F2--- ......0B0--- 0F4--- ...
    rank 1 | 0F1--- 0F3--- .........0B1--- ...
    rank 2 | ......1F0 1B0 1F1 1B1 ...
    """
    schedule = make_schedule("1f1b", (2, 1), 8)
    foreseen = simulate(schedule, [StageTimes(2, 2), StageTimes(1, 1)])
    assert foreseen.busy_s == (16, 16, 16)
    # Head 2 s, eight micro-batches of 2 s each, tail 2 s.
    assert foreseen.makespan_s == lower_bound_s(schedule, [StageTimes(2, 2), StageTimes(1, 1)]) == 20


@pytest.mark.parametrize("replicas", [(1, 4, 1), (1, 4), (4, 1), (2, 1, 4, 1), (3, 1, 2), (2, 3)])
@pytest.mark.parametrize("name", NAMES[:3])
def test_stages_balanced_by_replicas_stay_busy(name: str, replicas: tuple[int, ...]) -> None:
    """Each stage takes as many seconds as it has ranks. Regression: (1, 4, 1) took 2.2 times as long."""
    schedule = make_schedule(name, replicas, 48)
    costs = [StageTimes(count, 2 * count, count) for count in replicas]
    assert simulate(schedule, costs).makespan_s <= 1.12 * lower_bound_s(schedule, costs)


def test_replicas_of_unequal_speed() -> None:
    """The ranks take 1 s and 2 s and get shares 2 : 1, so both compute equally long."""
    schedule = make_schedule("gpipe", (2,), 6, shares=[(2, 1)])
    foreseen = simulate(schedule, [[StageTimes(1, 2), StageTimes(2, 4)]])
    assert foreseen.busy_s == (12, 12)
    assert foreseen.makespan_s == 12


def test_each_pair_of_replicas_has_its_own_transfer_time() -> None:
    """Micro-batch 0 goes from rank 0 to 2 in 3 s, micro-batch 1 from rank 1 to 3 in 5 s, gradients in 1 s."""
    costs = [
        [StageTimes(1, 1, None, {1: (3, 9)}, {1: 1}), StageTimes(1, 1, None, {1: (9, 5)}, {1: (9, 1)})],
        StageTimes(1, 1),
    ]
    schedule = make_schedule("1f1b", (2, 2), 2)
    foreseen = simulate(schedule, costs)
    assert [(e.name, e.rank, e.start_s, e.end_s) for e in foreseen.trace.of("transfer")] == [
        ("0F0 to rank 2", 0, 1, 4),
        ("0F1 to rank 3", 1, 1, 6),
        ("1B0 to rank 0", 2, 6, 7),
        ("1B1 to rank 1", 3, 8, 9),
    ]
    assert foreseen.makespan_s == 10
    # The fastest transfers take 3 s forward and 1 s back. Between them are 2 s of computing, 1 s at each end.
    assert lower_bound_s(schedule, costs) == 1 + 3 + 2 + 1 + 1


@quickly
@given(
    st.data(),
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
def test_no_step_with_replicas_beats_the_lower_bound(
    data: st.DataObject, name: str, replicas: list[int]
) -> None:
    schedule = make_schedule(name, replicas, data.draw(st.integers(3, 12)))
    time = st.integers(0, 9)
    costs = []
    for stage, count in enumerate(replicas):
        of_ranks = []
        for _ in range(count):
            f, i, w = data.draw(st.tuples(time, time, time))
            ways_s = [data.draw(time) for _ in range((*replicas, 0)[stage + 1])]
            of_ranks.append(StageTimes(f, i + w, w, {stage + 1: ways_s}))
        costs.append(of_ranks)
    foreseen = simulate(schedule, costs)
    assert lower_bound_s(schedule, costs) <= foreseen.makespan_s
    check_trace(foreseen.trace, schedule)


cases = st.tuples(st.sampled_from(NAMES), st.integers(1, 5), st.integers(0, 8), st.integers(2, 3))


@quickly
@given(st.data(), cases)
def test_no_step_beats_the_lower_bound(data: st.DataObject, case: tuple[str, int, int, int]) -> None:
    name, ranks, more, chunks = case
    schedule = make_schedule(name, ranks, ranks + more, chunks if name == "interleaved" else 1)
    stages = range(schedule.stages)
    edges = [(a, b) for b in stages for a in range(b) if b == a + 1 or data.draw(st.booleans())]
    time = st.integers(0, 9)
    costs = []
    for stage in stages:
        f, i, w = data.draw(st.tuples(time, time, time))
        users = [b for a, b in edges if a == stage]
        costs.append(StageTimes(f, i + w, w, {b: data.draw(time) for b in users}))
    dataflow = Dataflow(schedule.stages, tuple(edges))
    free = simulate(schedule, costs, dataflow)
    shared = simulate(schedule, costs, dataflow, ports)
    bound_s = lower_bound_s(schedule, costs, dataflow)
    assert bound_s <= free.makespan_s
    assert bound_s <= shared.makespan_s
    check_trace(free.trace, schedule)
    check_trace(shared.trace, schedule)


def check_trace(trace: Trace, schedule: Schedule) -> None:
    """Check that each action is traced, and that computing and waits fill each rank without overlap."""
    assert {event.category for event in trace.events} <= set(CATEGORIES)
    for rank, actions in enumerate(schedule.actions):
        lane = [e for e in trace.events if e.rank == rank and e.lane == "compute"]
        lane.sort(key=lambda e: (e.start_s, e.end_s))
        end_s = 0.0
        for event in lane:
            assert event.start_s == end_s
            end_s = event.end_s
        names = [e.name for e in lane if e.category != "wait"]
        assert sorted(names) == sorted(map(str, actions))


def test_figures_of_a_step_by_hand() -> None:
    """Two stages, two micro-batches, F = 1, B = 2: 9 s in all, 6 s of computing on each rank."""
    foreseen = simulate(make_schedule("1f1b", 2, 2), [StageTimes(1, 2)] * 2)
    assert foreseen.makespan_s == 9
    assert foreseen.busy_s == (6, 6)
    assert foreseen.utilization == (6 / 9, 6 / 9)
    assert foreseen.bubble == pytest.approx(3 / 9)
    assert foreseen.peak_stash == (2, 1)
    assert [(e.name, e.start_s, e.end_s) for e in foreseen.trace.events if e.rank == 1] == [
        ("wait for 1F0", 0, 1),
        ("1F0", 1, 2),
        ("1B0", 2, 4),
        ("1F1", 4, 5),
        ("1B1", 5, 7),
    ]
    assert [(e.name, e.category) for e in foreseen.trace.of("wait", 0)] == [
        ("wait for 0B0", "wait"),
        ("wait for 0B1", "wait"),
    ]


def test_transfers_queue_on_their_link() -> None:
    """F0 and F1 take 1 s each and their transfers 3 s: the second waits for the first. Gradients take 1 s."""
    costs = [StageTimes(1, 1, transfer_s={1: 3}, gradient_s={1: 1}), StageTimes(1, 1)]
    foreseen = simulate(make_schedule("gpipe", 2, 2), costs)
    assert [(e.name, e.rank, e.start_s, e.end_s) for e in foreseen.trace.of("transfer")] == [
        ("0F0 to rank 1", 0, 1, 4),
        ("0F1 to rank 1", 0, 4, 7),
        ("1B0 to rank 0", 1, 9, 10),
        ("1B1 to rank 0", 1, 10, 11),
    ]
    assert foreseen.makespan_s == 12


@pytest.mark.parametrize(("contention", "makespan_s"), [(links, 10), (ports, 13)])
def test_a_port_sends_one_message_at_a_time(contention: Contention, makespan_s: float) -> None:
    """Stage 0 sends to stages 1 and 2. With one port, the second transfer starts when the first has ended.

    links: F 0-1, to both ranks 1-4, F 4-5, B 5-6, gradients back 6-9, B 9-10
    ports: F 0-1, to rank 1 at 1-4, to rank 2 at 4-7, F 7-8, B 8-9, its gradient back 9-12, B 12-13
    """
    fork = Dataflow(3, ((0, 1), (0, 2)))
    costs = [StageTimes(1, 1, transfer_s={1: 3, 2: 3}), StageTimes(1, 1), StageTimes(1, 1)]
    assert simulate(make_schedule("gpipe", 3, 1), costs, fork, contention).makespan_s == makespan_s


def test_the_lower_bound_by_hand() -> None:
    """Stages are unequal and the middle one bounds: 1 + 4 * (2 + 4) + 2. Transfers lengthen head and tail."""
    costs = [StageTimes(1, 2), StageTimes(2, 4), StageTimes(1, 2)]
    schedule = make_schedule("1f1b", 3, 4)
    assert lower_bound_s(schedule, costs) == 1 + 4 * 6 + 2
    costs[0] = StageTimes(1, 2, transfer_s={1: 5})
    assert lower_bound_s(schedule, costs) == 1 + 5 + 4 * 6 + 5 + 2
    # W's in the tail: after the last of 4 F and I on rank 1, rank 0 runs I (1 s) and W (1 s).
    split = [StageTimes(1, 2, 1), StageTimes(3, 4, 1)]
    assert lower_bound_s(make_schedule("zb-h1", 2, 4), split) == 1 + max(4 * 7, 4 * 6 + 2)


def test_the_lower_bound_of_another_model() -> None:
    with pytest.raises(HvpipeError, match=r"the schedule's 2 stages. Received: 3 stages"):
        lower_bound_s(make_schedule("1f1b", 2, 2), [StageTimes(1, 1)] * 2, Dataflow.chain(3))


def test_costs_that_do_not_fit() -> None:
    schedule = make_schedule("zb-h1", 2, 2)
    with pytest.raises(HvpipeError, match=r"the schedule's 2 stages. Received: 3 costs"):
        simulate(schedule, [StageTimes(1, 2, 1)] * 3)
    with pytest.raises(HvpipeError, match=r"needs weight_s of every stage. Received: StageTimes"):
        simulate(schedule, [StageTimes(1, 2)] * 2)
    cost = StageTimes(1, 2)
    with pytest.raises(HvpipeError, match=r"one, or 2, one for each rank of stage 0. Received: 3 costs"):
        simulate(make_schedule("1f1b", (2, 1), 2), [[cost] * 3, cost])
    with pytest.raises(
        HvpipeError, match=r"from stage 0 to stage 1 should be one, or 2, .* of stage 1. Received: \[1\]"
    ):
        simulate(make_schedule("1f1b", (1, 2), 2), [StageTimes(1, 2, None, {1: [1]}), cost])


@pytest.mark.parametrize(
    "arguments",
    [
        (-1.0, 1.0),
        (1.0, math.nan),
        (1.0, math.inf),
        (1.0, 1.0, 2.0),
        (1.0, 1.0, -1.0),
        (1.0, 1.0, 0.5, {1: -1}),
    ],
)
def test_costs_that_are_no_times(arguments: tuple[float, float]) -> None:
    with pytest.raises(HvpipeError, match=r"finite, from 0|from 0 to backward_s"):
        StageTimes(*arguments)


def test_a_schedule_that_deadlocks() -> None:
    text = "F0 F1 B0 B1\nF1 B1 F0 B0\nF0 B0 F1 B1"
    with pytest.raises(HvpipeError, match=r"rank 1 at 1B1 waits for 2B1 of rank 2"):
        simulate(Schedule.from_text(text), [StageTimes(1, 1)] * 3)
