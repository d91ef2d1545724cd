"""`stale` is exact during its warm-up and one step late afterwards, and it still learns."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError
from training import (
    assert_same_bits,
    assert_same_on_all_ranks,
    compiled,
    fit,
    my_batches,
    parallel,
    state_of,
)


def test_the_warm_up_is_exact() -> None:
    warming = parallel(compiled(), "stale", warmup_steps=100)
    fit(warming, my_batches(5), epochs=2)
    exact = parallel(compiled(), "none")
    fit(exact, my_batches(5), epochs=2)
    assert_same_bits(state_of(warming), state_of(exact))


@pytest.mark.older_tensorflow
def test_after_the_warm_up_a_gradient_is_one_step_late() -> None:
    """The loss makes the gradient equal to the weight, so the delayed sequence can be worked out by hand."""
    if hvpipe.size() == 1:
        pytest.skip("one rank has nothing to wait for")
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
    )
    model.compile(keras.optimizers.SGD(0.25), loss=lambda y, output: tf.square(output) / 2)
    hk.data_parallel(model, "stale", warmup_steps=1)
    ones = np.ones((2, 1), np.float32)
    data = tf.data.Dataset.from_tensors((ones * (1 if hvpipe.rank() == 0 else -1), ones)).repeat(4)
    fit(model, data)
    # Step 1 is exact: 1 -> 0.75. Step 2 computes the gradient 0.75 and applies nothing. Step 3 applies it,
    # and so on.
    weight, late = 0.75, None
    for _ in range(3):
        # The previous step's update comes after backward, so the gradient uses the older weight.
        gradient = weight
        if late is not None:
            weight -= 0.25 * late
        late = gradient
    weight -= 0.25 * late  # the end of fit applies the last gradient
    np.testing.assert_allclose(model.get_weights()[0], [[weight]], rtol=1e-6)
    assert int(model.optimizer.iterations) == 4


def test_accumulation_is_refused() -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank has nothing to wait for")
    model = compiled(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    with pytest.raises(HvpipeError, match="gradient_accumulation_steps=2"):
        fit(parallel(model, "stale"), my_batches(2))


def test_a_scaled_loss_is_refused() -> None:
    """The gradients of one step would be unscaled with the next step's scale."""
    if hvpipe.size() == 1:
        pytest.skip("one rank has nothing to wait for")
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(
        HvpipeError, match=r"needs unscaled gradients.*Received: optimizer .*, a LossScaleOptimizer"
    ):
        fit(parallel(compiled(optimizer=scaled), "stale"), my_batches(2))


def test_digits_within_a_point_of_exact() -> None:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:1400], order[1400:]
    batch = 64 // hvpipe.size()

    def accuracy(overlap: str) -> float:
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        criterion = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=criterion, metrics=["accuracy"])
        hk.data_parallel(model, overlap, warmup_steps=40)
        data = tf.data.Dataset.from_tensor_slices((x[train], y[train])).shuffle(1400, seed=2).batch(batch)
        fit(model, hk.shard(data), epochs=15)
        assert_same_on_all_ranks(state_of(model))
        found: float = model.evaluate(x[test], y[test], verbose=0)[1]
        return found

    exact, stale = accuracy("step"), accuracy("stale")
    assert exact > 0.95
    assert abs(exact - stale) <= 0.01
