"""Counts the unmasked entries of each loss for a whole batch, before its micro-batches run.

Keras divides a masked loss by that number, so each micro-batch's loss needs it before the last micro-batch
has gone forward. Masks nearly always depend only on a model's inputs and targets, so the rank with the inputs
can count for all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.keras import compat
from hvpipe.keras.graph.deferred_build import variables_of
from hvpipe.keras.graph.graph_pieces import ancestors
from hvpipe.keras.graph.layer_graph import LayerGraph
from hvpipe.session import Session


def entries_of(loss: Any, y_true: Any, mask: Any) -> Any:
    """Return the number of entries that a loss counts, as a float32 scalar.

    Args:
        loss: The loss. With `ignore_class` it leaves out entries itself.
        y_true: The loss's targets.
        mask: The output's Keras mask, or None.
    """
    kept = mask
    if _ignores_a_class(loss):
        kept = tf.not_equal(tf.cast(y_true, tf.float32), float(loss.ignore_class))
        if mask is not None:
            kept = tf.reshape(kept, tf.shape(mask)) & tf.cast(mask, tf.bool)
    return tf.cast(tf.math.count_nonzero(kept), tf.float32)


def _ignores_a_class(loss: Any) -> bool:
    return isinstance(loss, keras.losses.SparseCategoricalCrossentropy) and loss.ignore_class is not None


@dataclass(frozen=True)
class MaskedLoss:
    """A mean over unmasked entries: its index among the losses, and flat indices of its target and output."""

    index: int
    loss: Any
    target: int
    output: int


Compare = Callable[[compat.CompileLoss, Sequence[Any], Sequence[Any]], Any]
"""Computes a loss, given flat outputs and flat targets."""


def masked_losses(
    compiled: compat.CompileLoss, graph: LayerGraph, signature: Sequence[Any], compare: Compare
) -> list[MaskedLoss]:
    """Return the losses that leave entries out.

    Args:
        compiled: The compiled losses.
        graph: The model.
        signature: A tf.TensorSpec for each flat target.
        compare: Computes a loss.
    """
    deleted = graph.mask_ends()
    masked = [graph.tensors[n].mask_shape is not None and n not in deleted for n in graph.outputs]
    losses = keras.tree.flatten(compat.user_losses(compiled))
    if not any(masked) and not any(map(_ignores_a_class, losses)):
        return []
    outputs = [_one_sample(graph.tensors[number]) for number in graph.outputs]
    targets = [_one_sample(spec) for spec in signature]
    recorder = _PairRecorder(compiled)
    compare(recorder, outputs, targets)
    found = []
    for index, (loss, y_true, y_pred) in enumerate(recorder.pairs):
        target, output = _index_of(y_true, targets), _index_of(y_pred, outputs)
        if target is None or output is None or getattr(loss, "reduction", None) == "sum":
            continue
        if masked[output] or _ignores_a_class(loss):
            found.append(MaskedLoss(index, loss, target, output))
    return found


def _one_sample(spec: Any) -> Any:
    return tf.zeros([1 if axis is None else axis for axis in spec.shape], spec.dtype)


def _index_of(sought: Any, values: Sequence[Any]) -> int | None:
    return next((index for index, value in enumerate(values) if value is sought), None)


class _PairRecorder(compat.CompileLoss):
    """Computes nothing; records which target and output Keras hands to each loss."""

    _flat_losses: Any

    def __init__(self, compiled: compat.CompileLoss) -> None:
        super().__init__(compat.user_losses(compiled), output_names=compiled.output_names)
        self.pairs: list[tuple[Any, Any, Any]] = []

    def build(self, y_true: Any, y_pred: Any) -> None:
        super().build(y_true, y_pred)
        self._flat_losses = [
            one._replace(loss=functools.partial(self._record, one.loss)) for one in self._flat_losses
        ]

    def _record(self, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.pairs.append((loss, y_true, y_pred))
        return tf.constant(0.0)


class EntryCounter:
    """Gives the losses on all ranks the number of entries that they count in a batch; collective."""

    def __init__(
        self,
        session: Session,
        data_rank: int,
        graph: LayerGraph,
        losses: Sequence[MaskedLoss],
        signature: Sequence[Any],
        entries: dict[int, Any],
    ) -> None:
        """Make the counting graph.

        Args:
            session: The session.
            data_rank: The world rank whose batches count.
            graph: The model.
            losses: The losses that leave entries out.
            signature: A tf.TensorSpec for each flat target.
            entries: Gets a variable for each loss, by the loss's index. A loss gets none if its mask depends
                on more than inputs and targets.
        """
        self._session = session
        self._data_rank = data_rank
        known: list[int] = []
        if session.world.rank == data_rank:
            known, self._count = _counting_graph(graph, losses, signature)
        self._entries = [
            entries.setdefault(losses[i].index, tf.Variable(1.0, trainable=False, name="entries_of_batch"))
            for i in session.engine.broadcast_object(known, "the losses of a new kind of batch", data_rank)
        ]

    def count(self, inputs: Sequence[Any], targets: Sequence[Any]) -> None:
        """Count the entries of the data rank's batch, and assign them on all ranks; collective."""
        if not self._entries:
            return
        numbers = np.zeros(len(self._entries), np.float32)
        if self._session.world.rank == self._data_rank:
            numbers[:] = [float(number) for number in self._count(*inputs, *targets)]
        numbers = self._session.engine.broadcast(numbers, self._data_rank)
        for variable, number in zip(self._entries, numbers, strict=True):
            variable.assign(number)


def _counting_graph(
    graph: LayerGraph, losses: Sequence[MaskedLoss], signature: Sequence[Any]
) -> tuple[list[int], Any]:
    """Return which losses can be counted, and a function that counts them.

    The function takes flat inputs and targets. It holds only the operations that lead to the masks.
    """
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
    return known, whole.prune(given, [numbers[i] for i in known]) if known else None


def _masks(graph: LayerGraph, inputs: Sequence[Any]) -> list[Any]:
    """Return the masks of the model's outputs, in a graph where weights are placeholders without values."""
    if all(graph.tensors[number].mask_shape is None for number in graph.outputs):
        return [None] * len(graph.outputs)
    known = {number: tf.identity(x) for number, x in zip(graph.inputs, inputs, strict=True)}
    variables = variables_of(graph.all_layers())
    placeholders = [(v, tf.compat.v1.placeholder(v.dtype, v.shape)) for v in variables]
    with keras.StatelessScope(state_mapping=placeholders, initialize_variables=False):
        for call in graph.calls:
            for (number, _), value in zip(call.writes, call(known, training=False), strict=True):
                known[number] = value
    return [compat.get_keras_mask(known[number]) for number in graph.outputs]
