"""Programs of ranks: the inputs of each action, and the sends and receives between actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hvpipe.errors import HvpipeError
from hvpipe.schedule.action import Action
from hvpipe.schedule.schedule import Schedule


@dataclass(frozen=True)
class Dataflow:
    """The dataflow between stages of a model: which stages use which stages' outputs.

    An edge may skip stages (a skip connection). A stage without incoming edges has its own inputs; a stage
    without outgoing edges has its own loss.

    Args:
        stages: Number of stages.
        edges: Pairs (from, to) of stage numbers, each to a later stage and listed once.

    Raises:
        HvpipeError: If an edge does not lead to a later stage, or is listed twice.

    Example:
        ```python
        Dataflow(3, ((0, 1), (1, 2), (0, 2)))  # a chain of three, and a skip connection
        ```
    """

    stages: int
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        wrong = [edge for edge in self.edges if not 0 <= edge[0] < edge[1] < self.stages]
        if wrong or len(set(self.edges)) < len(self.edges):
            raise HvpipeError(
                f"Edges should lead, once each, from one of {self.stages} stages to a later one. "
                f"Received: edges={wrong or list(self.edges)}"
            )

    @staticmethod
    def chain(stages: int) -> Dataflow:
        """Return the dataflow in which each stage uses the output of the stage before it."""
        return Dataflow(stages, tuple((stage, stage + 1) for stage in range(stages - 1)))


def checked_dataflow(schedule: Schedule, dataflow: Dataflow | None) -> Dataflow:
    """Return the dataflow after checking that it fits the schedule; None stands for a chain of its stages."""
    dataflow = dataflow or Dataflow.chain(schedule.stages)
    if dataflow.stages != schedule.stages:
        raise HvpipeError(
            f"The dataflow should have the schedule's {schedule.stages} stages. "
            f"Received: {dataflow.stages} stages"
        )
    return dataflow


Needs = Mapping[Action, tuple[Action, ...]]
"""The actions whose results each action takes; a key for every action of a schedule."""


def needs_of(schedule: Schedule, dataflow: Dataflow | None = None) -> Needs:
    """Return the actions whose results each action of the schedule takes, in the order of their stages.

    A forward takes the outputs of the stages it uses. A backward takes its own forward and the gradients of
    all stages that used its output. W takes its I. Without a dataflow, the stages form a chain.
    """
    dataflow = checked_dataflow(schedule, dataflow)
    uses: dict[int, list[int]] = defaultdict(list)
    users: dict[int, list[int]] = defaultdict(list)
    for source, user in sorted(dataflow.edges):
        uses[user].append(source)
        users[source].append(user)
    # A dict, not a set: all ranks must see the same order.
    table = dict.fromkeys(action for actions in schedule.actions for action in actions)
    needs: dict[Action, tuple[Action, ...]] = {}
    for action in table:
        i, stage = action.microbatch, action.stage
        if action.kind == "F":
            needs[action] = tuple(Action("F", i, source) for source in uses[stage])
        elif action.kind == "W":
            needs[action] = (Action("I", i, stage),)
        else:
            split = (Action("I", i, user) for user in users[stage])
            gradients = (a if a in table else Action("B", i, a.stage) for a in split)
            needs[action] = (Action("F", i, stage), *gradients)
    return needs


@dataclass(frozen=True)
class Message:
    """A tensor, or its gradient, from `producer` on rank `source` to `consumer` on rank `target`."""

    producer: Action
    consumer: Action
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.producer} for {self.consumer} (rank {self.source} to {self.target})"


def messages_of(schedule: Schedule, needs: Needs) -> dict[Action, list[Message]]:
    """Return the messages that each action sends to other ranks when it is done, the nearest stage first."""
    messages: dict[Action, list[Message]] = defaultdict(list)
    for consumer, producers in needs.items():
        target = schedule.rank_of(consumer)
        for producer in producers:
            source = schedule.rank_of(producer)
            if source != target:
                messages[producer].append(Message(producer, consumer, source, target))
    for producer, sent in messages.items():
        sent.sort(key=lambda message: (abs(message.consumer.stage - producer.stage), message.consumer.stage))
    return dict(messages)


@dataclass(frozen=True)
class Send:
    """Hand the message to the network, without waiting."""

    message: Message


@dataclass(frozen=True)
class Receive:
    """Post the receive of the message, without waiting; its consumer waits for it."""

    message: Message


Step = Action | Send | Receive
Program = tuple[Step, ...]
"""One rank's steps in order: its actions, with sends and receives between them."""


