"""A stage's forward and backward on real values, ready to be timed; and what stages hand each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.keras.graph.deferred_build import variables_of
from hvpipe.keras.graph.stage import StageFunctions
from hvpipe.keras.graph.stage_cuts import Stages, Wire
from hvpipe.keras.profiling.stopwatch import Timed


class Wires:
    """What goes from stage to stage in one forward, each tensor held until its last user has taken it."""

    def __init__(self, stages: Stages, inputs: Sequence[Any]) -> None:
        self._cuts = stages.cuts
        self._values = {Wire(number): x for number, x in zip(stages.graph.inputs, inputs, strict=True)}
        # The last stage is empty: it stands for the loss, which takes the model's outputs.
        self._last_user = {wire: stage for stage in range(len(self._cuts) - 1) for wire in self._taken(stage)}

    def _taken(self, stage: int) -> list[Wire]:
        """In the order in which the stage's functions take them."""
        cut = self._cuts[stage]
        received = [wire for source in sorted(cut.receives) for wire in cut.receives[source]]
        return [*received, *(Wire(number) for number in cut.inputs)]

    def take(self, stage: int) -> list[Any]:
        """What the stage's forward takes; those before it have `put` theirs."""
        wires = self._taken(stage)
        values = [self._values[wire] for wire in wires]
        for wire in wires:
            if self._last_user[wire] == stage:
                del self._values[wire]
        return values

    def put(self, stage: int, outputs: Sequence[Any]) -> None:
        """What the stage's forward gave."""
        for wire, value in zip(self._cuts[stage].outputs, outputs, strict=False):
            if wire in self._last_user:
                self._values[wire] = value


class Work:
    """A stage's forward on `given`, its backward on random gradients, in the graphs that a pipeline runs."""

    def __init__(self, stages: Stages, stage: int, functions: StageFunctions, given: Sequence[Any]) -> None:
        self._halves = functions.training
        self.given = given
        self.outputs, self.saved = self._halves.forward(given)
        cut = stages.cuts[stage]
        of_wire = dict(zip(cut.outputs, self.outputs, strict=False))
        self._gradients = [_random_like(of_wire[wire]) for wire in stages.floating(cut.outputs)]
        self._gradients += [tf.ones((), functions.loss_dtype)] * functions.has_loss
        self._floating_in = len(stages.floating(functions.wires_in))

    @property
    def forward(self) -> Timed:
        return Timed(self._run_forward, len(self.given), len(self.outputs) + len(self.saved))

    @property
    def backward(self) -> Timed | None:
        """None where nothing has a gradient: neither what comes in nor a weight, or nothing that goes out."""
        if not self._gradients or not (self._floating_in or self._halves.variables):
            return None
        return Timed(self._run_backward, len(self.saved) + len(self._gradients), self._floating_in)

    @property
    def inputs_part(self) -> Timed | None:
        """The part of the backward that is not for the weights; None where there is but one part."""
        if self.backward is None or not self._floating_in or not self._halves.variables:
            return None
        _, further = self._run_inputs_part()
        made = self._floating_in + len(further)
        return Timed(self._run_inputs_part, len(self.saved) + len(self._gradients), made)

    @property
    def trains(self) -> bool:
        """Whether any weight gets a gradient."""
        return bool(self._halves.variables)

    def _run_forward(self) -> None:
        # What the last forward saved is freed only now. Else the allocator would give the memory back each
        # time, and its pages would be zeroed anew within the next call, as they are not in a step.
        self.outputs, self.saved = self._halves.forward(self.given)

    def _run_inputs_part(self) -> tuple[list[Any], list[Any]]:
        return self._halves.backward_inputs(self.saved, self._gradients)

    def _run_backward(self) -> list[Any]:
        return self._halves.backward(self.saved, self._gradients, False)


@contextlib.contextmanager
def same_state(layers: Sequence[Any]) -> Iterator[None]:
    """Undo what forwards in training mode do to statistics, to the states of seeds, and to weights."""
    own = {id(v) for layer in layers if _may_write_weights(layer) for v in layer.trainable_variables}
    before = [(v, tf.identity(v.value)) for v in variables_of(layers) if not v.trainable or id(v) in own]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def _may_write_weights(layer: Any) -> bool:
    """Of Keras's layers only one does, besides the optimizer; of a user's own nobody knows."""
    return any(
        isinstance(inner, keras.layers.SpectralNormalization)
        or not type(inner).__module__.startswith("keras.")
        for inner in layer._flatten_layers()
    )


def _random_like(tensor: Any) -> Any:
    drawn = tf.random.stateless_normal(tf.shape(tensor), seed=(1, 2), dtype=tf.float32)
    return tf.cast(drawn, tensor.dtype)
