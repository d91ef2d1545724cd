"""Shards: each sample on one rank, equally many batches on all ranks, and warnings about other data."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError
from training import (
    FEATURES,
    assert_same_bits,
    compiled,
    fit,
    mlp,
    my_batches,
    parallel,
    samples,
    state_of,
)

# Plain Keras also warns about a dataset of unknown length.
ENDS_BY_ITSELF = pytest.mark.filterwarnings("ignore:Your input ran out of data")
SEVERAL_RANKS = pytest.mark.skipif(
    "hvpipe.size() == 1", reason="plain Keras counts the call that finds no data as a step"
)


def unknown(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.filter(lambda *row: True)


def fixed_size(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.map(lambda x, y: (tf.ensure_shape(x, (8, FEATURES)), tf.ensure_shape(y, (8,))))


def numbers(batches: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(2 * batches).batch(2)


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("spare", [0, 1])
def test_every_batch_goes_to_one_rank(known: bool, spare: int) -> None:
    size = hvpipe.size()
    spare = spare if size > 1 else 0
    whole = numbers(3 * size + spare)
    mine = [batch.numpy().tolist() for batch in hk.shard(whole if known else unknown(whole))]
    everyone = hvpipe.allgather_object(mine)
    assert mine == [[2 * b, 2 * b + 1] for b in range(hvpipe.rank(), 3 * size, size)]
    flat = sorted(n for batches in everyone for batch in batches for n in batch)
    assert flat == list(range(6 * size))


def test_structures_of_unknown_length() -> None:
    """For dicts, and for inputs with labels: the parts of an element stay together."""
    count = 2 * hvpipe.size()
    rows = tf.data.Dataset.range(count)
    for structure in (lambda n: {"a": n, "b": -n}, lambda n: ({"a": n}, -n), lambda n: ((n, n), -n)):
        whole = rows.map(structure).batch(1)
        expected = list(hk.shard(whole).as_numpy_iterator())
        found = list(hk.shard(unknown(whole)).as_numpy_iterator())
        assert len(found) == 2
        assert tf.nest.flatten(found) == tf.nest.flatten(expected)


def test_an_endless_dataset() -> None:
    endless = numbers(hvpipe.size()).repeat()
    mine = [int(batch[0]) for batch in hk.shard(endless).take(3)]
    assert mine == [2 * hvpipe.rank()] * 3


def test_not_a_dataset() -> None:
    with pytest.raises(HvpipeError, match="Received: dataset of type ndarray"):
        hk.shard(np.zeros(3))


def test_a_warning_if_all_ranks_read_the_same_data(recwarn: pytest.WarningsRecorder) -> None:
    data = tf.data.Dataset.from_tensor_slices(samples(16)).batch(8)
    fit(parallel(compiled()), data)
    told = [w for w in recwarn if "read the same first batch" in str(w.message)]
    assert len(told) == (1 if hvpipe.size() > 1 and hvpipe.rank() == 0 else 0)


def test_no_warning_for_shards(recwarn: pytest.WarningsRecorder) -> None:
    fit(parallel(compiled()), my_batches(2))
    assert not [w for w in recwarn if "same first batch" in str(w.message)]


@ENDS_BY_ITSELF
@SEVERAL_RANKS
def test_epochs_of_unknown_length() -> None:
    """The call that finds the end of the data must not leave a step half finished."""

    def run(overlap: str, **options: Any) -> dict[str, np.ndarray]:
        model = parallel(compiled(**options), overlap)
        fit(model, unknown(my_batches(4)), epochs=3)
        assert int(model.optimizer.iterations) == 12
        return state_of(model)

    assert_same_bits(run("step"), run("none"))


@ENDS_BY_ITSELF
@SEVERAL_RANKS
@pytest.mark.parametrize(("execution", "accumulation"), [(1, 2), (3, None)])
def test_epochs_of_unknown_length_with_accumulation_or_several_steps(
    execution: int, accumulation: int | None
) -> None:
    """Weight decay, counters and sums need no data, so the call without data must not run them."""

    def run(overlap: str) -> dict[str, np.ndarray]:
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, gradient_accumulation_steps=accumulation)
        model = parallel(compiled(mlp, optimizer, steps_per_execution=execution), overlap)
        fit(model, unknown(fixed_size(my_batches(4))), epochs=3)
        fit(model, unknown(my_batches(6)).repeat(), epochs=2, steps_per_epoch=3)
        assert int(model.optimizer.iterations) == 18 // (accumulation or 1)
        return state_of(model)

    linear = run("none")
    assert_same_bits(run("step"), linear)
    if execution == 1:  # it updates by the code of "none"
        assert_same_bits(run("backward"), linear)
