"""What an action waits for, and which rank sends what to whom and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from hvpipe.errors import HvpipeError
from hvpipe.schedule.action import Action
from hvpipe.schedule.schedule import Schedule


@dataclass(frozen=True)
class Dataflow:
    """Which stages of the model use the output of which: `edges` of (from, to), each to a later stage.

    An edge may pass over stages (a skip connection). A stage that no edge leads to has inputs of its own,
    one that no edge leaves has a loss of its own.
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
        """Each stage uses the output of the one before it."""
        return Dataflow(stages, tuple((stage, stage + 1) for stage in range(stages - 1)))


def dataflow_of(schedule: Schedule, dataflow: Dataflow | None) -> Dataflow:
    """The dataflow, found to fit the schedule; the chain of its stages where none is given."""
    dataflow = dataflow or Dataflow.chain(schedule.stages)
    if dataflow.stages != schedule.stages:
        raise HvpipeError(
            f"The dataflow should be between the schedule's {schedule.stages} stages. "
            f"Received: {dataflow.stages} stages"
        )
    return dataflow


Needs = Mapping[Action, tuple[Action, ...]]
"""The actions whose results each action takes; a key for every action of a schedule."""


def needs_of(schedule: Schedule, dataflow: Dataflow | None = None) -> Needs:
    """What each action of the schedule takes from others, in the order of the stages; by default of a chain.

    A forward takes the outputs of the stages it uses; a backward its own forward and the gradients of all
    stages that used its output; W its I.
    """
    dataflow = dataflow_of(schedule, dataflow)
    uses: dict[int, list[int]] = defaultdict(list)
    users: dict[int, list[int]] = defaultdict(list)
    for source, user in sorted(dataflow.edges):
        uses[user].append(source)
        users[source].append(user)
    # Not a set: all ranks must see the same order.
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
    """What `producer` on rank `source` makes for `consumer` on rank `target`: an output, or its gradient."""

    producer: Action
    consumer: Action
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.producer} for {self.consumer} (rank {self.source} to {self.target})"


def messages_of(schedule: Schedule, needs: Needs) -> dict[Action, list[Message]]:
    """What each action sends to other ranks when it is done; first what goes to the nearest stage."""
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
    """Hand the message to the network; does not wait for anybody."""

    message: Message


@dataclass(frozen=True)
class Receive:
    """Say where the message shall go; only its consumer waits for it."""

    message: Message


Step = Action | Send | Receive
Program = tuple[Step, ...]
"""What one rank does, in order: its actions, with what it sends and receives put in between."""


def programs(schedule: Schedule, needs: Needs) -> tuple[Program, ...]:
    """Put sends and receives between the actions of all ranks, from one global order.

    The order is by rounds: in each, every rank whose next action has all it takes from earlier rounds runs
    it. In a round first the receives of what it makes are posted, then the actions run, then they send:

    rank 0 | F0          send F0 | F1          send F1 |
    rank 1 | receive F0          | receive F1  F0      | F1

    So a receive is posted one action before its message is made, both ends of a link see its messages in
    the same order, and the ranks cannot wait for each other in a circle, even if a send waited until its
    receive is posted. Raises HvpipeError where the schedule itself stands still: says who waits for what.
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


def _standstill(schedule: Schedule, needs: Needs, places: list[int], done: set[Action]) -> str:
    waits = []
    for rank, (actions, place) in enumerate(zip(schedule.actions, places, strict=True)):
        if place < len(actions):
            missing = next(action for action in needs[actions[place]] if action not in done)
            waits.append(
                f"rank {rank} at {actions[place]} waits for {missing} of rank {schedule.rank_of(missing)}"
            )
    return f"A schedule's ranks should not wait for each other in a circle. Received: {'; '.join(waits)}"
