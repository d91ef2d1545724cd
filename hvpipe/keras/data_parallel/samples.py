"""How many samples a batch has: the number that Keras' loss divides by, or what the user counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import compiled_loss, user_losses
from hvpipe.keras.gpu import on_the_host

_ASKS = (
    "Targets of a batch should all have as many samples if no compiled loss uses them, and so should the "
    "inputs of a batch without targets, or hvpipe cannot weight the ranks: pass samples= to data_parallel, a "
    "function of the batch that returns the number that your loss divides by. Received:"
)


class SamplesIn:
    """Counts the samples of a batch as `train_step` gets it, eagerly or in a graph: `samples_in(batch)`.

    That is the length of the first target that has a loss; else of the targets; without any, of the sample
    weights; without these, of the inputs.

    Args:
        model: The model, whose compiled loss says which targets count.
        chosen: What the user counts by instead, or None.
        strict: Whether lengths must agree. They need not on a single rank, where nothing is weighted.
    """

    def __init__(
        self, model: Any, chosen: Callable[[Any], Any] | None = None, *, strict: bool = True
    ) -> None:
        self._model = model
        self._strict = strict
        self._chosen = chosen

    def __call__(self, batch: Any) -> Any:
        """Return the number of samples, a scalar.

        Raises:
            HvpipeError: If no loss tells which of them counts, and they differ in length. In a graph an
                operation fails if only the data tells.
        """
        if self._chosen is not None:
            return _scalar(self._chosen(batch))
        x, y, sample_weight = _unpacked(batch)
        loss = compiled_loss(self._model)
        targets = _with_a_loss(y, None if loss is None else user_losses(loss), _output_names(self._model))
        for leaves in (targets, *map(_leaves, (y, sample_weight, x))):
            counted = [leaf for leaf in leaves if _has_samples(leaf)]
            if counted and (leaves is targets or not self._strict):
                return _length(counted[0])
            if counted:
                return _equal_length(counted)
        others = [leaf for leaf in _leaves(x) if not hasattr(leaf, "shape")]
        if others and self._strict:
            raise HvpipeError(f"{_ASKS} a {type(others[0]).__name__}, which has no shape")
        return 1


class SampleCounter:
    """Counts this rank's samples inside a graph, to be read outside.

    Args:
        samples_in: Counts a batch.
    """

    def __init__(self, samples_in: SamplesIn) -> None:
        self._samples_in = samples_in
        self._count = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="hvpipe_samples")
        self._restarted_at = 0.0

    def is_new(self) -> Any:
        """Return whether nothing was counted yet (bool scalar). For use in a graph."""
        with on_the_host():
            return tf.equal(self._count, 0.0)

    def add(self, batch: Any) -> Any:
        """Count a batch; return its number of samples (float64 scalar). For use in a graph."""
        # A static size must wait for the batch, too.
        with tf.control_dependencies(tf.nest.flatten(_leaves(batch)[:1], expand_composites=True)):
            found = self._samples_in(batch)  # on the batch's device: on the host it would have to be copied
            with on_the_host():
                samples = tf.identity(tf.cast(found, tf.float64))
        self._count.assign_add(samples)
        return samples

    @property
    def variable(self) -> Any:
        """The variable that counts."""
        return self._count

    def total(self) -> float:
        """Return the samples since the counter was made."""
        return float(self._count.numpy())

    def since_restart(self) -> float:
        """Return the samples since the last `restart`."""
        return self.total() - self._restarted_at

    def resume(self, since_restart: float) -> None:
        """Count on as if there had been this many samples since the last `restart`."""
        self._restarted_at = self.total() - since_restart

    def restart(self) -> float:
        """Return the samples since the last `restart`, and start again at 0."""
        samples = self.since_restart()
        self._restarted_at += samples
        return samples


def _unpacked(batch: Any) -> tuple[Any, Any, Any]:
    """Return inputs, targets and sample weights. More than three parts are all inputs."""
    if isinstance(batch, (list, tuple)) and not 1 <= len(batch) <= 3:
        return batch, None, None
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    return x, y, sample_weight


def _with_a_loss(y: Any, loss: Any, output_names: list[str]) -> list[Any]:
    """Return the targets that have a loss, in the order of the losses; none if the structures do not tell."""
    if loss is None or y is None:
        return []
    if isinstance(loss, Mapping):
        if not isinstance(y, Mapping):  # as Keras matches the outputs of a functional model
            listed = list(y) if isinstance(y, (list, tuple)) else [y]
            y = dict(zip(output_names, listed, strict=False)) if len(output_names) == len(listed) else {}
        pairs = [(y[name], loss[name]) for name in loss if name in y]
    elif isinstance(loss, (list, tuple)):
        listed = list(y.values()) if isinstance(y, Mapping) else y
        listed = list(listed) if isinstance(listed, (list, tuple)) else [listed]
        pairs = list(zip(listed, loss, strict=False))
    else:
        return _leaves(y)
    return [leaf for part, one in pairs for leaf in _with_a_loss(part, one, [])]


def _output_names(model: Any) -> list[str]:
    return list(getattr(model, "output_names", None) or ())


def _leaves(structure: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(structure) if leaf is not None]


def _has_samples(leaf: Any) -> bool:
    """Return whether a leaf's first axis can count samples: it is no single number."""
    return hasattr(leaf, "shape") and tf.TensorShape(leaf.shape).rank != 0


def _length(leaf: Any) -> Any:
    """Return the length of a leaf's first axis: a number if it is known while a graph is traced."""
    known = tf.TensorShape(leaf.shape)[0] if tf.TensorShape(leaf.shape).rank else None
    if known is not None:
        return known
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return leaf.nrows() if isinstance(leaf, tf.RaggedTensor) else tf.shape(leaf)[0]


def _equal_length(leaves: list[Any]) -> Any:
    """Return the length that all leaves have."""
    lengths = [_length(leaf) for leaf in leaves]
    known = {n for n in lengths if isinstance(n, int)}
    open_ones = [tf.cast(n, tf.int64) for n in lengths if not isinstance(n, int)]
    if len(known) > 1:
        raise HvpipeError(f"{_ASKS} axes of length {sorted(known)}")
    if len(lengths) < 2 or not open_ones:
        return lengths[0]
    every = tf.stack([*open_ones, *(tf.constant(n, tf.int64) for n in known)])
    equal = tf.reduce_all(tf.equal(every, every[0]))
    if tf.executing_eagerly():
        if not bool(equal):
            raise HvpipeError(f"{_ASKS} axes of length {every.numpy().tolist()}")
        return every[0]
    with tf.control_dependencies(
        [tf.debugging.Assert(equal, [f"{_ASKS} axes of length", every], summarize=10)]
    ):
        return tf.identity(every[0])


def _scalar(count: Any) -> Any:
    found = tf.cast(tf.convert_to_tensor(count), tf.float64)
    if found.shape.rank not in (0, None):
        raise HvpipeError(
            "samples should return one number, of the samples in a batch. "
            f"Received: an array of shape {tuple(found.shape)}"
        )
    return found
