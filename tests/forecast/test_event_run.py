"""The event run against a reference: random programs, times, dataflows, and resources that messages share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvpipe.errors import HvpipeError
from hvpipe.forecast.simulate import Contention, Resource, StageTimes, links, ports, simulate
from hvpipe.schedule.action import Action
from hvpipe.schedule.program import Dataflow, Message, needs_of
from hvpipe.schedule.schedule import NAMES, Schedule, make_schedule


def bus(message: Message, seconds: float) -> list[tuple[Resource, float]]:
    """Let all ranks share one bus, for half of a message's time, and let each rank send one by one."""
    return [(("bus", 0), seconds / 2), (("out", message.source), seconds)]


def reference(
    schedule: Schedule, costs: list[StageTimes], flow: Dataflow, contention: Contention
) -> list[tuple[str, float, float]] | None:
    """Return (name, start, end) of each action and message, or None if ranks wait in a circle.

    It looks at all ranks for the action that ends next, and knows actions by their names only.
    """
    needs = needs_of(schedule, flow)
    users = {action: [user for user, of in needs.items() if action in of] for action in needs}
    left = [list(actions) for actions in schedule.actions]
    free = [0.0] * schedule.ranks
    arrived: dict[tuple[Action, Action], float] = {}
    taken: dict[Resource, float] = {}
    events = []
    while any(left):
        startable = []
        for rank, actions in enumerate(left):
            if actions and all((need, actions[0]) in arrived for need in needs[actions[0]]):
                start_s = max([free[rank], *(arrived[need, actions[0]] for need in needs[actions[0]])])
                seconds = costs[actions[0].stage].seconds(actions[0].kind)
                startable.append((start_s + seconds, rank, start_s))
        if not startable:
            return None
        end_s, rank, start_s = min(startable)
        free[rank] = end_s
        action = left[rank].pop(0)
        events.append((str(action), start_s, end_s))
        for user in sorted(users[action], key=lambda user: abs(user.stage - action.stage)):
            target, back = schedule.rank_of(user), action.kind != "F"
            ends = (user.stage, action.stage) if back else (action.stage, user.stage)
            seconds = costs[ends[0]].travel_s(ends[1], 0, back=back) if target != rank else 0
            arrived[action, user] = end_s
            if seconds:
                keeps = contention(Message(action, user, rank, target), seconds)
                sent_s = max([end_s, *(taken.get(name, 0.0) for name, _ in keeps)])
                taken |= {name: sent_s + busy_s for name, busy_s in keeps}
                arrived[action, user] = sent_s + seconds
                events.append((f"{action} to rank {target}", sent_s, sent_s + seconds))
    return sorted(events)


def random_program(draw: random.Random, flow: Dataflow) -> Schedule:
    """Draw ranks, replicas, split backwards and orders, some of which wait in a circle."""
    m, ranks = draw.randint(1, 4), draw.randint(1, 5)
    micro_batches = [(stage, i) for stage in range(flow.stages) for i in range(m)]
    rank_of = {one: draw.randrange(ranks) for one in micro_batches}
    kinds = draw.choice(["FB", "FIW"])
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    every = [Action(kind, i, stage) for stage, i in micro_batches for kind in kinds]
    needs = needs_of(Schedule("", flow.stages, m, (tuple(every),)), flow)
    left = set(every)
    while left:
        ready = [one for one in every if one in left and not left & set(needs[one])]
        one = draw.choice(ready)
        left.remove(one)
        orders[rank_of[one.stage, one.microbatch]].append(one)
    for order in orders:
        place = draw.randrange(4 * flow.stages * m)
        if place + 1 < len(order):
            a, b = order[place : place + 2]
            if (a.stage, a.microbatch) != (b.stage, b.microbatch):
                order[place : place + 2] = [b, a]
    return Schedule("random", flow.stages, m, tuple(tuple(order) for order in orders if order))


@settings(max_examples=300)
@given(st.randoms(use_true_random=False), st.sampled_from([links, ports, bus]), st.sampled_from(["", *NAMES]))
def test_the_event_run_equals_the_reference(draw: random.Random, contention: Contention, name: str) -> None:
    if name:
        made = make_schedule(name, draw.randint(2, 4), draw.randint(4, 8), 1 + (name == "interleaved"))
    stages = made.stages if name else draw.randint(1, 4)
    pairs = [(a, b) for b in range(stages) for a in range(b)]
    flow = Dataflow(stages, tuple(pair for pair in pairs if draw.random() < 0.6))
    program = made if name else random_program(draw, flow)
    costs = []
    for _ in range(stages):  # quarters of seconds: sums are exact, and many events are at the same time
        f, i, w = (draw.randint(0, 8) / 4 for _ in "fiw")
        ways = [{user: draw.randint(0, 8) / 4 for user in range(stages)} for _ in "fb"]
        costs.append(StageTimes(f, i + w, w, *ways))
    expected = reference(program, costs, flow, contention)
    if expected is None:
        with pytest.raises(HvpipeError, match="waits for"):
            simulate(program, costs, flow, contention)
        return
    events = simulate(program, costs, flow, contention).trace.events
    found = [(one.name, one.start_s, one.end_s) for one in events if one.category != "wait"]
    assert sorted(found) == expected
