"""Foretells one training step of a schedule: when every action and transfer runs, the bubble, the stash."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hvpipe.dataflow import Dataflow, Message, Needs, dataflow_of, messages_of, needs_of, programs
from hvpipe.errors import HvpipeError
from hvpipe.schedule import Action, Schedule
from hvpipe.trace import Event, Trace
from hvpipe.verify import check_complete, check_order, peak_stash


@dataclass(frozen=True)
class StageCost:
    """Seconds that one stage takes for one micro-batch, on the device that it is placed on.

    `backward_s` is the whole backward; `weight_s`, the part of it for the weights, is needed by schedules
    that run that apart, and there `backward_s` is the sum of both parts. `transfer_s` is how long the
    output travels to each stage that uses it and is on another rank; its gradient takes as long to come
    back unless `gradient_s` says otherwise. Stages that are not named there are reached in no time.
    """

    forward_s: float
    backward_s: float
    weight_s: float | None = None
    transfer_s: Mapping[int, float] = field(default_factory=dict)
    gradient_s: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        times = [
            self.forward_s,
            self.backward_s,
            *self.transfer_s.values(),
            *(self.gradient_s or {}).values(),
        ]
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
    run = _Run(schedule, costs, needs_of(schedule, dataflow), contention)
    makespan_s = max(end_s for spans in run.spans for _, end_s, _ in spans)
    metadata = {"schedule": schedule.name, "makespan_s": makespan_s}
    trace = Trace.merge([Trace((*_compute_events(run.spans), *run.transfers), metadata)])
    busy_s = tuple(
        math.fsum(costs[action.stage].seconds(action.kind) for action in actions)
        for actions in schedule.actions
    )
    return Simulation(trace, makespan_s, busy_s, tuple(int(peak) for peak in peak_stash(schedule)))


def _check_costs(schedule: Schedule, costs: Sequence[StageCost]) -> None:
    if len(costs) != schedule.stages:
        raise HvpipeError(
            f"costs should be of the schedule's {schedule.stages} stages. Received: {len(costs)} costs"
        )


Span = tuple[float, float, Action]


class _Run:
    """The simulation at work: takes the ends of actions from a heap, in the order of time."""

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
        end_s = start_s + self.costs[action.stage].seconds(action.kind)
        self.spans[rank].append((start_s, end_s, action))
        heapq.heappush(self.running, (end_s, rank))

    def _finish(self, action: Action, end_s: float) -> None:
        for message in self.messages.get(action, ()):
            self._transfer(message, end_s)
        for user in self.users[action]:
            self.lacks[user] -= 1
        for rank in sorted({self.schedule.rank_of(a.stage) for a in (action, *self.users[action])}):
            self._start_next(rank)

    def _transfer(self, message: Message, made_s: float) -> None:
        maker, user = message.producer.stage, message.consumer.stage
        forth = message.consumer.kind == "F"
        cost = self.costs[maker if forth else user]
        back = cost.transfer_s if cost.gradient_s is None else cost.gradient_s
        seconds = cost.transfer_s.get(user, 0.0) if forth else back.get(maker, 0.0)
        keeps_busy = self.contention(message.source, message.target) if seconds else ()
        start_s = max([made_s, *(self.free_s[what] for what in keeps_busy)])
        for what in keeps_busy:
            self.free_s[what] = start_s + seconds
        self.inputs_s[message.consumer] = max(self.inputs_s[message.consumer], start_s + seconds)
        if seconds:
            name = f"{message.producer} to rank {message.target}"
            args = {"stage": user, "microbatch": message.producer.microbatch}
            self.transfers.append(
                Event(name, "transfer", message.source, "transfer", start_s, start_s + seconds, args)
            )


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


def lower_bound_s(schedule: Schedule, costs: Sequence[StageCost], dataflow: Dataflow | None = None) -> float:
    """The seconds that no order of the same actions on the same ranks can beat.

    The most over all ranks of head + computing + tail: the head is the way of a first output to the rank,
    the tail that of the last gradient from it, back to where it ends. W's may as well run in the tail:

    rank 0 | F .................... I W |      head 2 F, computing 3 (F + I), tail 2 I + W
    rank 1 | .. F .............. I W    |
    rank 2 | .... F I F I F I W W W     |

    Transfers count in head and tail; that they may have to queue does not.
    """
    _check_costs(schedule, costs)
    dataflow = dataflow_of(schedule, dataflow)
    head_s, tail_s = _heads(schedule, costs, dataflow), _tails(schedule, costs, dataflow)
    bound_s = 0.0
    for rank, actions in enumerate(schedule.actions):
        stages = [stage for stage in range(schedule.stages) if schedule.rank_of(stage) == rank]
        whole_s = math.fsum(costs[action.stage].seconds(action.kind) for action in actions)
        apart_s = math.fsum(costs[a.stage].seconds(a.kind) for a in actions if a.kind == "W")
        rest_s = max(whole_s, whole_s - apart_s + min(tail_s[stage] for stage in stages))
        bound_s = max(bound_s, min(head_s[stage] for stage in stages) + rest_s)
    return bound_s


def _heads(schedule: Schedule, costs: Sequence[StageCost], dataflow: Dataflow) -> list[float]:
    """The earliest that each stage can start its first forward."""
    head_s = [0.0] * schedule.stages
    for source, user in sorted(dataflow.edges):
        cost = costs[source]
        apart = schedule.rank_of(source) != schedule.rank_of(user)
        way_s = cost.transfer_s.get(user, 0.0) if apart else 0.0
        head_s[user] = max(head_s[user], head_s[source] + cost.forward_s + way_s)
    return head_s


def _tails(schedule: Schedule, costs: Sequence[StageCost], dataflow: Dataflow) -> list[float]:
    """The least from the end of each stage's last B or I to the end of the step."""
    split = {action.stage for actions in schedule.actions for action in actions if action.kind == "W"}
    tail_s = [costs[stage].seconds("W") if stage in split else 0.0 for stage in range(schedule.stages)]
    for source, user in sorted(dataflow.edges):
        cost = costs[source]
        apart = schedule.rank_of(source) != schedule.rank_of(user)
        back = cost.transfer_s if cost.gradient_s is None else cost.gradient_s
        way_s = back.get(user, 0.0) if apart else 0.0
        own_s = cost.seconds("I" if source in split else "B")
        tail_s[user] = max(tail_s[user], way_s + own_s + tail_s[source])
    return tail_s


