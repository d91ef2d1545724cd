"""Simulates one training step of a schedule: when every action and transfer runs, the bubble, the stash."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hvpipe.errors import HvpipeError
from hvpipe.schedule.action import Action
from hvpipe.schedule.program import (
    Dataflow,
    Message,
    Needs,
    messages_of,
    needs_of,
    programs,
)
from hvpipe.schedule.schedule import Schedule
from hvpipe.schedule.verify import check_complete, check_order, peak_stash
from hvpipe.trace.events import Event, Trace


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one stage takes for one micro-batch on its device.

    Args:
        forward_s: Seconds of the forward.
        backward_s: Seconds of the whole backward.
        weight_s: The part of `backward_s` for the weights. Schedules that run this part separately need it
            ("zb-h1").
        transfer_s: Seconds that the output travels, by the number of the stage that uses it, if that is on
            another rank: one number, or one for each rank of that stage. Other stages are reached in no time.
        gradient_s: The same for the gradient on its way back; None if it takes as long as the output.

    Raises:
        HvpipeError: If a time is negative or not finite, or `weight_s` exceeds `backward_s`.

    Example:
        ```python
        first, last = StageTimes(1, 2, transfer_s={1: 0.5}), StageTimes(1, 2)
        ```
    """

    forward_s: float
    backward_s: float
    weight_s: float | None = None
    transfer_s: Mapping[int, float | Sequence[float]] = field(default_factory=dict)
    gradient_s: Mapping[int, float | Sequence[float]] | None = None

    def __post_init__(self) -> None:
        times = [self.forward_s, self.backward_s]
        for given in (*self.transfer_s.values(), *(self.gradient_s or {}).values()):
            times.extend(given if isinstance(given, Sequence) else [given])
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise HvpipeError(f"The times of a stage should be finite, from 0. Received: {self}")
        if self.weight_s is not None and not 0 <= self.weight_s <= self.backward_s:
            raise HvpipeError(f"weight_s should be from 0 to backward_s. Received: {self}")

    def seconds(self, kind: str) -> float:
        """Return the seconds of an action of this kind."""
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

    def travel_s(self, user: int, replica: int, *, back: bool = False) -> float:
        """Return the seconds of the output to a rank of stage `user`; with `back`, of its gradient."""
        times_s = self.gradient_s if back and self.gradient_s is not None else self.transfer_s
        given = times_s.get(user, 0.0)
        return given[replica] if isinstance(given, Sequence) else given


Costs = Sequence[StageTimes | Sequence[StageTimes]]
"""For each stage its times: the same on all its ranks, or one for each rank."""

Resource = tuple[str, int | str]
"""The name of a resource that transfers share; it serves one transfer after the other."""

Contention = Callable[[Message, float], Sequence[tuple[Resource, float]]]
"""Maps a message and its travel time to the resources that it keeps busy, and the seconds from its start."""


def links(message: Message, seconds: float) -> Sequence[tuple[Resource, float]]:
    """Give each pair of ranks its own wire for each direction."""
    return (((f"to {message.target}", message.source), seconds),)


def ports(message: Message, seconds: float) -> Sequence[tuple[Resource, float]]:
    """Give each rank one port that sends and receives at the same time, as if each had its own host."""
    return ((("out", message.source), seconds), (("in", message.target), seconds))


