"""How many entries of a batch count in each loss where masks leave some out, known before its parts are run.

Keras divides by that number, so a part's loss needs it before the last part has gone forward. Masks follow
from a model's inputs and targets nearly always: the rank that hands them out counts for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common.masking import get_keras_mask
from keras.src.trainers.compile_utils import CompileLoss

from hvpipe.keras.graph.deferred_build import variables_of
from hvpipe.keras.graph.layer_graph import LayerGraph
from hvpipe.keras.graph.split_gradient import ancestors
from hvpipe.session import Session


def entries_of(loss: Any, y_true: Any, mask: Any) -> Any:
    """How many entries neither the output's mask (or None) nor the loss itself leaves out: float32 scalar."""
    kept = mask
    if _leaves_out(loss):
        kept = tf.not_equal(tf.cast(y_true, tf.float32), float(loss.ignore_class))
        if mask is not None:
            kept = tf.reshape(kept, tf.shape(mask)) & tf.cast(mask, tf.bool)
    return tf.cast(tf.math.count_nonzero(kept), tf.float32)


def _leaves_out(loss: Any) -> bool:
    return isinstance(loss, keras.losses.SparseCategoricalCrossentropy) and loss.ignore_class is not None


@dataclass(frozen=True)
class MaskedLoss:
    """A mean that leaves entries out: its place among the losses, and the flat places of what it compares."""

    place: int
    loss: Any
    target: int
    output: int


Compare = Callable[[CompileLoss, Sequence[Any], Sequence[Any]], Any]
"""Computes a loss, given flat outputs and flat targets."""


def masked_losses(
    compiled: CompileLoss, graph: LayerGraph, signature: Sequence[Any], compare: Compare
) -> list[MaskedLoss]:
    """Which of the losses leave entries out, for targets that look as in `signature` (tf.TensorSpec)."""
    masked = [graph.tensors[number].mask_shape is not None for number in graph.outputs]
    if not any(masked) and not any(map(_leaves_out, keras.tree.flatten(compiled._user_loss))):
        return []
    outputs = [_of_one_sample(graph.tensors[number]) for number in graph.outputs]
    targets = [_of_one_sample(spec) for spec in signature]
    pairing = _Pairing(compiled)
    compare(pairing, outputs, targets)
    found = []
    for place, (loss, y_true, y_pred) in enumerate(pairing.pairs):
        target, output = _place_of(y_true, targets), _place_of(y_pred, outputs)
        if target is None or output is None or getattr(loss, "reduction", None) == "sum":
            continue
        if masked[output] or _leaves_out(loss):
            found.append(MaskedLoss(place, loss, target, output))
    return found


def _of_one_sample(spec: Any) -> Any:
    return tf.zeros([1 if axis is None else axis for axis in spec.shape], spec.dtype)


def _place_of(sought: Any, values: Sequence[Any]) -> int | None:
    return next((place for place, value in enumerate(values) if value is sought), None)


class _Pairing(CompileLoss):
    """Computes nothing, but notes which target and output Keras hands to each loss."""

    _flat_losses: Any

    def __init__(self, compiled: CompileLoss) -> None:
        super().__init__(compiled._user_loss, output_names=compiled.output_names)
        self.pairs: list[tuple[Any, Any, Any]] = []

    def build(self, y_true: Any, y_pred: Any) -> None:
        super().build(y_true, y_pred)
        self._flat_losses = [
            one._replace(loss=functools.partial(self._note, one.loss)) for one in self._flat_losses
        ]

    def _note(self, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.pairs.append((loss, y_true, y_pred))
        return tf.constant(0.0)


class BatchEntries:
    """Tells the losses of all ranks how many entries of a batch count; made and used by all together.

    `root` is the world rank whose batches count, `entries` takes a variable for each loss's place. A loss
    whose mask does not follow from inputs and targets alone gets none.
    """

    def __init__(
        self,
        session: Session,
        root: int,
        graph: LayerGraph,
        losses: Sequence[MaskedLoss],
        signature: Sequence[Any],
        entries: dict[int, Any],
    ) -> None:
        self._session = session
        self._root = root
        known: list[int] = []
        if session.world.rank == root:
            known, self._count = _counter(graph, losses, signature)
        self._entries = [
            entries.setdefault(losses[i].place, tf.Variable(1.0, trainable=False, name="entries_of_batch"))
            for i in session.engine.broadcast_object(known, root)
        ]

    def tell(self, inputs: Sequence[Any], targets: Sequence[Any]) -> None:
        """Count for a batch, of which the root's counts; collective."""
        if not self._entries:
            return
        numbers = np.zeros(len(self._entries), np.float32)
        if self._session.world.rank == self._root:
            numbers[:] = [float(number) for number in self._count(*inputs, *targets)]
        numbers = self._session.engine.broadcast(numbers, self._root)
        for variable, number in zip(self._entries, numbers, strict=True):
            variable.assign(number)


def _counter(
    graph: LayerGraph, losses: Sequence[MaskedLoss], signature: Sequence[Any]
) -> tuple[list[int], Any]:
    """Which of the losses can be counted, and a function of flat inputs and targets that does."""
    inputs = [tf.TensorSpec(graph.tensors[n].shape, graph.tensors[n].dtype) for n in graph.inputs]

    def count(*values: Any) -> list[Any]:
        masks = _masks(graph, values[: len(inputs)])
        targets = values[len(inputs) :]
        return [entries_of(one.loss, targets[one.target], masks[one.output]) for one in losses]

    whole = tf.compat.v1.wrap_function(count, [*inputs, *signature])
    given = whole.graph.inputs[: len(inputs) + len(signature)]
    unknown = {op for op in whole.graph.get_operations() if op.type == "Placeholder"}
    unknown -= {x.op for x in (*given, *whole.graph.internal_captures)}
    numbers = whole.outputs
    known = [i for i, number in enumerate(numbers) if not unknown & ancestors([number.op], with_control=True)]
    # Only what leads to the masks is left.
    return known, whole.prune(given, [numbers[i] for i in known]) if known else None


def _masks(graph: LayerGraph, inputs: Sequence[Any]) -> list[Any]:
    """Of the model's outputs (in a graph); what has to do with weights is given no value."""
    if all(graph.tensors[number].mask_shape is None for number in graph.outputs):
        return [None] * len(graph.outputs)
    known = {number: tf.identity(x) for number, x in zip(graph.inputs, inputs, strict=True)}
    variables = variables_of(graph.all_layers())
    stand_ins = [(v, tf.compat.v1.placeholder(v.dtype, v.shape)) for v in variables]
    with keras.StatelessScope(state_mapping=stand_ins, initialize_variables=False):
        for call in graph.calls:
            for (number, _), value in zip(call.writes, call(known, training=False), strict=True):
                known[number] = value
    return [get_keras_mask(known[number]) for number in graph.outputs]
