"""Each rank's samples: shards of a tf.data dataset, epochs of equal length on all ranks, sample counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras.gpu import on_the_host
from hvpipe.session import Session, current

_FINGERPRINT_ELEMENTS = 1 << 20
# A shard's attribute with the dataset of all ranks.
_SOURCE, _RANKS = "_hvpipe_source", "_hvpipe_ranks"


class SampleCounter:
    """Counts this rank's samples inside a graph, to be read outside."""

    def __init__(self) -> None:
        self._count = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="hvpipe_samples")
        self._restarted_at = 0.0

    def is_new(self) -> Any:
        """Return whether nothing was counted yet (bool scalar). For use in a graph."""
        with on_the_host():
            return tf.equal(self._count, 0.0)

    def add(self, batch: Any) -> Any:
        """Count a batch; return its number of samples (float64 scalar). For use in a graph."""
        # A static size must wait for the batch, too.
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            found = samples_in(batch)  # on the batch's device: on the host it would have to be copied
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


def shard(dataset: Any) -> Any:
    """Return this rank's part of a batched tf.data dataset: batches rank, rank + size, rank + 2 * size, ...

    All ranks get the same number of batches; up to size - 1 batches at the end are left out. A step of all
    ranks sees what one rank would see with batches `size` times as large. If you shuffle the dataset, all
    ranks must shuffle it in the same way: pass `seed` to `shuffle`, or call `keras.utils.set_random_seed`
    first.

    Every rank prepares all batches and drops the other ranks' batches. If that is expensive (decoding
    images, for example), shard something cheap before `map` instead, such as
    `files.shard(hvpipe.size(), hvpipe.rank())`. Then call `repeat()`, and give `fit` the same
    `steps_per_epoch` on all ranks.

    Args:
        dataset: A `tf.data.Dataset` of batches, the same on all ranks.

    Returns:
        A `tf.data.Dataset` of this rank's batches; with one rank, `dataset` itself.

    Raises:
        HvpipeError: If `dataset` is not a tf.data.Dataset or has fewer batches than ranks, or before
            `hvpipe.init()`.

    Example:
        ```python
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10_000, seed=1).batch(64)
        model.fit(hk.shard(dataset), epochs=3)
        ```
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise HvpipeError(
            f"shard needs a tf.data.Dataset. Received: dataset of type {type(dataset).__name__}"
        )
    found = _shard(dataset)
    world = current().world
    vars(found)[_SOURCE] = dataset
    vars(found)[_RANKS] = (world.rank, world.size)
    return found


def sharded_anew(dataset: Any) -> Any:
    """Return a dataset of `shard` divided among the ranks that there are now, or anything else as it is."""
    source, world = source_of(dataset), current().world
    if source is None or vars(dataset)[_RANKS] == (world.rank, world.size):
        return dataset
    return shard(source)


def source_of(dataset: Any) -> Any:
    """Return the dataset that `shard` made this one of; None if it did not."""
    return vars(dataset).get(_SOURCE) if isinstance(dataset, tf.data.Dataset) else None


def _shard(dataset: Any) -> Any:
    world = current().world
    if world.size == 1:
        return dataset
    batches = int(dataset.cardinality())
    if batches == tf.data.INFINITE_CARDINALITY:
        return dataset.shard(world.size, world.rank)
    if batches == tf.data.UNKNOWN_CARDINALITY:
        # Only full rounds of one batch per rank, whatever the length turns out to be.
        rounds = dataset.window(world.size, drop_remainder=True)

        def mine(*parts: Any) -> Any:
            structure = parts[0] if len(parts) == 1 else parts
            whole = structure if isinstance(structure, tf.data.Dataset) else tf.data.Dataset.zip(structure)
            return whole.skip(world.rank).take(1)

        return rounds.flat_map(mine)
    rounds_in_epoch = batches // world.size
    if rounds_in_epoch == 0:
        raise HvpipeError(
            f"shard needs at least one batch for each of {world.size} ranks. Received: {batches} batches"
        )
    return dataset.take(rounds_in_epoch * world.size).shard(world.size, world.rank)


def same_length(session: Session, fit: Mapping[str, Any]) -> Any:
    """Return `x` of the arguments of `fit`, cut so that epochs have equal steps on all ranks; collective.

    tf.data datasets of known lengths are cut to the shortest, with a warning. Arrays of different lengths
    raise a MismatchError. Unknown lengths that differ are noticed at the end of the shorter epoch.
    """
    x = fit.get("x")
    splits = fit.get("validation_data") is None  # otherwise Keras ignores validation_split
    kept = 1.0 - (fit.get("validation_split") or 0.0) * splits
    steps = -1 if fit.get("steps_per_epoch") is not None else _steps(x, fit.get("batch_size"), kept)
    everyone = session.engine.allgather_object(steps, "start of fit (the number of batches)")
    known = [count for count in everyone if count >= 0]
    if len(known) < len(everyone) or min(known) == max(known):
        return x
    told = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(everyone))
    if not isinstance(x, tf.data.Dataset):
        raise MismatchError(f"All ranks should have the same number of batches in an epoch. Received: {told}")
    if session.world.rank == 0:
        tf.get_logger().warning(
            "hvpipe: the ranks' datasets differ in length (batches: %s); every epoch ends after %d. "
            "hvpipe.keras.shard gives all ranks the same number.",
            told,
            min(known),
        )
    return x.take(min(known))


def _steps(x: Any, batch_size: int | None, kept: float) -> int:
    """Return the steps of an epoch, -1 if unknown. Training keeps this share of arrays."""
    if isinstance(x, tf.data.Dataset):
        return max(int(x.cardinality()), -1)
    leaves = tf.nest.flatten(x)
    if leaves and isinstance(leaves[0], (np.ndarray, tf.Tensor)) and leaves[0].ndim > 0:
        samples = math.floor(int(leaves[0].shape[0]) * kept)  # as Keras splits
        return math.ceil(samples / (batch_size or 32))
    return -1


def first_leaf(data: Any) -> Any:
    """Return the first tensor of a batch; its first axis counts the samples."""
    return next(leaf for leaf in tf.nest.flatten(data) if leaf is not None)


def with_first_tensor(data: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with its first dense tensor changed; the batch itself if it has none."""
    leaves = tf.nest.flatten(data)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, tf.Tensor):
            leaves[place] = change(leaf)
            return tf.nest.pack_sequence_as(data, leaves)
    return data


def samples_in(batch: Any) -> Any:
    if isinstance(batch, tf.SparseTensor):
        return batch.dense_shape[0]
    if isinstance(batch, tf.RaggedTensor):
        return batch.nrows()
    return tf.shape(batch)[0] if batch.shape.rank != 0 else 1


def batch_of(iterator: Any) -> Any:
    """Return a batch, or the spec of one."""
    return iterator[0] if isinstance(iterator, list) else iterator.element_spec


def fingerprint_of(batch: Any) -> Any:
    """Return a number (float64 scalar) that two different batches are very unlikely to share.

    Of some million elements at most, because it takes 24 bytes for each.
    """
    batch = tf.nest.flatten(batch, expand_composites=True)[-2 if isinstance(batch, tf.SparseTensor) else 0]
    values = tf.reshape(batch, [-1])
    values = values[:: tf.size(values) // _FINGERPRINT_ELEMENTS + 1]
    if batch.dtype == tf.string:
        values = tf.strings.to_hash_bucket_fast(values, 1 << 30)
    values = tf.cast(values, tf.float64)
    places = tf.cast(tf.range(tf.size(values)) % 8191 + 1, tf.float64)
    return tf.reduce_sum(values * places)