def draw(trace: Trace, columns: int = 100) -> str:
    """The ranks' computing as text, a line each, `columns` wide: actions, dots where a rank waits.

    rank 0 | F0 F1 F2 ......... B0--- F3 ...
    """
    events = [event for event in trace.events if event.lane == "compute"]
    if columns < 1 or not events:
        raise HvpipeError(
            "A drawing needs columns and a trace with events in lane 'compute'. "
            f"Received: columns={columns}, {len(events)} events"
        )
    start_s = min(event.start_s for event in events)
    per_s = columns / (max(event.end_s for event in events) - start_s or 1.0)
    ranks = sorted({event.rank for event in events})
    several = len({event.args.get("stage") for event in events if event.category != "wait"}) > len(ranks)
    lines = []
    for rank in ranks:
        line = "." * columns
        for event in events:
            if event.rank == rank and event.category != "wait":
                first, last = (round((time - start_s) * per_s) for time in (event.start_s, event.end_s))
                label = event.name if several else event.name.lstrip("0123456789")
                line = line[:first] + _cell(label, last - first) + line[last:]
        lines.append(f"rank {rank:>{len(str(ranks[-1]))}} | {line.rstrip()}")
    return "\n".join(lines) + "\n"


def _cell(label: str, width: int) -> str:
    """The label in that width: cut, or filled with dashes and set apart by a space."""
    return label[:width] if width <= len(label) else f"{label:-<{width - 1}} "
