"""All ranks start equal and stay equal, bit for bit, and a repeated run gives the same bits."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from training import (
    CLASSES,
    FEATURES,
    Remember,
    assert_same_bits,
    assert_same_on_all_ranks,
    fit,
    loss,
    my_batches,
    state_of,
)

layers = keras.layers


def unlike(seed: int) -> keras.Model:
    """Build a model with seeds, statistics and slots. All of them, and the learning rate, differ by rank."""
    keras.utils.set_random_seed(seed + hvpipe.rank())
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.GaussianNoise(0.1),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(CLASSES),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01 * (1 + hvpipe.rank())), loss=loss(), metrics=["accuracy"])
    return hk.data_parallel(model, bucket_bytes=200)


@pytest.mark.parametrize("overlap", [pytest.param("step", marks=pytest.mark.every_size), "stale"])
def test_equal_after_every_epoch_and_repeatable(overlap: str) -> None:
    def run() -> tuple[list[Any], dict[str, Any]]:
        model = hk.data_parallel(unlike(40), overlap, bucket_bytes=200, warmup_steps=3)
        remember = Remember(lambda model: None)
        remember.look = lambda model: {n: a for n, a in state_of(model).items() if "seed" not in n}
        history = fit(model, my_batches(3), epochs=3, callbacks=[remember])
        return remember.at_epochs, history

    epochs, history = run()
    for state in epochs:
        assert_same_on_all_ranks(state)
    assert_same_on_all_ranks(history)
    again, history_again = run()
    assert history_again == history
    for mine, before in zip(again, epochs, strict=True):
        assert_same_bits(mine, before)


@pytest.mark.every_size
@pytest.mark.older_tensorflow
@pytest.mark.quick
def test_all_ranks_start_from_rank_0s_state() -> None:
    """Weights, seeds and the learning rate come from rank 0.

    At a learning rate of 0, the first batch moves no weights.
    """
    model = unlike(50)
    start = hvpipe.broadcast_object([v.numpy() for v in model.variables if "seed" in v.path])
    rate = hvpipe.broadcast_object(float(model.optimizer.learning_rate.numpy()))
    model.optimizer.learning_rate = 0.0 if hvpipe.rank() == 0 else 5.0
    before = hvpipe.broadcast_object(model.get_weights())
    fit(model, my_batches(1))
    assert float(model.optimizer.learning_rate.numpy()) == 0.0
    assert rate == pytest.approx(0.01)
    assert_same_on_all_ranks(state_of(model))  # including the seeds, which advance equally on all ranks
    after = [v.numpy() for v in model.variables if "seed" in v.path]
    assert start
    assert all((a != b).any() for a, b in zip(start, after, strict=True))
    for variable, array in zip(model.weights, before, strict=True):
        if variable.trainable:
            np.testing.assert_array_equal(variable.numpy(), array)


def is_last() -> bool:
    return hvpipe.rank() == hvpipe.size() - 1


def set_on_rank_0(model: keras.Model) -> Any:
    """Set new weights and statistics on rank 0 only. Return them on all ranks."""
    new = [np.full(v.shape, 0.5, v.dtype) for v in model.get_weights()]
    if hvpipe.rank() == 0:
        model.set_weights(new)
    return new


def set_on_the_last(model: keras.Model) -> Any:
    """Change weights and the learning rate on the last rank, bypassing the model's methods.

    Return the weights from before, because `fit` undoes the change.
    """
    before = model.get_weights()
    if is_last() and hvpipe.size() > 1:
        for variable in [*model.trainable_variables, model.optimizer.learning_rate]:
            variable.assign(variable + 1.0)
    return before


@pytest.mark.parametrize(
    "change", [set_on_rank_0, pytest.param(set_on_the_last, marks=pytest.mark.every_size)]
)
def test_weights_set_on_one_rank_before_another_fit(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = unlike(60)
    fit(model, my_batches(2))
    assert_same_on_all_ranks(state_of(model))
    wanted = change(model)
    start: list[Any] = []
    look = keras.callbacks.LambdaCallback(lambda epoch, logs: start.append(model.get_weights()))
    fit(model, my_batches(2), epochs=2, callbacks=[look])
    for found, array in zip(start[0], wanted, strict=True):
        np.testing.assert_array_equal(found, array)
    assert_same_on_all_ranks(state_of(model))
    told = [
        record.getMessage() for record in caplog.records if "continue with rank 0's" in record.getMessage()
    ]
    assert len(told) == (hvpipe.rank() == 0 and hvpipe.size() > 1)
    if told:
        assert f"{hvpipe.size() - 1} differed from rank 0 at the start of fit" in told[0]


def test_expected_differences_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """BatchNorm statistics and sums not yet reduced may differ between ranks without a warning."""
    model = unlike(70)
    model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2), loss=loss())
    fit(model, my_batches(3))  # the third gradient is not reduced yet
    for x, y in my_batches(2, seed=1):
        model.train_on_batch(x, y)
    model.set_weights([2 * v for v in model.get_weights()])
    seen: list[Any] = []
    look = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(state_of(model)))
    fit(model, my_batches(1), callbacks=[look])
    assert_same_on_all_ranks({name: v for name, v in seen[0].items() if "seed" not in name})
    assert not [record for record in caplog.records if "rank 0's" in record.getMessage()]


@pytest.mark.parametrize("overlap", ["step", "stale"])
def test_weights_set_on_one_rank_between_two_batches(overlap: str, caplog: pytest.LogCaptureFixture) -> None:
    model = hk.data_parallel(unlike(80), overlap, warmup_steps=0)
    batches = list(my_batches(4))
    model.train_on_batch(*batches[0])
    if is_last():
        model.set_weights([np.ones_like(v) for v in model.get_weights()])
    for x, y in batches[1:]:
        model.train_on_batch(x, y)
    model.evaluate(*batches[0], verbose=0)
    assert_same_on_all_ranks({name: v for name, v in state_of(model).items() if "seed" not in name})
    told = [record for record in caplog.records if "in this train_on_batch" in record.getMessage()]
    assert len(told) == (hvpipe.rank() == 0 and hvpipe.size() > 1)


def test_weights_that_a_callback_sets_on_one_rank() -> None:
    model = unlike(90)

    class Best(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if is_last() and epoch == 0:
                self.model.set_weights([0 * v for v in self.model.get_weights()])

    start: list[Any] = []
    look = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: start.append(weights()))

    def weights() -> Any:
        return {str(place): array for place, array in enumerate(model.get_weights())}

    fit(model, my_batches(1), epochs=2, callbacks=[Best(), look])
    assert_same_on_all_ranks(start[1])
    assert start[1]["0"].any() or hvpipe.size() == 1


def test_a_learning_rate_that_a_callback_sets_on_rank_0_only(caplog: pytest.LogCaptureFixture) -> None:
    """Regression guard: the ranks went on with weights of their own."""
    model = unlike(91)
    slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    fit(model, my_batches(1), epochs=3, callbacks=[slower] if hvpipe.rank() == 0 else [])
    assert_same_on_all_ranks({name: v for name, v in state_of(model).items() if "seed" not in name})
    told = [record for record in caplog.records if "differed from rank 0 at the start" in record.getMessage()]
    assert len(told) == (2 if hvpipe.rank() == 0 and hvpipe.size() > 1 else 0)  # the first step does it alone


def test_frozen_weights_are_no_statistics() -> None:
    """They may be large, and they are equal on all ranks anyway."""
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dense(1)]
    )
    model.layers[0].trainable = model.layers[1].trainable = False
    model.compile("sgd", "mse")
    data_parallel = hk.data_parallel(model)._hvpipe
    assert [v.name for v in data_parallel.statistics()] == ["moving_mean", "moving_variance"]


def test_a_normalization_adapted_on_rank_0_only() -> None:
    """The layer computes with constants made from its variables when it was built or adapted."""
    keras.utils.set_random_seed(1)
    normalization = layers.Normalization()
    model = keras.Sequential([keras.Input((FEATURES,)), normalization, layers.Dense(CLASSES)])
    model.compile("sgd", loss=loss())
    x = np.random.default_rng(0).normal(2.0, 3.0, (20, FEATURES)).astype(np.float32)
    model.predict(x, verbose=0)  # builds a graph with the old constants
    if hvpipe.rank() == 0:
        normalization.adapt(x)
    fit(hk.data_parallel(model), my_batches(1))
    np.testing.assert_allclose(np.ravel(normalization.mean), x.mean(0), rtol=1e-4)
    assert_same_on_all_ranks(model.predict(x, verbose=0))


@pytest.mark.every_size
def test_statistics_are_means_over_all_samples() -> None:
    """Each rank updates BatchNormalization's moving averages with its own data.

    All ranks end with the mean.
    """
    size, rank = hvpipe.size(), hvpipe.rank()
    model = keras.Sequential([keras.Input((1,)), layers.BatchNormalization(momentum=0.0), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), loss="mse")
    hk.data_parallel(model)
    count = 4 * (rank + 1)
    fit(model, tf.data.Dataset.from_tensors((np.full((count, 1), float(rank)), np.zeros((count, 1)))))
    counts = [4 * (r + 1) for r in range(size)]
    expected = sum(r * n for r, n in enumerate(counts)) / sum(counts)
    np.testing.assert_allclose(model.layers[0].moving_mean.numpy(), [expected], rtol=1e-6)
    assert_same_on_all_ranks(state_of(model))
