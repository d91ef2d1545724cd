"""Foretells one training step of a schedule: when every action and transfer runs, the bubble, the stash."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hvpipe.errors import HvpipeError
from hvpipe.schedule.action import Action
from hvpipe.schedule.program import Dataflow, Message, Needs, dataflow_of, messages_of, needs_of, programs
from hvpipe.schedule.schedule import Schedule
from hvpipe.schedule.verify import check_complete, check_order, peak_stash
from hvpipe.trace.events import Event, Trace


@dataclass(frozen=True)
class StageCost:
    """Seconds that one stage takes for one micro-batch, on the device that it is placed on.

    `backward_s` is the whole backward; `weight_s`, the part of it for the weights, is needed by schedules
    that run that apart, and there `backward_s` is the sum of both parts. `transfer_s` is how long the
    output travels to each stage that uses it and is on another rank: one time, or one for each rank of that
    stage. Its gradient takes as long to come back unless `gradient_s` says otherwise. Stages that are not
    named there are reached in no time.
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

    def travel_s(self, user: int, replica: int, *, back: bool = False) -> float:
        """How long the output travels to that rank of the stage `user`; or its gradient `back` from there."""
        times_s = self.gradient_s if back and self.gradient_s is not None else self.transfer_s
        given = times_s.get(user, 0.0)
        return given[replica] if isinstance(given, Sequence) else given


Costs = Sequence[StageCost | Sequence[StageCost]]
"""For each stage what it takes: the same on all its ranks, or what on each of them."""

Way = tuple[str, int | str]
"""Something that transfers share, by name; it serves one after the other."""

Contention = Callable[[Message, float], Sequence[tuple[Way, float]]]
"""What a message that travels so many seconds keeps busy, and each for how many of them, from the first."""


def links(message: Message, seconds: float) -> Sequence[tuple[Way, float]]:
    """Each pair of ranks has a wire for each direction."""
    return (((f"to {message.target}", message.source), seconds),)


def ports(message: Message, seconds: float) -> Sequence[tuple[Way, float]]:
    """Each rank has one port, which sends and receives at the same time: ranks on hosts of their own."""
    return ((("out", message.source), seconds), (("in", message.target), seconds))


@dataclass(frozen=True)
class Simulation:
    """One step as foreseen. `trace` has lane "compute", with a wait wherever it is idle, and lane "transfer".

    `busy_s` is the computing of each rank, `peak_stash` the micro-batches that it stashes at most. `taken`
    is when transfers keep each way busy, start and end, in order.
    """

    trace: Trace
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_stash: tuple[int, ...]
    taken: Mapping[Way, Sequence[tuple[float, float]]] = field(default_factory=dict)

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
    costs: Costs,
    dataflow: Dataflow | None = None,
    contention: Contention = links,
) -> Simulation:
    """Run one step with the `costs` of the stages; raises HvpipeError for a schedule that cannot run.

    An action starts as soon as its rank is done with the one before and all it takes has arrived. Transfers
    go beside the computing, each when its result is made and all that it keeps busy is free, first come
    first served. Times are sums of the given ones: no time steps, no rounding.
    """
    check_complete(schedule)
    check_order(schedule)
    cost_at = _cost_at(schedule, costs)
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


_CostAt = Mapping[tuple[int, int], StageCost]
"""What a stage takes on one of its ranks, by (stage, rank)."""


def _cost_at(schedule: Schedule, costs: Costs) -> _CostAt:
    if len(costs) != schedule.stages:
        raise HvpipeError(
            f"costs should be of the schedule's {schedule.stages} stages. Received: {len(costs)} costs"
        )
    found: dict[tuple[int, int], StageCost] = {}
    for stage, given in enumerate(costs):
        ranks = schedule.ranks_of(stage)
        of_ranks = [given] * len(ranks) if isinstance(given, StageCost) else given
        if len(of_ranks) != len(ranks):
            raise HvpipeError(
                f"costs should be one or, of stage {stage}, {len(ranks)} for its ranks. "
                f"Received: {len(of_ranks)} costs"
            )
        for rank, cost in zip(ranks, of_ranks, strict=True):
            times_s = (*cost.transfer_s.items(), *(cost.gradient_s or {}).items())
            for user, way in times_s:
                if isinstance(way, Sequence) and len(way) != len(schedule.ranks_of(user)):
                    raise HvpipeError(
                        f"The times of the way from stage {stage} to stage {user} should be one or, for the "
                        f"ranks of the latter, {len(schedule.ranks_of(user))}. Received: {list(way)}"
                    )
            found[stage, rank] = cost
    return found


Span = tuple[float, float, Action]


