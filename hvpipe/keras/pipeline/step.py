"""One step of a pipeline on this rank: runs its program of actions, sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvpipe.keras.graph.stage import StageFunctions
from hvpipe.keras.graph.stage_cuts import Wire
from hvpipe.keras.pipeline.context import PipelineContext
from hvpipe.keras.pipeline.microbatches import Batch, split_batch
from hvpipe.keras.pipeline.tensor_channel import PendingTensor
from hvpipe.schedule.action import Action
from hvpipe.schedule.program import Message, RankProgram, Receive, Send

Values = list[Any]
Mode = Literal["train", "evaluate", "predict"]
Observe = Callable[[Sequence[Any], Sequence[Any], Mapping[int, Any]], None]
"""Takes targets, outputs and masks (by the output's index) of a micro-batch of the last stage."""


@dataclass
class StepResult:
    """The result of this rank's part of a step.

    Attributes:
        loss: The sum of the micro-batches' losses here, each weighted by its share of the batch's samples.
        samples: The samples of the micro-batches whose outputs this rank computed.
        outputs: The model's outputs by micro-batch, after `predict` on a rank with the last stage.
    """

    loss: float = 0.0
    samples: int = 0
    outputs: dict[int, Values] = field(default_factory=dict)


@dataclass
class PipelineStep:
    """A step on this rank, without the update. `run` runs it, once.

    Attributes:
        context: The objects that the parts of the pipeline share.
        functions: The functions of this rank's stages, by stage.
        program: What this rank runs.
        batch: The batch. Only the batch on the first stage's rank counts.
        mode: "train" runs forwards and backwards, "evaluate" forwards in inference mode with the loss, and
            "predict" forwards alone: a rank with the last stage gets `StepResult.outputs`.
        observe: Called for each micro-batch of the last stage, except in "predict".
        stage_done: Called with a stage when its gradients are complete.
        loss_scale: The loss is multiplied by this factor before its gradients are computed.
        moved_by: `moved_by(stage, microbatch)` surrounds each forward in "train", which may move averages.
    """

    context: PipelineContext
    functions: Mapping[int, StageFunctions]
    program: RankProgram
    batch: Batch
    mode: Mode
    observe: Observe = lambda *_: None
    stage_done: Callable[[int], None] = lambda stage: None
    loss_scale: float = 1.0
    moved_by: Callable[[int, int], AbstractContextManager[None]] = lambda *_: nullcontext()

    def __post_init__(self) -> None:
        context, program = self.context, self.program
        self._stages, self._ranks, self._channel = (
            context.layout.stages,
            context.layout.ranks,
            context.channel,
        )
        self._recorded = context.session.engine.recorded
        self._slices = split_batch(self.batch.samples, program.microbatches)
        self._inputs: dict[tuple[int, int], list[PendingTensor] | Values] = {}  # by stage and micro-batch
        self._local: dict[tuple[Action, Action], Values] = {}  # results, by producer and consumer
        self._to_send: dict[tuple[Action, int], Values] = {}  # by producer and the consumer's stage
        self._pending: dict[Message, list[PendingTensor]] = {}
        self._saved: dict[tuple[int, int], Values] = {}  # for the backward, by stage and micro-batch
        self._saved_for_weights: dict[tuple[int, int], Values] = {}  # from I to W
        last_actions = [s.stage for s in program.steps if isinstance(s, Action) and s.kind in "BW"]
        self._backwards_left = {stage: last_actions.count(stage) for stage in self.functions}
        self._complete: list[int] = []  # stages with complete gradients, not reported yet
        self._accumulating: set[int] = set()  # stages whose accumulators hold a gradient of this step
        self._losses: list[tuple[Any, float]] = []
        self._result = StepResult()

    def run(self) -> StepResult:
        """Run the step, and return loss, samples and outputs of this rank."""
        self._post_inputs()
        for step in self.program.steps:
            if isinstance(step, Receive):
                self._receive(step.message)
            elif isinstance(step, Send):
                self._send(step.message)
            else:
                # Only now: the sends after the last action come first, because other ranks wait for them.
                self._report_complete()
                (self._forward if step.kind == "F" else self._backward)(step)
        self._report_complete()
        self._result.loss = float(sum(weight * float(loss) for loss, weight in self._losses))
        return self._result

    def _report_complete(self) -> None:
        while self._complete:
            self.stage_done(self._complete.pop())

    # The model's inputs and targets ------------------------------------------------------------------------

    def _post_inputs(self) -> None:
        """Post all sends and receives of inputs and targets, without waiting.

        The rank that runs micro-batch 0 of the first stage sends them to all other ranks that read any of
        them; only its batch counts.
        """
        batch, program, ranks = self.batch, self.program, self._ranks
        rank_of = program.schedule.rank_of
        root = rank_of(Action("F", 0, 0))
        for stage, cut in enumerate(self._stages.cuts):
            is_last = stage == len(self._stages.cuts) - 1
            indices = [self._stages.graph.inputs.index(number) for number in cut.inputs]
            whole = [batch.inputs[index] for index in indices]
            whole += batch.targets if is_last and self.mode != "predict" else ()
            if not whole:
                continue
            sends = any(rank_of(Action("F", i, stage)) != root for i in range(program.microbatches))
            # What is sent is cut on the host, where messages are.
            on_host = [np.asarray(x) for x in whole] if program.rank == root and sends else []
            for i, part in enumerate(self._slices):
                owner = rank_of(Action("F", i, stage))
                what = f"micro-batch {i} of the batch for stage {stage}"
                if owner == program.rank == root:
                    self._inputs[stage, i] = [x[part] for x in whole]
                elif program.rank == root:
                    for x in on_host:
                        self._channel.send(ranks[owner], x[part], x.dtype, None, what, on_host=True)
                elif owner == program.rank:
                    self._inputs[stage, i] = [
                        self._channel.receive(ranks[root], x.dtype, None, what, on_host=True) for x in whole
                    ]

    def _samples(self, i: int) -> int:
        """Return the samples of micro-batch `i`."""
        return int(self._slices[i].stop - self._slices[i].start)

    def _take_inputs(self, stage: int, i: int) -> Values:
        """Wait for a stage's inputs and targets of micro-batch `i`, and return them."""
        found = self._inputs.pop((stage, i), [])
        return [x.wait() if isinstance(x, PendingTensor) else x for x in found]

    # Forward ----------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        i, stage = action.microbatch, action.stage
        cut, functions = self._stages.cuts[stage], self.functions[stage]
        values: Values = []
        for source in sorted(cut.receives):
            values.extend(self._take(Action("F", i, source), action))
        given = self._take_inputs(stage, i)
        values.extend(given)
        with self._recorded("forward", str(action)):
            if self.mode == "train":
                with self.moved_by(stage, i):
                    found, self._saved[stage, i] = functions.training.forward(values)
            else:
                found = (functions.prediction if self.mode == "predict" else functions.evaluation)(*values)
        made = dict(zip(cut.outputs, found, strict=False))
        for target, wires in cut.sends.items():
            self._put(action, Action("F", i, target), [made[wire] for wire in wires])
        self._record_results(functions, i, given[len(cut.inputs) :], found[len(cut.outputs) :])

    def _record_results(
        self, functions: StageFunctions, i: int, targets: Sequence[Any], results: Sequence[Any]
    ) -> None:
        """Keep a forward's results other than its wires: the loss, the model's outputs, and their masks."""
        samples = self._samples(i)
        with_loss = functions.has_loss and self.mode != "predict"
        if with_loss:
            self._losses.append((results[0], samples / self.batch.samples))
        if not functions.outputs_of_model:
            return
        first = int(with_loss)
        outputs = list(results[first : first + functions.outputs_of_model])
        self._result.samples += samples
        if self.mode == "predict":
            self._result.outputs[i] = outputs
        else:
            masks = dict(zip(functions.masked, results[first + len(outputs) :], strict=True))
            self.observe(targets, outputs, masks)

    # Backward ---------------------------------------------------------------------------------------------

    def _backward(self, action: Action) -> None:
        i, stage = action.microbatch, action.stage
        gradient = self.functions[stage].training
        if action.kind == "W":
            with self._recorded("backward", str(action)):
                gradient.backward_weights(self._saved_for_weights.pop((stage, i)), self._is_first(stage))
        else:
            upstream = self._upstream_gradients(action)
            saved = self._saved.pop((stage, i))
            with self._recorded("backward", str(action)):
                if action.kind == "B":
                    found = gradient.backward(saved, upstream, self._is_first(stage))
                else:
                    found, self._saved_for_weights[stage, i] = gradient.backward_inputs(saved, upstream)
            self._put_gradients(action, found)
        if action.kind in "BW":
            self._backwards_left[stage] -= 1
            if self._backwards_left[stage] == 0:
                self._complete.append(stage)

    def _is_first(self, stage: int) -> bool:
        """Return whether a stage's accumulators are to be set, not added to."""
        first = stage not in self._accumulating
        self._accumulating.add(stage)
        return first

    def _upstream_gradients(self, action: Action) -> Values:
        """Return the gradients of a stage's floating outputs, summed over their users, then of its loss."""
        i, stage = action.microbatch, action.stage
        cut = self._stages.cuts[stage]
        sums: dict[Wire, Any] = {}
        for target in sorted(cut.sends):
            wires = self._stages.floating(cut.sends[target])
            received = self._take(self._backward_of(i, target), action)
            for wire, gradient in zip(wires, received, strict=True):
                sums[wire] = sums[wire] + gradient if wire in sums else gradient
        found = [sums[wire] for wire in self._stages.floating(cut.outputs)]
        if self.functions[stage].has_loss:
            share = self.loss_scale * self._samples(i) / self.batch.samples
            found.append(tf.constant(share, self.functions[stage].loss_dtype))
        return found

    def _put_gradients(self, action: Action, found: Values) -> None:
        """Keep the gradients of the tensors that the stage received, for the stages that made them."""
        cut = self._stages.cuts[action.stage]
        wires_in = self._stages.floating(self.functions[action.stage].wires_in)
        of_wire = dict(zip(wires_in, found, strict=True))
        for source in cut.receives:
            wires = self._stages.floating(cut.receives[source])
            consumer = self._backward_of(action.microbatch, source)
            self._put(action, consumer, [of_wire[wire] for wire in wires])

    def _backward_of(self, i: int, stage: int) -> Action:
        """Return the action that computes the gradients a stage sends back: I if its backward is split."""
        return Action("I" if stage in self.program.split_stages else "B", i, stage)

    # Between actions: activations and gradients, on this rank or between ranks ----------------------------

    def _put(self, producer: Action, consumer: Action, values: Values) -> None:
        """Keep what `producer` made for `consumer`, on this rank or on another."""
        if self.program.schedule.rank_of(consumer) == self.program.rank:
            self._local[producer, consumer] = values
        else:
            self._to_send[producer, consumer.stage] = values

    def _take(self, producer: Action, consumer: Action) -> Values:
        """Return what `producer` made for `consumer`, on this rank or on another; waits for it."""
        if (producer, consumer) in self._local:
            return self._local.pop((producer, consumer))
        rank_of = self.program.schedule.rank_of
        message = Message(producer, consumer, rank_of(producer), rank_of(consumer))
        return [tensor.wait() for tensor in self._pending.pop(message)]

    def _receive(self, message: Message) -> None:
        """Post the receives of a message."""
        peer, i = self._ranks[message.source], message.producer.microbatch
        self._pending[message] = [
            self._channel.receive(peer, self._stages.spec(wire).dtype, self._shape(wire, i), str(message))
            for wire in self._wires(message)
        ]

    def _send(self, message: Message) -> None:
        """Start to send a message whose values its producer has put."""
        peer, i = self._ranks[message.target], message.producer.microbatch
        values = self._to_send.pop((message.producer, message.consumer.stage))
        for wire, value in zip(self._wires(message), values, strict=True):
            self._channel.send(peer, value, self._stages.spec(wire).dtype, self._shape(wire, i), str(message))

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
        return [self._samples(i) if axes[0] is None else axes[0], *axes[1:]]
