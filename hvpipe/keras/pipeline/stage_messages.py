"""Activations and gradients between stages in one step, on this rank or between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvpipe.keras.graph.stage_cuts import Stages, Wire
from hvpipe.keras.pipeline.microbatches import MicrobatchInputs
from hvpipe.keras.pipeline.tensor_channel import PendingTensor, TensorChannel
from hvpipe.schedule.action import Action
from hvpipe.schedule.program import Message, RankProgram


class StageMessages:
    """Holds an action's results until the action that uses them takes them, or until they are sent."""

    def __init__(
        self,
        stages: Stages,
        program: RankProgram,
        ranks: Sequence[int],
        channel: TensorChannel,
        inputs: MicrobatchInputs,
    ) -> None:
        """`ranks[k]` is the world rank that runs rank k of the schedule."""
        self._stages = stages
        self._program = program
        self._ranks = ranks
        self._channel = channel
        self._inputs = inputs
        self._pending: dict[Message, list[PendingTensor]] = {}
        self._local: dict[tuple[Action, Action], list[Any]] = {}  # by producer and consumer
        self._to_send: dict[tuple[Action, int], list[Any]] = {}  # by producer and the consumer's stage

    def receive(self, message: Message) -> None:
        """Post the receives of a message."""
        peer, i = self._ranks[message.source], message.producer.microbatch
        self._pending[message] = [
            self._channel.receive(peer, self._stages.spec(wire).dtype, self._shape(wire, i), str(message))
            for wire in self._wires(message)
        ]

    def send(self, message: Message) -> None:
        """Start to send a message whose values its producer has put."""
        peer, i = self._ranks[message.target], message.producer.microbatch
        values = self._to_send.pop((message.producer, message.consumer.stage))
        for wire, value in zip(self._wires(message), values, strict=True):
            self._channel.send(peer, value, self._stages.spec(wire).dtype, self._shape(wire, i), str(message))

    def put(self, producer: Action, consumer: Action, values: list[Any]) -> None:
        """Keep what `producer` made for `consumer`, on this rank or on another."""
        if self._program.schedule.rank_of(consumer) == self._program.rank:
            self._local[producer, consumer] = values
        else:
            self._to_send[producer, consumer.stage] = values

    def take(self, producer: Action, consumer: Action) -> list[Any]:
        """Return what `producer` made for `consumer`, on this rank or on another; waits for it."""
        if (producer, consumer) in self._local:
            return self._local.pop((producer, consumer))
        rank_of = self._program.schedule.rank_of
        message = Message(producer, consumer, rank_of(producer), rank_of(consumer))
        return [tensor.wait() for tensor in self._pending.pop(message)]

    def _wires(self, message: Message) -> tuple[Wire, ...]:
        """Return the wires of a message: outputs, or the floating ones whose gradients it carries."""
        if message.consumer.kind == "F":
            return self._stages.cuts[message.consumer.stage].receives[message.producer.stage]
        sent = self._stages.cuts[message.consumer.stage].sends[message.producer.stage]
        return self._stages.floating(sent)

    def _shape(self, wire: Wire, i: int) -> list[int] | None:
        """Return the shape of a wire for micro-batch `i`; None unless both ends can tell it."""
        axes = list(self._stages.spec(wire).shape)
        folded = not self._stages.graph.tensors[wire.number].of_samples
        if any(axis is None for axis in axes[1:]) or not axes or folded:
            return None
        return [self._inputs.samples(i) if axes[0] is None else axes[0], *axes[1:]]
