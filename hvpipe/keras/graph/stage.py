"""The functions that a rank runs for one of its stages: training, evaluation and prediction graphs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras import compat
from hvpipe.keras.graph.activity_losses import added_losses, may_add_losses, scaled_activities
from hvpipe.keras.graph.batch_statistics import counted_moves
from hvpipe.keras.graph.deferred_build import trained_by
from hvpipe.keras.graph.layer_graph import Call
from hvpipe.keras.graph.split_gradient import SplitGradient, split_gradient
from hvpipe.keras.graph.stage_cuts import Stages, Wire


def _first_line(error: Exception) -> str:
    """Return the first line of an error that says something: Keras puts the layer's name before it."""
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.startswith("Exception encountered")), "")


Loss = Callable[[Sequence[Any], Sequence[Any]], Any]
"""Computes the loss of a micro-batch, a scalar, from flat outputs and flat targets with sample weights."""


class StageFunctions:
    """The functions of one stage.

    Their values are flat lists: the wires from each earlier stage in order, model inputs, targets.

    Attributes:
        wires_in: The wires that the stage receives.
        trainable: The trainable variables of its layers.
        has_loss: Whether the training forward may compute a loss.
        loss_dtype: The dtype of that loss.
        outputs_of_model: How many of the model's outputs the stage computes: all or none.
        masked: The indices of those outputs that have a Keras mask, which metrics use.
        moves: How often the training forward moves the averages of each BatchNormalization, by its id; known
            after tracing.
    """

    def __init__(
        self,
        stages: Stages,
        stage: int,
        targets: Sequence[Any],
        loss: Loss | None,
        recompute: bool = False,
        samples: Any = None,
    ) -> None:
        """Prepare the functions; each is traced when it is first used.

        Args:
            stages: All stages of the model.
            stage: The number of this one.
            targets: A tf.TensorSpec for each flat target. Only the last stage takes targets.
            loss: Computes the loss in the last stage; None without one.
            recompute: Run the forward again in the backward instead of keeping activations.
            samples: A variable that holds the batch's number of samples; values are a micro-batch of it. None
                means that values are a whole batch.
        """
        self._samples = samples
        self._stages = stages
        self._cut = stages.cuts[stage]
        self._last = stage == len(stages.cuts) - 1
        self._loss = loss if self._last else None
        graph = stages.graph
        self.wires_in = self._cut.wires_in
        self._signature = [
            *(stages.spec(wire) for wire in self.wires_in),
            *(stages.spec(Wire(number)) for number in self._cut.inputs),
        ]
        self._target_signature = list(targets) if self._last else []
        layers = stages.layers(stage)
        self.trainable = trained_by(layers)
        # If several stages share a layer, the first one adds the regularizers' losses.
        earlier = {id(v) for s in range(stage) for v in trained_by(stages.layers(s))}
        self._regularized = [v for v in self.trainable if v.regularizer is not None and id(v) not in earlier]
        self.has_loss = self._loss is not None or bool(self._regularized) or may_add_losses(layers)
        self.loss_dtype = tf.float64 if keras.config.floatx() == "float64" else tf.float32
        self.outputs_of_model = len(graph.outputs) if self._last else 0
        self._mask_ends = graph.mask_ends()
        self.masked = [
            index
            for index, number in enumerate(graph.outputs)
            if self._last and graph.tensors[number].mask_shape is not None and number not in self._mask_ends
        ]
        self.moves: Counter[int] = Counter()
        self._recompute = recompute
        self._ignored: frozenset[int] = frozenset()  # indices among the floating outputs
        self._adds_loss = False  # known after tracing
        self._samples_here: Any = None  # while a graph is traced

    @cached_property
    def training(self) -> SplitGradient:
        """Forward and backward.

        The forward returns `StageCut.outputs`, the loss if there is one, the model's outputs, their masks.
        The backward takes the gradients of the floating `StageCut.outputs`, then of the loss. It returns the
        gradients of the floating `wires_in`.
        """
        return split_gradient(
            lambda *values: self._run(values, training=True),
            [*self._signature, *self._target_signature],
            [v.value for v in self.trainable],
            differentiated_inputs=len(self.wires_in),
            extra_outputs=self.outputs_of_model + len(self.masked),
            recompute=self._recompute,
            ignored=self._ignored,
        )

    @property
    def unreached(self) -> list[Wire]:
        """The floating wires that the stage receives but has no gradient for; its backward returns 0."""
        wires = self._stages.floating(self.wires_in)
        return [wire for wire, reached in zip(wires, self.training.reached, strict=True) if not reached]

    def ignore_outputs(self, wires: Collection[Wire]) -> None:
        """Ignore the gradients of these outputs: no user has one.

        Weights that only they depend on then get no gradient, as in Keras.
        """
        outputs = self._stages.floating(self._cut.outputs)
        ignored = frozenset(index for index, wire in enumerate(outputs) if wire in wires)
        if ignored != self._ignored:
            self._ignored = ignored
            self.__dict__.pop("training", None)  # traced again

    @property
    def trains_by_a_loss(self) -> bool:
        """True if the training forward computes a loss; `has_loss` only says that it may."""
        _ = self.training
        return self._adds_loss

    @property
    def foreign_weights(self) -> list[Any]:
        """Weights of other stages' layers that the training forward reads; they would get no gradient."""
        read = {id(outside) for outside in self.training.captured}
        graph, own = self._stages.graph, {id(v) for v in self.trainable}
        return [
            v
            for v in trained_by(graph.all_layers())
            if id(v) not in own and id(getattr(compat.native_value(v), "handle", None)) in read
        ]

    @cached_property
    def evaluation(self) -> Any:
        """The same outputs in inference mode, without a backward."""
        return tf.function(
            lambda *values: self._run(values, training=False),
            input_signature=[*self._signature, *self._target_signature],
            autograph=False,
        )

    @cached_property
    def prediction(self) -> Any:
        """Outputs in inference mode, without targets and loss."""
        return tf.function(
            lambda *values: self._run(values, training=False, with_loss=False),
            input_signature=self._signature,
            autograph=False,
        )

    def run_eagerly(self, values: Sequence[Any]) -> list[Any]:
        """Return the outputs of one forward in training mode, without making a graph."""
        return self._run(values, training=True)

    def _run(self, values: Sequence[Any], training: bool, with_loss: bool = True) -> list[Any]:
        graph, cut = self._stages.graph, self._cut
        known = self._named(values)
        self._samples_here = self._count(known)
        masks: dict[int, Any] = {}  # of this stage's tensors; a later call may delete a tensor's mask
        losses: list[Any] = []
        layers = graph.layers(cut.calls)
        with scaled_activities(layers, self._share_of), counted_moves(layers if training else ()) as moves:
            for index in cut.calls:
                call = graph.calls[index]
                for number, _ in call.reads:
                    if index > self._mask_ends.get(number, index):
                        compat.set_keras_mask(known[number], None)
                made = self._made_by(call, known, training)
                for (number, _), value in zip(call.writes, made, strict=True):
                    known[number] = value
                    masks[number] = compat.get_keras_mask(value)
                losses.extend(map(self._summed, added_losses(call.operation)))
        if training:
            self.moves = moves
        found = [masks[wire.number] if wire.mask else known[wire.number] for wire in cut.outputs]
        for wire, value in zip(cut.outputs, found, strict=True):
            self._check_mask(wire.number, masks.get(wire.number))
            self._check_dtype(wire, value)
        for number in masks.keys() & {*graph.outputs} if self._last else ():
            self._check_mask(number, masks[number])
        results = [known[number] for number in graph.outputs] if self._last else []
        for number in self._mask_ends.keys() & set(graph.outputs if self._last else ()):
            compat.set_keras_mask(known[number], None)
        if not with_loss:
            return [*found, *results]
        losses.extend(v.regularizer(v) for v in self._regularized)
        if self._loss is not None:
            losses.insert(0, self._loss(results, values[len(self._signature) :]))
        self._adds_loss |= training and bool(losses)
        if self.has_loss:
            zero = tf.zeros((), self.loss_dtype)
            found.append(tf.add_n([zero, *(tf.cast(loss, self.loss_dtype) for loss in losses)]))
        return [*found, *results, *(compat.get_keras_mask(results[index]) for index in self.masked)]

    def _made_by(self, call: Call, known: Mapping[int, Any], training: bool) -> list[Any]:
        """Return what a call makes.

        Raises:
            HvpipeError: It needs a size that an input leaves open. Keras would give it the batch's size.
        """
        try:
            return call(known, training)
        except Exception as error:
            graph = self._stages.graph
            shapes = [graph.tensors[number].shape for number, _ in call.reads]
            is_open = any(None in shape[1:] for shape in shapes)
            if (
                isinstance(error, HvpipeError)
                or not is_open
                or not re.search("Symbolic|None|unknown", str(error))
            ):
                raise
            inputs = [graph.tensors[number].shape for number in graph.inputs]
            wanted = ", ".join(str(shape[1:]) for shape in inputs if None in shape[1:])
            raise HvpipeError(
                f"{call.name} needs a size that the model's inputs leave open, {wanted}, but a pipeline "
                "makes the graphs of its stages without a batch. Give the size to keras.Input(shape=...), or "
                "let the layer loop with tf.while_loop, tf.scan or keras.ops.scan. "
                f"Received: {', '.join(map(str, shapes))}, and {type(error).__name__}: {_first_line(error)}"
            ) from error

    def _count(self, known: Mapping[int, Any]) -> Any:
        """Return the samples that a stage gets; None if the first axis of its tensors counts other things."""
        tensors = self._stages.graph.tensors
        for number, value in known.items():
            if tensors[number].of_samples and tensors[number].shape[:1] == (None,):
                return tf.shape(value)[0]
        return None

    def _named(self, values: Sequence[Any]) -> dict[int, Any]:
        """Return the wires and inputs among `values` by tensor number, with their masks attached."""
        known: dict[int, Any] = {}
        wires = [*self.wires_in, *(Wire(number) for number in self._cut.inputs)]
        for wire, value in zip(wires, values, strict=False):
            if wire.mask:
                compat.set_keras_mask(known[wire.number], value)
            else:
                # A copy: the mask must not attach to the caller's tensor.
                known[wire.number] = tf.identity(value)
        return known

    def _summed(self, loss: Any) -> Any:
        """Return the sum of a loss that a layer has added, as in Keras.

        A sum over samples is divided by the micro-batch's share, because micro-batches are averaged.
        """
        total = tf.reduce_sum(loss)
        if loss.shape.rank == 0 or loss.shape[0] is not None:
            return total
        return total / self._share_of(loss, total.dtype)

    def _share_of(self, tensor: Any, dtype: Any) -> Any:
        """Return the share of the batch's samples that a tensor belongs to."""
        if self._samples is None:
            return tf.ones((), dtype)
        count = tf.shape(tensor)[0] if self._samples_here is None else self._samples_here
        samples = tf.cast(count, self.loss_dtype)
        return tf.cast(samples / tf.cast(self._samples, self.loss_dtype), dtype)

    def _check_mask(self, number: int, mask: Any) -> None:
        """Raise HvpipeError if a tensor has a Keras mask, or has none, against what the graph says."""
        graph = self._stages.graph
        maker = graph.makers().get(number)
        if maker is None or (mask is None) == (graph.tensors[number].mask_shape is None):
            return
        raise HvpipeError(
            "Whether a layer's output has a mask should be known before it runs, because masks go from rank "
            f"to rank, too. Call {graph.calls[maker].name} in a layer that sets supports_masking and returns "
            "its output's mask in compute_mask. "
            f"Received: {'no mask' if mask is None else 'a mask'} when it ran"
        )

    def _check_dtype(self, wire: Wire, value: Any) -> None:
        """Raise HvpipeError if an output's dtype differs from Keras's spec, which its users rely on."""
        said = self._stages.spec(wire).dtype
        if value.dtype != said:
            graph = self._stages.graph
            name = graph.calls[graph.makers()[wire.number]].name
            raise HvpipeError(
                "A tensor between stages should have the dtype of the layer's output spec. "
                f"The spec of {name} is {said.name}: make it with dtype={value.dtype.name!r}, or correct its "
                f"output spec. Received: {'a mask of ' * wire.mask}{value.dtype.name} from {name}"
            )