class _Run:
    """The simulation at work: takes the ends of actions from a heap, in the order of time."""

    def __init__(self, schedule: Schedule, cost_at: _CostAt, needs: Needs, contention: Contention) -> None:
        self.schedule, self.cost_at, self.contention = schedule, cost_at, contention
        self.messages = messages_of(schedule, needs)
        self.lacks = {action: len(needed) for action, needed in needs.items()}
        self.users: dict[Action, list[Action]] = defaultdict(list)
        for action, needed in needs.items():
            for need in needed:
                self.users[need].append(action)
        self.inputs_s: dict[Action, float] = defaultdict(float)  # when the last of them has arrived
        self.taken: dict[Way, list[tuple[float, float]]] = defaultdict(list)
        self.spans: list[list[Span]] = [[] for _ in schedule.actions]
        self.running: list[tuple[float, int]] = []  # (end, rank); each rank at most once
        self.transfers: list[Event] = []
        for rank in range(schedule.ranks):
            self._start_next(rank)
        while self.running:
            end_s, rank = heapq.heappop(self.running)
            self._finish(self.spans[rank][-1][2], end_s)
        if sum(map(len, self.spans)) < len(needs):
            programs(schedule, needs)  # raises, and says who waits for whom

    def _start_next(self, rank: int) -> None:
        """Let an idle rank run its next action if all that it takes is made (it may have to arrive yet)."""
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
        for message in self.messages.get(action, ()):
            self._transfer(message, end_s)
        for user in self.users[action]:
            self.lacks[user] -= 1
        for rank in sorted({self.schedule.rank_of(a) for a in (action, *self.users[action])}):
            self._start_next(rank)

    def _transfer(self, message: Message, made_s: float) -> None:
        seconds = self._way_s(message)
        keeps_busy = self.contention(message, seconds) if seconds else ()
        start_s = max([made_s, *(self.taken[way][-1][1] for way, _ in keeps_busy if self.taken[way])])
        for way, busy_s in keeps_busy:
            self.taken[way].append((start_s, start_s + busy_s))
        self.inputs_s[message.consumer] = max(self.inputs_s[message.consumer], start_s + seconds)
        if seconds:
            name = f"{message.producer} to rank {message.target}"
            args = {"stage": message.consumer.stage, "microbatch": message.producer.microbatch}
            self.transfers.append(
                Event(name, "transfer", message.source, "transfer", start_s, start_s + seconds, args)
            )

    def _way_s(self, message: Message) -> float:
        """The time of an output from its maker to a user, or of its gradient from the user to the maker."""
        back = message.consumer.kind != "F"
        maker, user = message.producer.stage, message.consumer.stage
        home, away = message.source, message.target
        if back:
            maker, user, home, away = user, maker, away, home
        replica = self.schedule.ranks_of(user).index(away)
        return self.cost_at[maker, home].travel_s(user, replica, back=back)


def _compute_events(spans: Sequence[Sequence[Span]]) -> Iterator[Event]:
    """The actions of every rank, and a wait before each that does not follow at once."""
    for rank, of_rank in enumerate(spans):
        before_s = 0.0
        for start_s, end_s, action in of_rank:
            if start_s > before_s:
                yield Event(f"wait for {action}", "wait", rank, "compute", before_s, start_s)
            category = "forward" if action.kind == "F" else "backward"
            args = {"kind": action.kind, "stage": action.stage, "microbatch": action.microbatch}
            yield Event(str(action), category, rank, "compute", start_s, end_s, args)
            before_s = end_s


def lower_bound_s(schedule: Schedule, costs: Costs, dataflow: Dataflow | None = None) -> float:
    """The seconds that no order of the same actions on the same ranks can beat.

    The most over all ranks of head + computing + tail: the head is the way of a first output to the rank,
    the tail that of the last gradient from it, back to where it ends. W's may as well run in the tail:

    rank 0 | F .................... I W |      head 2 F, computing 3 (F + I), tail 2 I + W
    rank 1 | .. F .............. I W    |
    rank 2 | .... F I F I F I W W W     |

    Transfers count in head and tail; that they may have to queue does not. Of a stage's replicas the fastest
    counts in the heads and tails of others.
    """
    cost_at = _cost_at(schedule, costs)
    dataflow = dataflow_of(schedule, dataflow)
    head_s, tail_s = _heads(schedule, cost_at, dataflow), _tails(schedule, cost_at, dataflow)
    bound_s = 0.0
    for rank, actions in enumerate(schedule.actions):
        stages = schedule.stages_of(rank)
        whole_s = math.fsum(cost_at[action.stage, rank].seconds(action.kind) for action in actions)
        apart_s = math.fsum(cost_at[a.stage, rank].seconds("W") for a in actions if a.kind == "W")
        rest_s = max(whole_s, whole_s - apart_s + min(tail_s[stage] for stage in stages))
        bound_s = max(bound_s, min(head_s[stage] for stage in stages) + rest_s)
    return bound_s


def _heads(schedule: Schedule, cost_at: _CostAt, dataflow: Dataflow) -> list[float]:
    """The earliest that each stage can start its first forward."""
    head_s = [0.0] * schedule.stages
    for source, user in sorted(dataflow.edges):
        ways = _ways_s(schedule, cost_at, (source, user), back=False)
        way_s = min(cost_at[source, rank].forward_s + way_s for rank, way_s in ways)
        head_s[user] = max(head_s[user], head_s[source] + way_s)
    return head_s


def _tails(schedule: Schedule, cost_at: _CostAt, dataflow: Dataflow) -> list[float]:
    """The least from the end of each stage's last B or I to the end of the step."""
    split = {action.stage for actions in schedule.actions for action in actions if action.kind == "W"}
    tail_s = [0.0] * schedule.stages
    for stage in split:
        tail_s[stage] = min(cost_at[stage, rank].seconds("W") for rank in schedule.ranks_of(stage))
    for source, user in sorted(dataflow.edges):
        ways = _ways_s(schedule, cost_at, (source, user), back=True)
        kind = "I" if source in split else "B"
        way_s = min(cost_at[source, rank].seconds(kind) + way_s for rank, way_s in ways)
        tail_s[user] = max(tail_s[user], way_s + tail_s[source])
    return tail_s


def _ways_s(
    schedule: Schedule, cost_at: _CostAt, edge: tuple[int, int], *, back: bool
) -> Iterator[tuple[int, float]]:
    """For each pair of a rank of the edge's source and one of its user: the former, and the time between."""
    source, user = edge
    for rank in schedule.ranks_of(source):
        for replica, away in enumerate(schedule.ranks_of(user)):
            yield rank, 0.0 if rank == away else cost_at[source, rank].travel_s(user, replica, back=back)
