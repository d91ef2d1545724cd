"""A resumed pipeline is the same, bit for bit, as one that never stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from saved_pipelines import assert_same, state

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


def train(folder: Path, crash_at: int = 0, others: Sequence[Any] = (), **layout: Any) -> tuple[Any, Any]:
    """Train three epochs with a checkpoint; return the pipeline, and the history."""
    keras.utils.set_random_seed(5)
    pipe = hk.pipeline_parallel(build, **{"microbatches": 2, **layout})
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
    history = fit(pipe, data, epochs=3, callbacks=[checkpoint, at_batches, *others])
    return pipe, history


def test_resumed_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    if hvpipe.size() == 1:
        pytest.skip("needs two stages")
    folder = Path(hvpipe.broadcast_object(str(tmp_path)))
    wanted, history = train(folder / "whole")
    with pytest.raises(Crash):
        train(folder / "cut", crash_at=BATCHES + 3)
    hvpipe.barrier()
    found, rest = train(folder / "cut")
    assert_same_bits(state_of(found), state_of(wanted))
    # Metrics are made in the first step, so those of the resumed epoch count from there.
    assert history["loss"][-2:] == rest["loss"]
    assert history["accuracy"][-1:] == rest["accuracy"][-1:]


def best_weights(pipe: Any) -> dict[str, Any]:
    """Return the pipeline's weights, without the states of seeds, which are no weights."""
    named = state(pipe).items()
    return {name: v for name, v in named if name.startswith("weights/") and v.dtype == "float32"}


def test_the_best_weights_are_found_again_in_another_layout(tmp_path: Path) -> None:
    """Regression: a rank set those of the stages that it had before, or the weights of the resumed epoch."""
    if hvpipe.size() == 1:
        pytest.skip("needs two stages")
    folder = Path(hvpipe.broadcast_object(str(tmp_path)))

    def best_first() -> list[Any]:
        return [keras.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True)]

    wanted, _ = train(folder / "whole", others=best_first())
    with pytest.raises(Crash):
        train(folder / "cut", crash_at=BATCHES + 3, others=best_first())
    hvpipe.barrier()
    found, _ = train(folder / "cut", others=best_first(), stages=1, microbatches=4)
    assert_same(best_weights(found), best_weights(wanted))
