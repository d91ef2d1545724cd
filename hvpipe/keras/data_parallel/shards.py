"""Each rank's samples: shards of a tf.data dataset, epochs of equal length on all ranks, fingerprints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import cut_epochs, length_of_epoch
from hvpipe.session import Session, current

_FINGERPRINT_ELEMENTS = 1 << 20
# A shard's attribute with the dataset of all ranks.
_SOURCE, _RANKS = "_hvpipe_source", "_hvpipe_ranks"


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


def cut_to_the_shortest(session: Session, epochs: Any) -> None:
    """Let the epochs of Keras' iterator have as many batches as the shortest of all ranks; collective.

    That holds for all data whose length Keras knows, with a warning. Unknown lengths that differ are noticed
    at the end of the shorter epoch.
    """
    what = "start of fit (the number of batches)"
    everyone = session.engine.allgather_object(length_of_epoch(epochs), what)
    known = [count for count in everyone if count is not None]
    if len(known) < len(everyone) or min(known) == max(known):
        return
    if session.world.rank == 0:
        tf.get_logger().warning(
            "hvpipe: the ranks' data differ in length (batches: %s); every epoch ends after %d. "
            "hvpipe.keras.shard gives all ranks the same number.",
            ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(everyone)),
            min(known),
        )
    cut_epochs(epochs, min(known))


def with_first_tensor(data: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with its first dense tensor changed; the batch itself if it has none."""
    leaves = tf.nest.flatten(data)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, tf.Tensor):
            leaves[place] = change(leaf)
            return tf.nest.pack_sequence_as(data, leaves)
    return data


def batch_of(iterator: Any) -> Any:
    """Return a batch, or the spec of one."""
    return iterator[0] if isinstance(iterator, list) else iterator.element_spec


def fingerprint_of(batch: Any) -> Any:
    """Return a number (float64 scalar) that two batches are very unlikely to share unless all of it is equal.

    Of some million elements of each tensor at most, because it takes 24 bytes for each.
    """
    prints = []
    for tensor in tf.nest.flatten(batch, expand_composites=True):
        if tensor is None or tensor.dtype in (tf.variant, tf.resource):
            continue
        values = tf.reshape(tensor, [-1])
        values = values[:: tf.size(values) // _FINGERPRINT_ELEMENTS + 1]
        if values.dtype == tf.string:
            values = tf.strings.to_hash_bucket_fast(values, 1 << 30)
        values = tf.cast(values, tf.float64)
        places = tf.cast(tf.range(tf.size(values)) % 8191 + 1, tf.float64)
        prints.append(tf.reduce_sum(tf.where(tf.math.is_finite(values), values, 0.5) * places))
    # Hashed, or the numbers of a tensor with large ones would hide those of the others.
    words = tf.strings.as_string(tf.stack(prints), precision=17, scientific=True)
    found = tf.strings.to_hash_bucket_fast(tf.strings.reduce_join(words, separator=" "), 1 << 52)
    return tf.cast(found, tf.float64)
