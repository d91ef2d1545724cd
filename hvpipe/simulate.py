"""Foretells one training step of a schedule: when every action and transfer runs, the bubble, the stash."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hvpipe.dataflow import Dataflow, Message, Needs, messages_of, needs_of
from hvpipe.errors import HvpipeError
from hvpipe.schedule import Action, Schedule
from hvpipe.trace import Event, Trace
from hvpipe.verify import check_complete, check_order, peak_stash, programs


@dataclass(frozen=True)
class StageCost:
    """Seconds that one stage takes for one micro-batch, on the device that it is placed on.

    `backward_s` is the whole backward; `weight_s`, the part of it for the weights, is needed by schedules
    that run that apart. `transfer_s` is how long the output travels to each stage that uses it and is on
    another rank; its gradient takes as long to come back unless `gradient_s` says otherwise. Stages that
    are not named there are reached in no time.
    """

    forward_s: float
    backward_s: float
    weight_s: float | None = None
    transfer_s: Mapping[int, float] = field(default_factory=dict)
    gradient_s: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        times = [self.forward_s, self.backward_s, *self.transfer_s.values(), *(self.gradient_s or {}).values()]
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise HvpipeError(f"The times of a stage should be finite, from 0. Received: {self}")
        if self.weight_s is not None and not 0 <= self.weight_s <= self.backward_s:
            raise HvpipeError(f"weight_s should be a part of backward_s. Received: {self}")

    def seconds(self, kind: str) -> float:
        """How long an action of that kind takes."""
        if kind == "F":
            return self.forward_s
        if kind == "B":
            return self.backward_s
        if self.weight_s is None:
            raise HvpipeError(
                "A schedule that runs the backward in two parts needs weight_s of every stage. "
                f"Received: {self}"
            )
        return self.weight_s if kind == "W" else self.backward_s - self.weight_s


Contention = Callable[[int, int], Sequence[tuple[str, int]]]
"""What a transfer from one rank to another keeps busy; what is busy serves one transfer after the other."""


def links(source: int, target: int) -> Sequence[tuple[str, int]]:
    """Each pair of ranks has a wire for each direction."""
    return ((f"to {target}", source),)


def ports(source: int, target: int) -> Sequence[tuple[str, int]]:
    """Each rank has one port, which sends and receives at the same time: ranks on hosts of their own."""
    return (("out", source), ("in", target))


@dataclass(frozen=True)
class Simulation:
    """One step as foreseen. `trace` has lane "compute", with a wait wherever it is idle, and lane "transfer".

    `busy_s` is the computing of each rank, `peak_stash` the micro-batches that it stashes at most.
    """

    trace: Trace
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_stash: tuple[int, ...]

    @property
    def utilization(self) -> tuple[float, ...]:
        """The share of the step that each rank computes."""
        return tuple(busy / self.makespan_s if self.makespan_s else 1.0 for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they compute nothing."""
        return 1.0 - sum(self.utilization) / len(self.utilization)


def simulate(
    schedule: Schedule,
    costs: Sequence[StageCost],
    dataflow: Dataflow | None = None,
    contention: Contention = links,
) -> Simulation:
    """Run one step with the `costs` of the stages; raises HvpipeError for a schedule that cannot run.

    An action starts as soon as its rank is done with the one before and all it takes has arrived. Transfers
    go beside the computing, each when its result is made and all that it keeps busy is free, first come
    first served. Times are sums of the given ones: no time steps, no rounding.
    """
    _check_costs(schedule, costs)
    check_complete(schedule)
    check_order(schedule)
    needs = needs_of(schedule, dataflow)
    programs(schedule, needs)  # for its error where ranks wait in a circle
    run = _Run(schedule, costs, needs, contention)
    events = [*run.compute_events(), *run.transfers]
    trace = Trace.merge([Trace(tuple(events), {"schedule": schedule.name, "makespan_s": run.makespan_s})])
    busy_s = tuple(
        math.fsum(costs[action.stage].seconds(action.kind) for action in actions)
        for actions in schedule.actions
    )
    return Simulation(trace, run.makespan_s, busy_s, tuple(int(peak) for peak in peak_stash(schedule)))


def _check_costs(schedule: Schedule, costs: Sequence[StageCost]) -> None:
    if len(costs) != schedule.stages:
        raise HvpipeError(
            f"costs should be of the schedule's {schedule.stages} stages. Received: {len(costs)} costs"
        )


class _Run:
    """The simulation at work: the ends of actions, in the order of time, from a heap."""

    def __init__(
        self, schedule: Schedule, costs: Sequence[StageCost], needs: Needs, contention: Contention
    ) -> None:
        self.schedule, self.costs, self.contention = schedule, costs, contention
        self.messages = messages_of(schedule, needs)
        self.lacks = {action: len(needed) for action, needed in needs.items()}
        self.users: dict[Action, list[Action]] = defaultdict(list)
        for action, needed in needs.items():
            for need in needed:
                self.users[need].append(action)
        self.inputs_s: dict[Action, float] = defaultdict(float)  # when the last of them has arrived
        self.free_s: dict[tuple[str, int], float] = defaultdict(float)
        self.spans: list[list[tuple[float, float, Action]]] = [[] for _ in schedule.actions]
        self.ends: list[tuple[float, int]] = []  # of the actions that run
        self.transfers: list[Event] = []
        for rank in range(schedule.ranks):
            self._start_next(rank, running=0)
        while self.ends:
            end_s, rank = heapq.heappop(self.ends)
            self._finish(self.spans[rank][-1][2], end_s)
        self.makespan_s = max(end_s for spans in self.spans for _, end_s, _ in spans)

    def _start_next(self, rank: int, running: int) -> None:
        """Let the rank run its next action if all of its inputs are made and nothing else runs there."""
        place = len(self.spans[rank])
        actions = self.schedule.actions[rank]
        if running or place == len(actions) or self.lacks[actions[place]]:
            return
        action = actions[place]
        before_s = self.spans[rank][-1][1] if place else 0.0
        start_s = max(before_s, self.inputs_s[action])
        end_s = start_s + self.costs[action.stage].seconds(action.kind)
        self.spans[rank].append((start_s, end_s, action))
        heapq.heappush(self.ends, (end_s, rank))
