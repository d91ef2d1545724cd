"""Runs a coded schedule through time, event by event: when each action and each transfer runs."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hvpipe.schedule.coded import CodedSchedule

Wire = tuple[float, tuple[tuple[int, float], ...]]
"""The seconds of a message, and the resources that it keeps busy, with the seconds from its start."""


@dataclass(frozen=True)
class Edge:
    """Where the results of a stage go: to the same micro-batch of another stage.

    Args:
        stage: The stage that uses the result.
        offset: What to add to the code of the producer to get that of the consumer.
        wires: The wire between each pair of ranks (source, target); pairs without one need no time.
        is_simple: Whether both stages have one rank.
    """

    stage: int
    offset: int
    wires: Mapping[tuple[int, int], Wire]
    is_simple: bool


@dataclass(frozen=True)
class Work:
    """What a run takes: a schedule, the times of its actions, and the wires of its messages.

    Args:
        schedule: The schedule.
        seconds: For each rank the seconds of each job that it has.
        edges: For the forward and the backward of each stage (2 s and 2 s + 1) where the result goes, the
            nearest stage first.
        resources: The number of resources that wires share.
    """

    schedule: CodedSchedule
    seconds: Sequence[Mapping[int, float]]
    edges: Sequence[Sequence[Edge]]
    resources: int


@dataclass
class Record:
    """What a run notes down when asked to.

    Args:
        starts: For each rank the start of each action.
        transfers: (start, end, producer's code, consumer's code, source, target) of messages that take time.
        taken: For each resource the spans in which it is busy.
    """

    starts: list[list[float]] = field(default_factory=list)
    transfers: list[tuple[float, float, int, int, int, int]] = field(default_factory=list)
    taken: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    @staticmethod
    def of(work: Work) -> Record:
        """Return an empty record for a run of this work."""
        return Record([[] for _ in work.schedule.codes])

    def transfer(self, wire: Wire, start: float, codes: tuple[int, int], ranks: tuple[int, int]) -> None:
        """Note down a message."""
        self.transfers.append((start, start + wire[0], *codes, *ranks))
        for resource, busy in wire[1]:
            self.taken.setdefault(resource, []).append((start, start + busy))


def edges_of(
    schedule: CodedSchedule,
    flow: Iterable[tuple[int, int]],
    wires_of: Callable[[int, int, bool], Mapping[tuple[int, int], Wire]],
) -> list[list[Edge]]:
    """Return the edges of `Work` for a dataflow.

    Args:
        schedule: The schedule.
        flow: Pairs (maker, user) of stages; the user takes the maker's output.
        wires_of: Returns the wires of maker, user and whether it is the gradient on its way back.
    """
    edges: list[list[Edge]] = [[] for _ in range(2 * schedule.stages)]
    ranks_of = schedule.ranks_of
    for maker, user in sorted(flow):
        offset = 2 * (user - maker) * schedule.microbatches
        simple = len(ranks_of[maker]) == len(ranks_of[user]) == 1
        edges[2 * maker].append(Edge(user, offset, wires_of(maker, user, False), simple))
        edges[2 * user + 1].insert(0, Edge(maker, -offset, wires_of(maker, user, True), simple))
    return edges


def run(work: Work, record: Record | None = None) -> list[float] | None:
    """Run the schedule; return when each rank ends, or None if ranks deadlock.

    A rank's next action starts when the rank is free and all inputs have arrived. A message starts when it is
    made and the resources of its wire are free: first made, first served; if made at the same time, the lower
    rank first. Takes 1 to 2 microseconds for each action.
    """
    schedule = work.schedule
    home, all_codes, all_jobs = schedule.home, schedule.codes, schedule.jobs
    targets = _targets(work)
    lacks = _missing_inputs(work)
    arrived = [0.0] * len(lacks)
    free = [0.0] * work.resources
    seconds = [list(map(times.__getitem__, jobs)) for times, jobs in zip(work.seconds, all_jobs, strict=True)]
    places, ends = [0] * schedule.ranks, [0.0] * schedule.ranks
    waiting = [codes[0] for codes in all_codes]  # what an idle rank waits to start; -1 if it is busy or done
    running: list[tuple[float, int]] = []  # (end, rank)
    push, pop = heapq.heappush, heapq.heappop
    ready = [rank for rank, code in enumerate(waiting) if not lacks[code]]
    unfinished = schedule.actions
    while True:
        for rank in ready:
            start = ends[rank]
            code = waiting[rank]
            if start < arrived[code]:
                start = arrived[code]
            waiting[rank] = -1
            if record is not None:
                record.starts[rank].append(start)
            push(running, (start + seconds[rank][places[rank]], rank))
        if not running:
            return ends if unfinished == 0 else None
        end, rank = pop(running)
        ends[rank] = end
        unfinished -= 1
        place = places[rank]
        codes = all_codes[rank]
        code = codes[place]
        ready = []
        for offset, wire, wires in targets[all_jobs[rank][place]]:
            user = code + offset
            target = home[user >> 1]
            if wires is not None:
                wire = wires.get((rank, target))
            if wire is None:
                if arrived[user] < end:
                    arrived[user] = end
            else:
                start = end
                for resource, _ in wire[1]:
                    if free[resource] > start:
                        start = free[resource]
                for resource, busy in wire[1]:
                    free[resource] = start + busy
                if arrived[user] < start + wire[0]:
                    arrived[user] = start + wire[0]
                if record is not None:
                    record.transfer(wire, start, (code, user), (rank, target))
            lacks[user] -= 1
            if waiting[target] == user and not lacks[user]:
                ready.append(target)
        place += 1
        places[rank] = place
        if place < len(codes):
            waiting[rank] = code = codes[place]
            if not lacks[code]:
                ready.append(rank)


_Target = tuple[int, Wire | None, Mapping[tuple[int, int], Wire] | None]


def _targets(work: Work) -> list[list[_Target]]:
    """Return for each job where its results go: the offset, and its only wire or all wires."""
    none: list[_Target] = []
    found = []
    for stage in range(work.schedule.stages):
        ways = []
        for edges in work.edges[2 * stage : 2 * stage + 2]:
            targets: list[_Target] = []
            for edge in edges:
                one = len(edge.wires) <= 1 and edge.is_simple
                only = next(iter(edge.wires.values()), None) if one else None
                targets.append((edge.offset, only, None if one else edge.wires))
            ways.append(targets)
        found += [ways[0], ways[1], ways[1], none]
    return found


def _missing_inputs(work: Work) -> list[int]:
    """Return for each code how many inputs of other stages it waits for. Its own forward comes before it."""
    counts = [0] * (2 * work.schedule.stages)
    for number, edges in enumerate(work.edges):
        for edge in edges:
            counts[2 * edge.stage + number % 2] += 1
    found: list[int] = []
    for stage in range(work.schedule.stages):
        found += counts[2 * stage : 2 * stage + 2] * work.schedule.microbatches
    return found + [0] * (work.schedule.stages * work.schedule.microbatches)  # W's
