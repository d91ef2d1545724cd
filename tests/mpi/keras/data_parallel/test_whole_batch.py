"""n ranks with batches of b samples train as one rank with batches of n * b samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
from hvpipe.session import current
from training import (
    State,
    all_batches,
    assert_close,
    assert_same_on_all_ranks,
    by_rank_0,
    compiled,
    fit,
    mlp,
    my_batches,
    parallel,
    samples,
    state_of,
    table,
)

STEPS = 12
# Plain Keras also warns about a dataset of unknown length.
ENDS_BY_ITSELF = pytest.mark.filterwarnings("ignore:Your input ran out of data")
RELATIVE = 1e-5

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    # Adam divides by the root of the second moment. A large epsilon keeps rounding errors from growing.
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "accumulation": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3),
}


def regularised() -> keras.Model:
    """Build a model with a weight regularizer. Its loss counts once, for any number of ranks."""
    model = mlp()
    model.layers[0].kernel_regularizer = keras.regularizers.L2(0.01)
    return model


def own_size(step: int, rank: int) -> int:
    """Return a rank's number of samples at a step. It differs between ranks and between steps."""
    return 3 + (5 * rank + 3 * step) % 7


def unequal(steps: int) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Return this rank's batches, whose size differs by rank and step, and those of all ranks together."""
    total = sum(own_size(step, rank) for step in range(steps) for rank in range(hvpipe.size()))
    x, y = samples(total)
    mine: list[Any] = []
    whole: list[Any] = []
    start = 0
    for step in range(steps):
        begun = start
        for rank in range(hvpipe.size()):
            end = start + own_size(step, rank)
            if rank == hvpipe.rank():
                mine.append((x[start:end], y[start:end]))
            start = end
        whole.append((x[begun:start], y[begun:start]))
    # With unknown length, plain Keras counts one step too many: its counter needs no data to run.
    known = as_dataset(whole).apply(tf.data.experimental.assert_cardinality(steps))
    return (known if hvpipe.size() == 1 else as_dataset(mine)), known


def as_dataset(batches: list[Any]) -> tf.data.Dataset:
    x, y = batches[0]
    signature = (
        tf.TensorSpec((None, *x.shape[1:]), x.dtype),
        tf.TensorSpec((None, *y.shape[1:]), y.dtype),
    )
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)


MOMENTUM_EVERYWHERE = pytest.param("momentum", marks=pytest.mark.every_size)


@pytest.mark.parametrize(
    "name",
    [pytest.param("momentum", marks=[pytest.mark.every_size, pytest.mark.quick]), "adam", "accumulation"],
)
def test_equal_batches(name: str) -> None:
    model = parallel(compiled(regularised, OPTIMIZERS[name]()))
    fit(model, my_batches(STEPS))
    compare(model, plain(regularised, name, all_batches(STEPS))[0])


@pytest.mark.parametrize("name", [MOMENTUM_EVERYWHERE, "accumulation"])
def test_tables(name: str) -> None:
    """hvpipe also sends much less than the whole table."""
    model = parallel(compiled(table, OPTIMIZERS[name]()))
    before = current().engine.counters()["bytes_sent"]
    fit(model, my_batches(STEPS))
    sent = current().engine.counters()["bytes_sent"] - before
    compare(model, plain(table, name, all_batches(STEPS))[0])
    of_the_start = 2 * model.count_params() * 4
    assert sent < of_the_start + STEPS * 0.5 * model.layers[-3].embeddings.value.shape.num_elements() * 4


def plain(
    build: Callable[[], keras.Model], name: str, data: tf.data.Dataset, **options: Any
) -> tuple[State, dict[str, list[float]]]:
    """Return weights and history of one rank that trains on the data of all."""

    def trained() -> tuple[State, dict[str, list[float]]]:
        model = compiled(build, OPTIMIZERS[name](), **options)
        history = fit(model, data)
        return state_of(model), history

    found: tuple[State, dict[str, list[float]]] = by_rank_0(trained)
    return found


@pytest.mark.parametrize("name", ["momentum", pytest.param("accumulation", marks=pytest.mark.every_size)])
@ENDS_BY_ITSELF
def test_unequal_batches(name: str) -> None:
    """The datasets also have no known length."""
    mine, whole = unequal(STEPS)
    model = parallel(compiled(mlp, OPTIMIZERS[name](), metrics=["accuracy"]))
    history = fit(model, mine)
    state, expected = plain(mlp, name, whole, metrics=["accuracy"])
    compare(model, state)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=RELATIVE)
    np.testing.assert_allclose(history["accuracy"], expected["accuracy"], rtol=RELATIVE)


def test_compression_is_close() -> None:
    model = parallel(compiled(), compression="bf16")
    fit(model, my_batches(STEPS))
    assert_close(state_of(model), plain(mlp, "momentum", all_batches(STEPS))[0], 0.05)
    assert_same_on_all_ranks(state_of(model))


def compare(model: keras.Model, expected: State) -> None:
    mine = state_of(model)
    assert_same_on_all_ranks(mine)
    if model.optimizer.gradient_accumulation_steps:
        assert STEPS % model.optimizer.gradient_accumulation_steps == 0
    assert_close(mine, expected, RELATIVE)
