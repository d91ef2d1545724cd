"""A resumed pipeline is the same, bit for bit, as one that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from training import CLASSES, FEATURES, assert_same_bits, fit, loss, samples, state_of

BATCHES = 4


class Crash(Exception):
    """Ends a `fit`."""


def build() -> keras.Model:
    inputs = x = keras.Input((FEATURES,))
    for units in (8, 7, 9):
        x = keras.layers.Dense(units, activation="tanh")(x)
    x = keras.layers.Dropout(0.2)(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(x))


def train(folder: Path, crash_at: int = 0) -> tuple[Any, Any]:
    """Train three epochs with a checkpoint; return the state of this rank, and the history."""
    keras.utils.set_random_seed(5)
    pipe = hk.pipeline_parallel(build, microbatches=2)
    pipe.compile(keras.optimizers.Adam(0.01), loss(), metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices(samples(BATCHES * 8)).shuffle(100, seed=3).batch(8)
    checkpoint = hk.Checkpoint(folder, every=1)
    steps = 0

    def end_batch(batch: int, logs: Any) -> None:
        nonlocal steps
        steps += 1
        checkpoint._running.fit._writer.wait()  # the next batch may save again
        if steps == crash_at:
            raise Crash

    at_batches = keras.callbacks.LambdaCallback(on_train_batch_end=end_batch)
    history = fit(pipe, data, epochs=3, callbacks=[checkpoint, at_batches])
    return state_of(pipe), history


def test_resumed_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    if hvpipe.size() == 1:
        pytest.skip("needs two stages")
    folder = Path(hvpipe.broadcast_object(str(tmp_path)))
    wanted, history = train(folder / "whole")
    with pytest.raises(Crash):
        train(folder / "cut", crash_at=BATCHES + 3)
    hvpipe.barrier()
    found, rest = train(folder / "cut")
    assert_same_bits(found, wanted)
    # Metrics are made in the first step, so those of the resumed epoch count from there.
    assert history["loss"][-2:] == rest["loss"]
    assert history["accuracy"][-1:] == rest["accuracy"][-1:]
