"""A stage's forward and backward on real values, ready to be timed, and the activations between stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.keras import compat
from hvpipe.keras.graph.deferred_build import trained_by, variables_of
from hvpipe.keras.graph.stage import StageFunctions
from hvpipe.keras.graph.stage_cuts import Stages, Wire
from hvpipe.keras.profiling.stopwatch import TimedCall


class Activations:
    """The tensors between stages in one forward. Each tensor is held until its last user has taken it."""

    def __init__(self, stages: Stages, inputs: Sequence[Any]) -> None:
        """Take the model's `inputs`. The last stage must be empty: it stands for the loss."""
        self._cuts = stages.cuts
        self._values = {Wire(number): x for number, x in zip(stages.graph.inputs, inputs, strict=True)}
        self._last_user = {
            wire: stage for stage in range(len(self._cuts) - 1) for wire in self._read_by(stage)
        }

    def _read_by(self, stage: int) -> list[Wire]:
        """Return the wires that a stage reads, in the order in which its functions take them."""
        cut = self._cuts[stage]
        return [*cut.wires_in, *(Wire(number) for number in cut.inputs)]

    def take(self, stage: int) -> list[Any]:
        """Return the inputs of a stage's forward; earlier stages must have `put` their outputs."""
        wires = self._read_by(stage)
        values = [self._values[wire] for wire in wires]
        for wire in wires:
            if self._last_user[wire] == stage:
                del self._values[wire]
        return values

    def put(self, stage: int, outputs: Sequence[Any]) -> None:
        """Keep the outputs of a stage's forward."""
        for wire, value in zip(self._cuts[stage].outputs, outputs, strict=False):
            if wire in self._last_user:
                self._values[wire] = value


class TimedStage:
    """A stage's forward on `inputs` and its backward on random gradients, in the graphs of a pipeline.

    Attributes:
        inputs: The inputs of the forward.
        outputs: The outputs of the latest forward.
        saved: The tensors that the latest forward keeps for the backward.
    """

    def __init__(self, stages: Stages, stage: int, functions: StageFunctions, inputs: Sequence[Any]) -> None:
        self._gradient = functions.training
        self.inputs = inputs
        self.outputs, self.saved = self._gradient.forward(inputs)
        cut = stages.cuts[stage]
        of_wire = dict(zip(cut.outputs, self.outputs, strict=False))
        self._upstream = [_random_like(of_wire[wire]) for wire in stages.floating(cut.outputs)]
        self._upstream += [tf.ones((), functions.loss_dtype)] * functions.has_loss
        self._floating_inputs = len(stages.floating(functions.wires_in))

    @property
    def forward(self) -> TimedCall:
        """The forward."""
        return TimedCall(self._run_forward, len(self.inputs), len(self.outputs) + len(self.saved))

    @property
    def backward(self) -> TimedCall | None:
        """The backward; None if no output has a gradient, or neither an input nor a weight needs one."""
        if not self._upstream or not (self._floating_inputs or self._gradient.variables):
            return None
        return TimedCall(self._run_backward, len(self.saved) + len(self._upstream), self._floating_inputs)

    @property
    def backward_inputs(self) -> TimedCall | None:
        """The part of the backward for the inputs; None if the backward has only one part."""
        if self.backward is None or not self._floating_inputs or not self._gradient.variables:
            return None
        _, saved = self._run_backward_inputs()
        results = self._floating_inputs + len(saved)
        return TimedCall(self._run_backward_inputs, len(self.saved) + len(self._upstream), results)

    @property
    def trains(self) -> bool:
        """Whether any weight gets a gradient."""
        return bool(self._gradient.variables)

    def _run_forward(self) -> None:
        # The previous call's tensors are freed only now. If they were freed before, the allocator would
        # return the memory and this call would have its pages zeroed again, which does not happen in a step.
        self.outputs, self.saved = self._gradient.forward(self.inputs)

    def _run_backward_inputs(self) -> tuple[list[Any], list[Any]]:
        return self._gradient.backward_inputs(self.saved, self._upstream)

    def _run_backward(self) -> list[Any]:
        return self._gradient.backward(self.saved, self._upstream, False)


@contextlib.contextmanager
def same_state(layers: Sequence[Any]) -> Iterator[None]:
    """Restore statistics, seeds and weights at the end, which forwards in training mode change."""
    own = {id(v) for v in trained_by(filter(_may_write_weights, layers))}
    before = [(v, tf.identity(v.value)) for v in variables_of(layers) if not v.trainable or id(v) in own]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def _may_write_weights(layer: Any) -> bool:
    """Return whether a forward may change weights: one Keras layer does, and custom layers may."""
    return any(
        isinstance(inner, keras.layers.SpectralNormalization)
        or not type(inner).__module__.startswith("keras.")
        for inner in compat.layers_in(layer)
    )


def _random_like(tensor: Any) -> Any:
    drawn = tf.random.stateless_normal(tf.shape(tensor), seed=(1, 2), dtype=tf.float32)
    return tf.cast(drawn, tensor.dtype)
