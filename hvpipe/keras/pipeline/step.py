"""One step of a pipeline on this rank: runs its program of actions, sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import tensorflow as tf

from hvpipe.keras.graph.stage import StageFunctions
from hvpipe.keras.graph.stage_cuts import Stages, Wire
from hvpipe.keras.pipeline.microbatches import Batch, MicrobatchInputs
from hvpipe.keras.pipeline.stage_messages import StageMessages
from hvpipe.keras.pipeline.tensor_channel import TensorChannel
from hvpipe.schedule.action import Action
from hvpipe.schedule.program import RankProgram, Receive, Send

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


@dataclass(frozen=True)
class PipelineStep:
    """Runs rank programs with the functions of this rank's stages.

    Attributes:
        stages: All stages of the model.
        functions: The functions of this rank's stages, by stage.
        ranks: `ranks[k]` is the world rank that runs rank k of the schedule.
        channel: Sends and receives tensors.
        recorded: `recorded(category, name)` times a block for the trace.
    """

    stages: Stages
    functions: Mapping[int, StageFunctions]
    ranks: Sequence[int]
    channel: TensorChannel
    recorded: Callable[[str, str], AbstractContextManager[None]]

    def train(
        self,
        program: RankProgram,
        batch: Batch,
        observe: Observe,
        stage_done: Callable[[int], None],
        loss_scale: float = 1.0,
        moved_by: Callable[[int, int], AbstractContextManager[None]] = lambda *_: nullcontext(),
    ) -> StepResult:
        """Run forwards and backwards of a training step, without the update.

        Args:
            program: What this rank runs.
            batch: The batch. Only the batch on the first stage's rank counts.
            observe: Called for each micro-batch of the last stage.
            stage_done: Called with a stage when its gradients are complete.
            loss_scale: The loss is multiplied by this factor before its gradients are computed.
            moved_by: `moved_by(stage, microbatch)` surrounds each forward, which may move averages.

        Returns:
            Loss and samples of this rank.
        """
        run = _StepRun(self, program, batch, observe, "train", stage_done, loss_scale)
        run.moved_by = moved_by
        return run.run()

    def evaluate(self, program: RankProgram, batch: Batch, observe: Observe) -> StepResult:
        """Run the forwards in inference mode, with the loss."""
        return _StepRun(self, program, batch, observe, "evaluate").run()

    def predict(self, program: RankProgram, batch: Batch) -> StepResult:
        """Run the forwards in inference mode; a rank with the last stage gets `StepResult.outputs`."""
        return _StepRun(self, program, batch, lambda *_: None, "predict").run()


class _StepRun:
    """The state of one step while it runs."""

    def __init__(
        self,
        step: PipelineStep,
        program: RankProgram,
        batch: Batch,
        observe: Observe,
        mode: Mode,
        stage_done: Callable[[int], None] = lambda stage: None,
        loss_scale: float = 1.0,
    ) -> None:
        self._stages, self._functions, self._recorded = step.stages, step.functions, step.recorded
        self._program = program
        self._batch = batch
        self._observe, self._stage_done = observe, stage_done
        self._mode = mode
        self._loss_scale = loss_scale
        self._inputs = MicrobatchInputs(
            step.stages, program, step.ranks, step.channel, batch, with_targets=mode != "predict"
        )
        self._messages = StageMessages(step.stages, program, step.ranks, step.channel, self._inputs)
        self._saved: dict[tuple[int, int], Values] = {}  # for the backward, by stage and micro-batch
        self._saved_for_weights: dict[tuple[int, int], Values] = {}  # from I to W
        last_actions = [s.stage for s in program.steps if isinstance(s, Action) and s.kind in "BW"]
        self._backwards_left = {stage: last_actions.count(stage) for stage in step.functions}
        self._complete: list[int] = []  # stages with complete gradients, not reported yet
        self._accumulating: set[int] = set()  # stages whose accumulators hold a gradient of this step
        self._losses: list[tuple[Any, float]] = []
        self._result = StepResult()
        self.moved_by: Callable[[int, int], AbstractContextManager[None]] = lambda *_: nullcontext()

    def run(self) -> StepResult:
        for step in self._program.steps:
            if isinstance(step, Receive):
                self._messages.receive(step.message)
            elif isinstance(step, Send):
                self._messages.send(step.message)
            else:
                # Only now: the sends after the last action come first, because other ranks wait for them.
                self._report_complete()
                (self._forward if step.kind == "F" else self._backward)(step)
        self._report_complete()
        self._result.loss = float(sum(weight * float(loss) for loss, weight in self._losses))
        return self._result

    def _report_complete(self) -> None:
        while self._complete:
            self._stage_done(self._complete.pop())

    def _forward(self, action: Action) -> None:
        i, stage = action.microbatch, action.stage
        cut, functions = self._stages.cuts[stage], self._functions[stage]
        values: Values = []
        for source in sorted(cut.receives):
            values.extend(self._messages.take(Action("F", i, source), action))
        given = self._inputs.take(stage, i)
        values.extend(given)
        with self._recorded("forward", str(action)):
            if self._mode == "train":
                with self.moved_by(stage, i):
                    found, self._saved[stage, i] = functions.training.forward(values)
            else:
                found = (functions.prediction if self._mode == "predict" else functions.evaluation)(*values)
        made = dict(zip(cut.outputs, found, strict=False))
        for target, wires in cut.sends.items():
            self._messages.put(action, Action("F", i, target), [made[wire] for wire in wires])
        self._record_results(functions, i, given[len(cut.inputs) :], found[len(cut.outputs) :])

    def _record_results(
        self, functions: StageFunctions, i: int, targets: Sequence[Any], results: Sequence[Any]
    ) -> None:
        """Keep a forward's results other than its wires: the loss, the model's outputs, and their masks."""
        samples = self._inputs.samples(i)
        with_loss = functions.has_loss and self._mode != "predict"
        if with_loss:
            self._losses.append((results[0], samples / self._batch.samples))
        if not functions.outputs_of_model:
            return
        first = int(with_loss)
        outputs = list(results[first : first + functions.outputs_of_model])
        self._result.samples += samples
        if self._mode == "predict":
            self._result.outputs[i] = outputs
        else:
            masks = dict(zip(functions.masked, results[first + len(outputs) :], strict=True))
            self._observe(targets, outputs, masks)

    def _backward(self, action: Action) -> None:
        i, stage = action.microbatch, action.stage
        gradient = self._functions[stage].training
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
            received = self._messages.take(self._backward_of(i, target), action)
            for wire, gradient in zip(wires, received, strict=True):
                sums[wire] = sums[wire] + gradient if wire in sums else gradient
        found = [sums[wire] for wire in self._stages.floating(cut.outputs)]
        if self._functions[stage].has_loss:
            share = self._loss_scale * self._inputs.samples(i) / self._batch.samples
            found.append(tf.constant(share, self._functions[stage].loss_dtype))
        return found

    def _put_gradients(self, action: Action, found: Values) -> None:
        """Keep the gradients of the tensors that the stage received, for the stages that made them."""
        cut = self._stages.cuts[action.stage]
        wires_in = self._stages.floating(self._functions[action.stage].wires_in)
        of_wire = dict(zip(wires_in, found, strict=True))
        for source in cut.receives:
            wires = self._stages.floating(cut.receives[source])
            consumer = self._backward_of(action.microbatch, source)
            self._messages.put(action, consumer, [of_wire[wire] for wire in wires])

    def _backward_of(self, i: int, stage: int) -> Action:
        """Return the action that computes the gradients a stage sends back: I if its backward is split."""
        return Action("I" if stage in self._program.split_stages else "B", i, stage)