@dataclass(frozen=True)
class Simulation:
    """The simulation of one step.

    Args:
        trace: The events of lanes "compute" (with a wait wherever a rank is idle) and "transfer".
        makespan_s: Seconds of the step.
        busy_s: Seconds that each rank computes.
        peak_stash: The most micro-batches that each rank stashes.
        taken: When transfers keep each resource busy: (start, end) in seconds, in order.
    """

    trace: Trace
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_stash: tuple[int, ...]
    taken: Mapping[Resource, Sequence[tuple[float, float]]] = field(default_factory=dict)

    @property
    def utilization(self) -> tuple[float, ...]:
        """The share of the step, 0 to 1, that each rank computes."""
        return tuple(busy / self.makespan_s if self.makespan_s else 1.0 for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time, 0 to 1, in which they compute nothing."""
        return 1.0 - sum(self.utilization) / len(self.utilization)


def simulate(
    schedule: Schedule,
    costs: Costs,
    dataflow: Dataflow | None = None,
    contention: Contention = links,
) -> Simulation:
    """Simulate one training step.

    An action starts as soon as its rank has finished the action before and all inputs have arrived. Transfers
    run beside the computing. A transfer starts when its tensor is made and all resources that it needs are
    free; first come, first served. Times are sums of the given ones, without time steps or rounding.

    Args:
        schedule: The schedule.
        costs: For each stage its times, or a sequence of times with one for each of its ranks.
        dataflow: Which stages use which stages' outputs; None for a chain.
        contention: The resources that transfers share; by default, each pair of ranks has its own wire for
            each direction.

    Returns:
        The simulated step.

    Raises:
        HvpipeError: If the schedule cannot run, or `costs` do not fit it.

    Example:
        ```python
        schedule = make_schedule("1f1b", ranks=4, microbatches=8)
        simulate(schedule, [StageTimes(1, 2)] * 4).bubble  # 0.27
        ```
    """
    check_complete(schedule)
    check_order(schedule)
    cost_at = cost_table(schedule, costs)
    run = _Run(schedule, cost_at, needs_of(schedule, dataflow), contention)
    makespan_s = max(end_s for spans in run.spans for _, end_s, _ in spans)
    metadata = {"schedule": schedule.name, "makespan_s": makespan_s}
    trace = Trace.merge([Trace((*_compute_events(run.spans), *run.transfers), metadata)])
    busy_s = tuple(
        math.fsum(cost_at[action.stage, rank].seconds(action.kind) for action in actions)
        for rank, actions in enumerate(schedule.actions)
    )
    peaks = tuple(int(peak) for peak in peak_stash(schedule))
    return Simulation(trace, makespan_s, busy_s, peaks, run.taken)


CostTable = Mapping[tuple[int, int], StageTimes]
"""The times of a stage on one of its ranks, by (stage, rank)."""


def cost_table(schedule: Schedule, costs: Costs) -> CostTable:
    """Check the costs against the schedule and return them by stage and rank."""
    if len(costs) != schedule.stages:
        raise HvpipeError(
            f"costs should have one for each of the schedule's {schedule.stages} stages. "
            f"Received: {len(costs)} costs"
        )
    found: dict[tuple[int, int], StageTimes] = {}
    for stage, given in enumerate(costs):
        ranks = schedule.ranks_of(stage)
        of_ranks = [given] * len(ranks) if isinstance(given, StageTimes) else given
        if len(of_ranks) != len(ranks):
            raise HvpipeError(
                f"costs[{stage}] should be one, or {len(ranks)}, one for each rank of stage {stage}. "
                f"Received: {len(of_ranks)} costs"
            )
        for rank, cost in zip(ranks, of_ranks, strict=True):
            times_s = (*cost.transfer_s.items(), *(cost.gradient_s or {}).items())
            for user, to_ranks_s in times_s:
                if isinstance(to_ranks_s, Sequence) and len(to_ranks_s) != len(schedule.ranks_of(user)):
                    raise HvpipeError(
                        f"The transfer times from stage {stage} to stage {user} should be one, or "
                        f"{len(schedule.ranks_of(user))}, one for each rank of stage {user}. "
                        f"Received: {list(to_ranks_s)}"
                    )
            found[stage, rank] = cost
    return found


Span = tuple[float, float, Action]


class _Run:
    """A discrete-event simulation: takes the ends of actions from a heap, in the order of time."""

    def __init__(self, schedule: Schedule, cost_at: CostTable, needs: Needs, contention: Contention) -> None:
        self.schedule, self.cost_at, self.contention = schedule, cost_at, contention
        self.messages = messages_of(schedule, needs)
        self.lacks = {action: len(needed) for action, needed in needs.items()}
        self.users: dict[Action, list[Action]] = defaultdict(list)
        for action, needed in needs.items():
            for need in needed:
                self.users[need].append(action)
        self.inputs_s: dict[Action, float] = defaultdict(float)  # when the last input has arrived
        self.taken: dict[Resource, list[tuple[float, float]]] = defaultdict(list)
        self.spans: list[list[Span]] = [[] for _ in schedule.actions]
        self.running: list[tuple[float, int]] = []  # (end, rank); each rank at most once
        self.transfers: list[Event] = []
        for rank in range(schedule.ranks):
            self._start_next(rank)
        while self.running:
            end_s, rank = heapq.heappop(self.running)
            self._finish(self.spans[rank][-1][2], end_s)
        if sum(map(len, self.spans)) < len(needs):
            programs(schedule, needs)  # raises an error that says which rank waits for which

    def _start_next(self, rank: int) -> None:
        """Let an idle rank run its next action if all inputs are made; some may still travel."""
        place = len(self.spans[rank])
        actions = self.schedule.actions[rank]
        if place == len(actions) or self.lacks[actions[place]] or any(r == rank for _, r in self.running):
            return
        action = actions[place]
        idle_s = self.spans[rank][-1][1] if place else 0.0
        start_s = max(idle_s, self.inputs_s[action])
        end_s = start_s + self.cost_at[action.stage, rank].seconds(action.kind)
        self.spans[rank].append((start_s, end_s, action))
        heapq.heappush(self.running, (end_s, rank))

    def _finish(self, action: Action, end_s: float) -> None:
        """Send the action's results, and start the actions that waited for it."""
        for message in self.messages.get(action, ()):
            self._transfer(message, end_s)
        for user in self.users[action]:
            self.lacks[user] -= 1
        for rank in sorted({self.schedule.rank_of(a) for a in (action, *self.users[action])}):
            self._start_next(rank)

    def _transfer(self, message: Message, made_s: float) -> None:
        """Transfer a message that was made at `made_s` as soon as its resources are free."""
        seconds = self._travel_s(message)
        keeps_busy = self.contention(message, seconds) if seconds else ()
        free_s = (self.taken[name][-1][1] for name, _ in keeps_busy if self.taken[name])
        start_s = max([made_s, *free_s])
        for name, busy_s in keeps_busy:
            self.taken[name].append((start_s, start_s + busy_s))
        self.inputs_s[message.consumer] = max(self.inputs_s[message.consumer], start_s + seconds)
        if seconds:
            title = f"{message.producer} to rank {message.target}"
            args = {"stage": message.consumer.stage, "microbatch": message.producer.microbatch}
            self.transfers.append(
                Event(title, "transfer", message.source, "transfer", start_s, start_s + seconds, args)
            )

    def _travel_s(self, message: Message) -> float:
        """Return the seconds of an output from its maker to a user, or of its gradient back."""
        back = message.consumer.kind != "F"
        maker, user = message.producer.stage, message.consumer.stage
        home, away = message.source, message.target
        if back:
            maker, user, home, away = user, maker, away, home
        replica = self.schedule.ranks_of(user).index(away)
        return self.cost_at[maker, home].travel_s(user, replica, back=back)


def _compute_events(spans: Sequence[Sequence[Span]]) -> Iterator[Event]:
    """Yield the actions of every rank, and a wait before each action that does not follow at once."""
    for rank, of_rank in enumerate(spans):
        before_s = 0.0
        for start_s, end_s, action in of_rank:
            if start_s > before_s:
                yield Event(f"wait for {action}", "wait", rank, "compute", before_s, start_s)
            category = "forward" if action.kind == "F" else "backward"
            args = {"kind": action.kind, "stage": action.stage, "microbatch": action.microbatch}
            yield Event(str(action), category, rank, "compute", start_s, end_s, args)
            before_s = end_s
