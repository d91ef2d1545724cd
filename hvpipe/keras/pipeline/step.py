"""One training step of a pipeline on this rank: its program of actions, sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import tensorflow as tf

from hvpipe.keras.graph.stage import StageFunctions, Stages, Wire
from hvpipe.keras.pipeline.tensor_channel import Expected, Mail
from hvpipe.schedule.action import Action
from hvpipe.schedule.program import Message, Program, Receive, Send, Step, needs_of, programs
from hvpipe.schedule.schedule import Schedule

Values = list[Any]
Observe = Callable[[Sequence[Any], Sequence[Any], Mapping[int, Any]], None]
"""Called with targets, outputs and (by the output's place) masks of a micro-batch of the last stage."""


@dataclass(frozen=True)
class Course:
    """A schedule made ready to run: every rank's program. `place` is this rank's number in it.

    `microbatches` are those that the programs run, the first of the schedule's.
    """

    schedule: Schedule
    programs: tuple[Program, ...]
    place: int
    microbatches: int

    @property
    def program(self) -> Program:
        return self.programs[self.place]

    @cached_property
    def stages(self) -> frozenset[int]:
        """The stages that this rank runs."""
        return frozenset(step.stage for step in self.program if isinstance(step, Action))

    @cached_property
    def split(self) -> frozenset[int]:
        """The stages that run the backward in two parts."""
        return frozenset(a.stage for actions in self.schedule.actions for a in actions if a.kind == "I")

    @staticmethod
    def forward_only(schedule: Schedule, stages: Stages, place: int, microbatches: int) -> Course:
        """The forwards of a schedule's first micro-batches, in its order: for evaluate and predict."""
        actions = tuple(tuple(a for a in of_rank if a.kind == "F") for of_rank in schedule.actions)
        forward = Schedule("forward", schedule.stages, schedule.microbatches, actions)
        whole = programs(forward, needs_of(forward, stages.dataflow))
        return Course(forward, _first(whole, microbatches), place, microbatches)

    @staticmethod
    def beginning(schedule: Schedule, whole: tuple[Program, ...], place: int, microbatches: int) -> Course:
        """A schedule's first micro-batches, of the programs of all of it; a rank may have none of them."""
        return Course(schedule, _first(whole, microbatches), place, microbatches)


def _first(whole: tuple[Program, ...], microbatches: int) -> tuple[Program, ...]:
    """What is left of programs that end still ends: nothing waits for what is left out."""
    return tuple(tuple(s for s in program if _microbatch_of(s) < microbatches) for program in whole)


def _microbatch_of(step: Step) -> int:
    return step.microbatch if isinstance(step, Action) else step.message.producer.microbatch


@dataclass(frozen=True)
class Batch:
    """A batch as this rank has it: flat model inputs and flat targets (with sample weights), and its size."""

    inputs: Sequence[Any]
    targets: Sequence[Any]
    samples: int


@dataclass
class Outcome:
    """Of a step on this rank: the weighted sum of its losses, and what the last stage computed."""

    loss: float = 0.0
    samples: int = 0  # of the micro-batches whose outputs are here
    outputs: dict[int, Values] = field(default_factory=dict)


class PipelineStep:
    """Runs courses with the functions of this rank's stages.

    `ranks` are the world ranks by their place in the schedule. The batch of the first stage's rank counts:
    it hands the others what they need of it. `recorded(category, name)` times a block for the trace.
    """

    def __init__(
        self,
        stages: Stages,
        functions: Mapping[int, StageFunctions],
        ranks: Sequence[int],
        mail: Mail,
        recorded: Callable[[str, str], AbstractContextManager[None]],
    ) -> None:
        self._recorded = recorded
        self._stages = stages
        self._functions = functions
        self._ranks = ranks
        self._mail = mail

    def train(
        self,
        course: Course,
        batch: Batch,
        observe: Observe,
        stage_done: Callable[[int], None],
        loss_scale: float = 1.0,
    ) -> Outcome:
        """All actions of a training step, up to the gradients, of the loss times `loss_scale`.

        `observe(targets, outputs, masks)` is called for each micro-batch of the last stage,
        `stage_done(stage)` when a stage's gradients are complete.
        """
        return _Pass(self, course, batch, observe, stage_done, "train", loss_scale).run()

    def evaluate(
        self,
        course: Course,
        batch: Batch,
        observe: Observe,
    ) -> Outcome:
        """Forwards in inference mode, with the loss."""
        return _Pass(self, course, batch, observe, lambda _stage: None, "evaluate").run()

    def predict(self, course: Course, batch: Batch) -> Outcome:
        """Forwards in inference mode; `Outcome.outputs` by micro-batch where the last stage is."""
        return _Pass(self, course, batch, lambda *_: None, lambda _stage: None, "predict").run()


def parts_of(samples: int, microbatches: int) -> list[slice]:
    """Cut a batch into micro-batches whose sizes differ by one at most, larger ones first."""
    ends = [0]
    for i in range(microbatches):
        ends.append(ends[-1] + samples // microbatches + (i < samples % microbatches))
    return [slice(a, b) for a, b in pairwise(ends)]


class _Pass:
    """What one step keeps while it runs."""

    def __init__(
        self,
        step: PipelineStep,
        course: Course,
        batch: Batch,
        observe: Observe,
        stage_done: Callable[[int], None],
        mode: str,
        loss_scale: float = 1.0,
    ) -> None:
        self._stages, self._functions = step._stages, step._functions
        self._ranks, self._mail = step._ranks, step._mail
        self._recorded = step._recorded
        self._course, self._schedule = course, course.schedule
        self._batch = batch
        self._observe, self._stage_done = observe, stage_done
        self._mode = mode
        self._loss_scale = loss_scale
        self._parts = parts_of(batch.samples, course.microbatches)
        self._expected: dict[Message, list[Expected]] = {}
        self._local: dict[tuple[Action, Action], Values] = {}  # by producer and consumer
        self._away: dict[tuple[Action, int], Values] = {}  # what is to be sent, by producer and stage
        self._fed: dict[tuple[int, int], list[Expected] | Values] = {}  # inputs and targets, by (stage, i)
        self._kept: dict[tuple[int, int], Values] = {}  # for the backward
        self._further: dict[tuple[int, int], Values] = {}  # for the weights' part
        done = [s.stage for s in course.program if isinstance(s, Action) and s.kind in "BW"]
        self._left = {stage: done.count(stage) for stage in step._functions}
        self._complete: list[int] = []  # stages whose gradients are, and nobody was told
        self._begun: set[int] = set()
        self._losses: list[tuple[Any, float]] = []
        self._outcome = Outcome()

    def run(self) -> Outcome:
        self._hand_out()
        for step in self._course.program:
            if isinstance(step, Receive):
                self._expected[step.message] = self._expect(step.message)
            elif isinstance(step, Send):
                self._send(step.message)
            else:
                # Behind the sends of the last action, which others wait for.
                self._tell_complete()
                (self._forward if step.kind == "F" else self._backward)(step)
        self._tell_complete()
        self._outcome.loss = float(sum(weight * float(loss) for loss, weight in self._losses))
        return self._outcome

    def _tell_complete(self) -> None:
        while self._complete:
            self._stage_done(self._complete.pop())

    # The batch ----------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give every stage its micro-batches' inputs and targets, from the rank that has the first stage."""
        root = self._schedule.rank_of(Action("F", 0, 0))
        for stage, cut in enumerate(self._stages.cuts):
            last = stage == len(self._stages.cuts) - 1
            targets = self._batch.targets if last and self._mode != "predict" else ()
            places = [self._stages.graph.inputs.index(number) for number in cut.inputs]
            whole = [*(self._batch.inputs[place] for place in places), *targets]
            if not whole:
                continue
            for i, part in enumerate(self._parts):
                home = self._schedule.rank_of(Action("F", i, stage))
                what = f"micro-batch {i} of the batch for stage {stage}"
                if home == self._course.place == root:
                    self._fed[stage, i] = [x[part] for x in whole]
                elif self._course.place == root:
                    for x in whole:
                        self._mail.send(self._ranks[home], x[part], x.dtype, None, what, on_host=True)
                elif home == self._course.place:
                    peer = self._ranks[root]
                    self._fed[stage, i] = [
                        self._mail.expect(peer, x.dtype, None, what, on_host=True) for x in whole
                    ]

    def _given(self, stage: int, i: int) -> Values:
        return [x.take() if isinstance(x, Expected) else x for x in self._fed.pop((stage, i), [])]

    # Messages -----------------------------------------------------------------------------------------

    def _wires(self, message: Message) -> tuple[Wire, ...]:
        """What the message carries: outputs, or the gradients of the floating ones."""
        if message.consumer.kind == "F":
            return self._stages.cuts[message.consumer.stage].receives[message.producer.stage]
        sent = self._stages.cuts[message.consumer.stage].sends[message.producer.stage]
        return self._stages.floating(sent)

    def _shape(self, wire: Wire, i: int) -> list[int] | None:
        """The shape of a wire for micro-batch i, where both ends can tell."""
        axes = list(self._stages.spec(wire).shape)
        folded = not self._stages.graph.tensors[wire.number].of_samples
        if any(axis is None for axis in axes[1:]) or not axes or folded:
            return None
        samples = self._parts[i].stop - self._parts[i].start
        return [samples if axes[0] is None else axes[0], *axes[1:]]

    def _expect(self, message: Message) -> list[Expected]:
        peer, i = self._ranks[message.source], message.producer.microbatch
        return [
            self._mail.expect(peer, self._stages.spec(wire).dtype, self._shape(wire, i), str(message))
            for wire in self._wires(message)
        ]

    def _send(self, message: Message) -> None:
        peer, i = self._ranks[message.target], message.producer.microbatch
        values = self._away.pop((message.producer, message.consumer.stage))
        for wire, value in zip(self._wires(message), values, strict=True):
            self._mail.send(peer, value, self._stages.spec(wire).dtype, self._shape(wire, i), str(message))

    def _taken(self, producer: Action, consumer: Action) -> Values:
        """What the producer made for the consumer, here or elsewhere."""
        if (producer, consumer) in self._local:
            return self._local.pop((producer, consumer))
        message = Message(
            producer, consumer, self._schedule.rank_of(producer), self._schedule.rank_of(consumer)
        )
        return [expected.take() for expected in self._expected.pop(message)]

    def _give(self, producer: Action, consumer: Action, values: Values) -> None:
        if self._schedule.rank_of(consumer) == self._course.place:
            self._local[producer, consumer] = values
        else:
            self._away[producer, consumer.stage] = values

    # Actions ------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        i, stage = action.microbatch, action.stage
        cut, functions = self._stages.cuts[stage], self._functions[stage]
        values: Values = []
        for source in sorted(cut.receives):
            values.extend(self._taken(Action("F", i, source), action))
        given = self._given(stage, i)
        values.extend(given)
        with self._recorded("forward", str(action)):
            if self._mode == "train":
                found, self._kept[stage, i] = functions.training.forward(values)
            else:
                found = (functions.prediction if self._mode == "predict" else functions.evaluation)(*values)
        made = dict(zip(cut.outputs, found, strict=False))
        for target, wires in cut.sends.items():
            self._give(action, Action("F", i, target), [made[wire] for wire in wires])
        samples = self._parts[i].stop - self._parts[i].start
        rest = found[len(cut.outputs) :]
        if functions.has_loss and self._mode != "predict":
            self._losses.append((rest[0], samples / self._batch.samples))
        if functions.outputs_of_model:
            first = int(functions.has_loss and self._mode != "predict")
            outputs = rest[first : first + functions.outputs_of_model]
            self._outcome.samples += samples
            if self._mode == "predict":
                self._outcome.outputs[i] = outputs
            else:
                masks = dict(zip(functions.masked, rest[first + len(outputs) :], strict=True))
                self._observe(given[len(cut.inputs) :], outputs, masks)

    def _backward(self, action: Action) -> None:
        i, stage = action.microbatch, action.stage
        halves = self._functions[stage].training
        if action.kind == "W":
            with self._recorded("backward", str(action)):
                halves.backward_weights(self._further.pop((stage, i)), self._is_first(stage))
        else:
            gradients = self._gradients(action)
            kept = self._kept.pop((stage, i))
            with self._recorded("backward", str(action)):
                if action.kind == "B":
                    found = halves.backward(kept, gradients, self._is_first(stage))
                else:
                    found, self._further[stage, i] = halves.backward_inputs(kept, gradients)
            self._return_gradients(action, found)
        if action.kind in "BW":
            self._left[stage] -= 1
            if self._left[stage] == 0:
                self._complete.append(stage)

    def _is_first(self, stage: int) -> bool:
        first = stage not in self._begun
        self._begun.add(stage)
        return first

    def _gradients(self, action: Action) -> Values:
        """The gradients of the stage's floating outputs, summed over those who use them, then of its loss."""
        i, stage = action.microbatch, action.stage
        cut = self._stages.cuts[stage]
        sums: dict[Wire, Any] = {}
        for target in sorted(cut.sends):
            wires = self._stages.floating(cut.sends[target])
            for wire, gradient in zip(wires, self._taken(self._backward_of(i, target), action), strict=True):
                sums[wire] = sums[wire] + gradient if wire in sums else gradient
        found = [sums[wire] for wire in self._stages.floating(cut.outputs)]
        if self._functions[stage].has_loss:
            samples = self._parts[i].stop - self._parts[i].start
            share = self._loss_scale * samples / self._batch.samples
            found.append(tf.constant(share, self._functions[stage].loss_dtype))
        return found

    def _return_gradients(self, action: Action, found: Values) -> None:
        functions = self._functions[action.stage]
        of_wire = dict(zip(self._stages.floating(functions.wires_in), found, strict=True))
        for source in self._stages.cuts[action.stage].receives:
            wires = self._stages.floating(self._stages.cuts[action.stage].receives[source])
            consumer = self._backward_of(action.microbatch, source)
            self._give(action, consumer, [of_wire[wire] for wire in wires])

    def _backward_of(self, i: int, stage: int) -> Action:
        """The action that makes the gradients a stage sends back: I where the backward is split."""
        return Action("I" if stage in self._course.split else "B", i, stage)
