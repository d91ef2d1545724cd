"""Simulates one training step of a schedule: when every action and transfer runs, the bubble, the stash."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hvpipe.errors import HvpipeError
from hvpipe.forecast.event_run import Record, Wire, Work, edges_of, run
from hvpipe.schedule.action import Action
from hvpipe.schedule.coded import INPUTS, CodedSchedule
from hvpipe.schedule.program import Dataflow, Message, checked_dataflow, needs_of, programs
from hvpipe.schedule.schedule import Schedule
from hvpipe.schedule.verify import check_complete, check_order
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
        """Return the seconds of an action of this kind. HvpipeError without the `weight_s` that it needs."""
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
"""Maps a message and its travel time to the resources that it keeps busy, and the seconds from its start.

The result may depend on the message's ranks and stages, but not on its micro-batch."""


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
        makespan_s: Seconds of the step.
        ends_s: Seconds from the start of the step to the end of each rank's last action.
        work: What was simulated.
        resources: The names of the work's resources.

    Example:
        ```python
        found = simulate(make_schedule("1f1b", ranks=2, microbatches=4), [StageTimes(1, 2)] * 2)
        print(found.makespan_s, found.peak_stash)
        ```
    """

    makespan_s: float
    ends_s: tuple[float, ...]
    work: Work = field(repr=False)
    resources: tuple[Resource, ...] = field(repr=False)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        pairs = zip(self.work.seconds, self.work.schedule.jobs, strict=True)
        return tuple(math.fsum(map(of.__getitem__, done)) for of, done in pairs)

    @cached_property
    def peak_stash(self) -> tuple[int, ...]:
        """The most micro-batches that each rank stashes."""
        schedule = self.work.schedule
        return tuple(schedule.peak_stash([1] * schedule.stages))

    @cached_property
    def _record(self) -> Record:
        record = Record.of(self.work)
        run(self.work, record)
        return record

    @cached_property
    def trace(self) -> Trace:
        """The events of lanes "compute", with a wait wherever a rank is idle, and "transfer"."""
        schedule = self.work.schedule
        events = (*_compute_events(self.work, self._record), *_transfer_events(schedule, self._record))
        return Trace.merge([Trace(events, {"makespan_s": self.makespan_s})])

    @cached_property
    def taken(self) -> Mapping[Resource, Sequence[tuple[float, float]]]:
        """When transfers keep each resource busy: (start, end) in seconds, in order."""
        return {self.resources[number]: spans for number, spans in self._record.taken.items()}

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
    flow = checked_dataflow(schedule, dataflow)
    coded = CodedSchedule.of(schedule)
    work, resources = _work(coded, cost_at, flow, contention)
    found = simulation(work, resources)
    if found is None:
        programs(schedule, needs_of(schedule, flow))  # raises an error that says which rank waits for which
        raise AssertionError("programs and run should agree whether a schedule ends")
    return found


def simulation(work: Work, resources: Sequence[Resource]) -> Simulation | None:
    """Run the work; None if ranks deadlock."""
    ends_s = run(work)
    if ends_s is None:
        return None
    return Simulation(max(ends_s), tuple(ends_s), work, tuple(resources))


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


def _work(
    coded: CodedSchedule, cost_at: CostTable, flow: Dataflow, contention: Contention
) -> tuple[Work, list[Resource]]:
    """Return the work of a schedule, and the names of its resources."""
    numbers: dict[Resource, int] = {}

    def wires_of(maker: int, user: int, back: bool) -> dict[tuple[int, int], Wire]:
        found = {}
        kind = "B" if back else "F"
        made, used = Action(kind, 0, maker), Action(kind, 0, user)
        for home in coded.ranks_of[maker]:
            for replica, away in enumerate(coded.ranks_of[user]):
                seconds = cost_at[maker, home].travel_s(user, replica, back=back)
                if home == away or seconds == 0:
                    continue
                message = Message(used, made, away, home) if back else Message(made, used, home, away)
                keeps = contention(message, seconds)
                busy = tuple((numbers.setdefault(name, len(numbers)), busy_s) for name, busy_s in keeps)
                found[message.source, message.target] = (seconds, busy)
        return found

    seconds = [
        {job: cost_at[job >> 2, rank].seconds("FBIW"[job & 3]) for job in jobs}
        for rank, jobs in enumerate(coded.jobs_of)
    ]
    edges = edges_of(coded, flow.edges, wires_of)
    return Work(coded, seconds, edges, len(numbers)), list(numbers)


def _compute_events(work: Work, record: Record) -> Iterator[Event]:
    """Yield the actions of every rank, and a wait before each action that does not follow at once."""
    for rank, (jobs, starts) in enumerate(zip(work.schedule.jobs, record.starts, strict=True)):
        before_s = 0.0
        actions = work.schedule.actions_of(rank)
        for action, job, start_s in zip(actions, jobs, starts, strict=True):
            end_s = start_s + work.seconds[rank][job]
            if start_s > before_s:
                yield Event(f"wait for {action}", "wait", rank, "compute", before_s, start_s)
            category = "forward" if action.kind == "F" else "backward"
            args = {"kind": action.kind, "stage": action.stage, "microbatch": action.microbatch}
            yield Event(str(action), category, rank, "compute", start_s, end_s, args)
            before_s = end_s


def _transfer_events(schedule: CodedSchedule, record: Record) -> Iterator[Event]:
    """Yield the messages that take time."""
    kinds = {job & 3 for jobs in schedule.jobs_of for job in jobs}
    back = "I" if INPUTS in kinds else "B"
    m = schedule.microbatches
    for start_s, end_s, made, used, source, target in record.transfers:
        producer = Action(back if made & 1 else "F", (made >> 1) % m, (made >> 1) // m)
        args = {"stage": (used >> 1) // m, "microbatch": producer.microbatch}
        yield Event(f"{producer} to rank {target}", "transfer", source, "transfer", start_s, end_s, args)
