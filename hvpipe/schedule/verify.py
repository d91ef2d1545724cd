"""Verifies that a schedule is complete and ends, and finds how much each rank stashes, before it runs."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from hvpipe.errors import HvpipeError
from hvpipe.schedule.action import Action
from hvpipe.schedule.coded import CodedSchedule
from hvpipe.schedule.program import Dataflow, Message, Needs, Program, Receive, Send, Step, needs_of, programs
from hvpipe.schedule.schedule import Schedule


@dataclass(frozen=True)
class VerifiedSchedule:
    """A schedule that can run, with each rank's program and the most that it holds at one time.

    Args:
        schedule: The schedule.
        programs: For each rank its actions, with sends and receives between them.
        peak_stash: For each rank the most micro-batches that have passed a forward but not the backward (B or
            W).
        peak_inbox: For each rank the most messages whose receive is posted and that are not yet used.

    Example:
        ```python
        verified = verify(make_schedule("1f1b", ranks=2, microbatches=4))
        print(verified.peak_stash)
        ```
    """

    schedule: Schedule
    programs: tuple[Program, ...]
    peak_stash: tuple[int, ...]
    peak_inbox: tuple[int, ...]


def verify(schedule: Schedule, dataflow: Dataflow | None = None, capacity: int = 1) -> VerifiedSchedule:
    """Prove that a schedule can run: every stage runs every micro-batch once, in an order that ends.

    Args:
        schedule: The schedule.
        dataflow: Which stages use which stages' outputs; None for a chain.
        capacity: Messages that a link holds, in each direction, before their receives are posted. A rank that
            sends one more waits.

    Returns:
        The schedule with each rank's program and peaks.

    Raises:
        HvpipeError: If the schedule cannot run; the message names the rank, the action and its missing input.

    Example:
        ```python
        verify(make_schedule("1f1b", ranks=3, microbatches=4)).peak_stash  # (3, 2, 1)
        ```
    """
    check_complete(schedule)
    needs = needs_of(schedule, dataflow)
    check_order(schedule)
    made = programs(schedule, needs)
    check_messages(schedule, needs, made)
    check_links(made, capacity)
    stash = tuple(CodedSchedule.of(schedule).peak_stash([1] * schedule.stages))
    return VerifiedSchedule(schedule, made, stash, tuple(map(_peak_inbox, made)))


def check_complete(schedule: Schedule) -> None:
    """Check that every stage runs every micro-batch once, as F and B, or F, I and W, on one rank."""
    ranks_of: dict[Action, list[int]] = defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        for action, times in Counter(actions).items():
            if action.microbatch >= schedule.microbatches or action.stage >= schedule.stages:
                raise HvpipeError(
                    f"Rank {rank} should run micro-batches below {schedule.microbatches} of stages below "
                    f"{schedule.stages}. Received: {action}"
                )
            if times > 1:
                raise HvpipeError(f"Rank {rank} should run {action} once. Received: {times} times")
            ranks_of[action].append(rank)
    for action, ranks in ranks_of.items():
        if len(ranks) > 1:
            raise HvpipeError(f"One rank should run {action}. Received: ranks {', '.join(map(str, ranks))}")
    for stage in range(schedule.stages):
        for i in range(schedule.microbatches):
            rank_of = {kind: rank for kind in "FBIW" for rank in ranks_of[Action(kind, i, stage)]}
            _check_microbatch(schedule, stage, i, rank_of)


def _check_microbatch(schedule: Schedule, stage: int, i: int, rank_of: dict[str, int]) -> None:
    """Check the actions of a micro-batch on a stage; `rank_of` has the rank of each kind of action."""
    if "".join(rank_of) not in ("FB", "FIW"):
        ranks = sorted(set(rank_of.values())) or schedule.ranks_of(stage)
        who = f"Rank {ranks[0]}" if len(ranks) == 1 else "A rank"
        raise HvpipeError(
            f"{who} should run F and B, or F, I and W, of micro-batch {i} "
            f"on stage {stage}. Received: {' '.join(rank_of) or 'none'}"
        )
    for kind, rank in rank_of.items():
        if rank != rank_of["F"]:
            raise HvpipeError(
                f"Rank {rank_of['F']} should run {Action(kind, i, stage)}. Received: it is on rank {rank}"
            )


def check_order(schedule: Schedule) -> None:
    """Check that each stage runs F before B or I, and I before W, of each micro-batch."""
    before = {"B": "F", "I": "F", "W": "I"}
    for rank, actions in enumerate(schedule.actions):
        done = set()
        for action in actions:
            done.add(action)
            if action.kind in before:
                first = Action(before[action.kind], action.microbatch, action.stage)
                if first not in done:
                    raise HvpipeError(f"Rank {rank} should run {first} before {action}. Received: after it")


def check_messages(schedule: Schedule, needs: Needs, made: Sequence[Program]) -> None:
    """Check that every result for another rank is sent once after it is made, and received before its use."""
    for rank, (program, actions) in enumerate(zip(made, schedule.actions, strict=True)):
        ran = tuple(step for step in program if isinstance(step, Action))
        if ran != actions:
            raise HvpipeError(
                f"Rank {rank}'s program should run its actions of the schedule, in their order. "
                f"Received: {' '.join(map(str, ran)) or 'none'}"
            )
        done: set[Action] = set()
        posted: set[Action | Message] = set()
        for step in program:
            if isinstance(step, Send):
                if step.message.source != rank or step.message.producer not in done:
                    raise HvpipeError(f"Rank {rank} should send its own results. Received: {step.message}")
            elif isinstance(step, Receive):
                posted.add(step.message)
            else:
                for need in needs[step]:
                    source = schedule.rank_of(need)
                    lacking = need if source == rank else Message(need, step, source, rank)
                    if lacking not in done and lacking not in posted:
                        raise HvpipeError(
                            f"Rank {rank} should have {need} of rank {source} before {step}. "
                            f"Received: {'no receive' if source != rank else 'it comes later'}"
                        )
                done.add(step)
    sends = Counter(step.message for program in made for step in program if isinstance(step, Send))
    receives = Counter(step.message for program in made for step in program if isinstance(step, Receive))
    for message in [*sends, *receives]:
        if (sends[message], receives[message]) != (1, 1):
            raise HvpipeError(
                f"Every message should be sent once and received once. "
                f"Received: {message}: sent {sends[message]} times, received {receives[message]} times"
            )


def check_links(made: Sequence[Program], capacity: int = 1) -> None:
    """Check that all programs end on links that hold `capacity` messages each.

    A link delivers in order. A receive never waits. An action waits for its messages. A send waits while its
    link is full; with capacity 0, until its receive is posted. The engine's sends never wait, so it does at
    least as well.
    """
    if capacity < 0:
        raise HvpipeError(f"capacity should be 0 or more. Received: capacity={capacity}")
    inputs: dict[Action, list[Message]] = defaultdict(list)
    for program in made:
        for step in program:
            if isinstance(step, Receive):
                inputs[step.message.consumer].append(step.message)
    links = _Links(capacity)
    places = [0] * len(made)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(made):
            while places[rank] < len(program) and links.run(program[places[rank]], inputs):
                places[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {_waiting(program[place])}"
        for rank, (program, place) in enumerate(zip(made, places, strict=True))
        if place < len(program)
    ]
    if stuck:
        raise HvpipeError(
            f"A schedule should not deadlock where links hold {capacity} messages. "
            f"Received: {'; '.join(stuck)}"
        )


def _waiting(step: Step) -> str:
    return f"the send of {step.message}" if isinstance(step, Send) else f"{step}, for its messages"


class _Links:
    """Messages under way: sent but not yet received, and receives posted but not yet sent to."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.waiting: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.posted: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.arrived: set[Message] = set()

    def run(self, step: Step, inputs: dict[Action, list[Message]]) -> bool:
        """Run the step; return False if it has to wait."""
        if isinstance(step, Action):
            return self.arrived.issuperset(inputs.get(step, ()))
        link = (step.message.source, step.message.target)
        if isinstance(step, Receive):
            self.posted[link].append(step.message)
        elif len(self.waiting[link]) >= self.capacity and not self.posted[link]:
            return False
        else:
            self.waiting[link].append(step.message)
        while self.waiting[link] and self.posted[link]:
            sent, awaited = self.waiting[link].popleft(), self.posted[link].popleft()
            if sent != awaited:
                raise HvpipeError(
                    f"Rank {link[1]} should receive from rank {link[0]} in the order of the sends. "
                    f"Received: {sent}, where {awaited} is awaited"
                )
            self.arrived.add(sent)
        return True


def _peak_inbox(program: Program) -> int:
    inputs = Counter(step.message.consumer for step in program if isinstance(step, Receive))
    held = peak = 0
    for step in program:
        if isinstance(step, Receive):
            held += 1
            peak = max(peak, held)
        elif isinstance(step, Action):
            held -= inputs[step]
    return peak
