"""If a callback stops training on one rank, all ranks stop after the same batch."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
from training import (
    again,
    assert_same_bits,
    assert_same_on_all_ranks,
    compiled,
    fit,
    my_batches,
    parallel,
    samples,
    state_of,
    usual,
)

BATCHES = 4


def everywhere(rank: int) -> bool:
    return True


def on_the_last(rank: int) -> bool:
    return rank == hvpipe.size() - 1


class Stop(keras.callbacks.Callback):
    """Stops training at the `number`-th call of a hook, on the ranks for which `where` is true."""

    def __init__(self, hook: str, number: int, where: Any = on_the_last) -> None:
        super().__init__()
        self.seen: list[int] = []

        def call(place: int, logs: Any = None) -> None:
            self.seen.append(place)
            if len(self.seen) == number and where(hvpipe.rank()):
                self.model.stop_training = True

        setattr(self, hook, call)


def with_accuracy(overlap: str, optimizer: Any = None, **options: Any) -> keras.Model:
    return parallel(compiled(optimizer=optimizer, metrics=["accuracy"], **options), overlap, warmup_steps=1)


def stopped(
    overlap: str, callback: Any, epochs: int = 3, **options: Any
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return state and history of a run that this callback cuts short. Both are the same on all ranks."""
    new = options or overlap == "stale"  # whose warm-up happens once
    model = with_accuracy(overlap, **options) if new else again(with_accuracy, overlap)
    history = fit(model, my_batches(BATCHES), epochs=epochs, callbacks=[callback])
    assert model.stop_training
    state = state_of(model)
    assert_same_on_all_ranks(state)
    assert_same_on_all_ranks(np.array([history["loss"], history["accuracy"]]))
    return {**state, "updates": np.array(int(model.optimizer.iterations))}, history


@pytest.mark.parametrize(
    ("overlap", "same_as"),
    [
        ("none", "none"),
        ("backward", "none"),
        pytest.param("step", "none", marks=[pytest.mark.every_size, pytest.mark.older_tensorflow]),
        ("stale", "stale"),
    ],
)
def test_one_rank_stops_within_an_epoch(overlap: str, same_as: str) -> None:
    state, history = stopped(overlap, Stop("on_train_batch_end", BATCHES + 2))
    assert len(history["loss"]) == 2
    assert state["updates"] == BATCHES + 2
    together, its_history = all_stopped(same_as)
    assert_same_bits(state, together)
    assert history == its_history


@functools.cache
def all_stopped(overlap: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the same for a run in which every rank's callback stops training at that batch."""
    return stopped(overlap, Stop("on_train_batch_end", BATCHES + 2, everywhere))


def test_all_ranks_stop_at_one_batch_as_in_plain_keras() -> None:
    plain = compiled()
    stop = Stop("on_train_batch_end", 2, everywhere)
    history = fit(plain, my_batches(BATCHES), epochs=3, callbacks=[stop])
    assert len(history["loss"]) == 1
    assert int(plain.optimizer.iterations) == len(stop.seen) == 2
    stop = Stop("on_train_batch_end", 2, everywhere)
    state, history = stopped("step", stop)
    assert len(history["loss"]) == 1
    assert state["updates"] == len(stop.seen) == 2


@pytest.mark.parametrize(
    ("hook", "number", "epochs", "updates"),
    [
        ("on_train_batch_begin", 2, 1, 2),
        ("on_train_batch_end", BATCHES, 1, BATCHES),  # the last batch of an epoch
        ("on_epoch_end", 2, 2, 2 * BATCHES),
        # Keras checks the flag only after the epoch's first batch.
        ("on_epoch_begin", 2, 2, BATCHES + 1),
    ],
)
def test_where_one_rank_stops(hook: str, number: int, epochs: int, updates: int) -> None:
    state, history = stopped("step", Stop(hook, number))
    assert len(history["loss"]) == epochs
    assert state["updates"] == updates


def test_several_steps_per_execution() -> None:
    state, history = stopped("step", Stop("on_train_batch_end", 1), steps_per_execution=2)
    assert len(history["loss"]) == 1
    assert state["updates"] == 2


def test_between_two_updates_of_an_accumulation() -> None:
    # State is compared except for accumulated gradients, which each rank has its own.
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    state, history = stopped("step", Stop("on_train_batch_end", 3), optimizer=optimizer)
    assert len(history["loss"]) == 1
    assert state["updates"] == 1


@pytest.mark.parametrize("overlap", ["none", "step"])
def test_nan_in_the_data_of_one_rank(overlap: str) -> None:
    x, y = samples(8 * BATCHES, seed=hvpipe.rank())
    if on_the_last(hvpipe.rank()):
        x[8] = np.nan  # in the second batch
    model = again(usual, overlap)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    history = fit(model, data, epochs=3, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert len(history["loss"]) == 1
    assert np.isnan(history["loss"]).all()
    assert int(model.optimizer.iterations) == 2
    assert_same_on_all_ranks(state_of(model))


@pytest.mark.every_size
def test_a_callback_that_only_one_rank_has() -> None:
    model = again(usual, "step")
    mine = [Stop("on_train_batch_end", 2)] if on_the_last(hvpipe.rank()) else []
    history = fit(model, my_batches(BATCHES), epochs=3, callbacks=mine, validation_data=my_batches(1))
    assert len(history["val_loss"]) == 1
    assert int(model.optimizer.iterations) == 2
    assert_same_on_all_ranks(state_of(model))
    # A later fit is not stopped.
    assert len(fit(model, my_batches(BATCHES), epochs=2)["loss"]) == 2


def test_a_callback_list_of_async_safe_callbacks() -> None:
    stop = Stop("on_train_batch_end", 2)
    stop.async_safe = True
    model = again(usual, "step")
    callbacks = keras.callbacks.CallbackList([stop], add_history=True, model=model)
    fit(model, my_batches(BATCHES), epochs=3, callbacks=callbacks)
    assert int(model.optimizer.iterations) == 2
    assert_same_on_all_ranks(state_of(model))


def test_callbacks_that_never_stop_cost_no_exchange() -> None:
    def exchanges(stops: bool) -> float:
        timer = Stop("on_train_batch_end", 1000)
        timer.stops_training = stops
        model = again(usual, "step")
        before = hvpipe.counters()["operations"]
        fit(model, my_batches(BATCHES), callbacks=[timer])
        return hvpipe.counters()["operations"] - before

    fit(again(usual, "step"), my_batches(1))  # ranks compare a step when they trace it
    if hvpipe.size() > 1:
        assert exchanges(True) == exchanges(False) + BATCHES