def programs(schedule: Schedule, needs: Needs) -> tuple[Program, ...]:
    """Put sends and receives between the actions of all ranks, from one global order.

    The order goes by rounds. In each round, every rank runs its next action if earlier rounds made all of the
    action's inputs. A round first posts the receives of its results, then runs the actions, then sends:

    rank 0 | F0          send F0 | F1          send F1 |
    rank 1 | receive F0          | receive F1  F0      | F1

    So a receive is posted one action before its message is made, and both ends of a link see its messages in
    the same order. The ranks cannot deadlock, even if a send waited until its receive is posted.

    Raises:
        HvpipeError: If the schedule itself deadlocks; the message says which action each rank waits for.
    """
    messages = messages_of(schedule, needs)
    steps: list[list[Step]] = [[] for _ in range(schedule.ranks)]
    places = [0] * schedule.ranks
    done: set[Action] = set()
    while len(done) < len(needs):
        ready = [
            (rank, actions[place])
            for rank, (actions, place) in enumerate(zip(schedule.actions, places, strict=True))
            if place < len(actions) and done.issuperset(needs[actions[place]])
        ]
        if not ready:
            raise HvpipeError(_standstill(schedule, needs, places, done))
        sent = [message for _, action in ready for message in messages.get(action, ())]
        for message in sent:
            steps[message.target].append(Receive(message))
        for rank, action in ready:
            steps[rank].append(action)
            places[rank] += 1
        for message in sent:
            steps[message.source].append(Send(message))
        done.update(action for _, action in ready)
    return tuple(map(tuple, steps))


@dataclass(frozen=True)
class RankProgram:
    """What one rank runs in a step of the first `microbatches` micro-batches of a schedule.

    Attributes:
        schedule: The schedule, which may have more micro-batches.
        steps: The rank's actions, sends and receives, in order.
        rank: The rank's number in the schedule.
        microbatches: The micro-batches that run.
    """

    schedule: Schedule
    steps: Program
    rank: int
    microbatches: int

    @cached_property
    def stages(self) -> frozenset[int]:
        """The stages that the rank runs in the step."""
        return frozenset(step.stage for step in self.steps if isinstance(step, Action))

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """The stages, on any rank, that run the backward in two parts (I and W)."""
        return frozenset(a.stage for actions in self.schedule.actions for a in actions if a.kind == "I")

    @staticmethod
    def forward_only(schedule: Schedule, dataflow: Dataflow, rank: int, microbatches: int) -> RankProgram:
        """Return the program of a schedule's forwards, in its order, for evaluate and predict."""
        actions = tuple(tuple(a for a in of_rank if a.kind == "F") for of_rank in schedule.actions)
        forward = Schedule("forward", schedule.stages, schedule.microbatches, actions)
        return RankProgram.first(forward, programs(forward, needs_of(forward, dataflow)), rank, microbatches)

    @staticmethod
    def first(schedule: Schedule, of_ranks: tuple[Program, ...], rank: int, microbatches: int) -> RankProgram:
        """Return the first micro-batches of one rank's program, out of all ranks' `programs`.

        All ranks leave out the rest, so none can deadlock: no remaining step waits for one that is left out.
        """
        steps = tuple(step for step in of_ranks[rank] if _microbatch_of(step) < microbatches)
        return RankProgram(schedule, steps, rank, microbatches)


def _microbatch_of(step: Step) -> int:
    return step.microbatch if isinstance(step, Action) else step.message.producer.microbatch


def _standstill(schedule: Schedule, needs: Needs, places: list[int], done: set[Action]) -> str:
    """Return the error message for ranks that all wait."""
    waits = []
    for rank, (actions, place) in enumerate(zip(schedule.actions, places, strict=True)):
        if place < len(actions):
            missing = next(action for action in needs[actions[place]] if action not in done)
            waits.append(
                f"rank {rank} at {actions[place]} waits for {missing} of rank {schedule.rank_of(missing)}"
            )
    return f"A schedule should not deadlock. Received: {'; '.join(waits)}"
