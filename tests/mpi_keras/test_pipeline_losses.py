"""Losses and metrics of a pipeline are those of the undivided model."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from mpi_keras.pipelines import batches, mlp, sgd

import hvpipe.keras as hk
from hvpipe.errors import HvpipeError

layers = keras.layers


def one_output() -> keras.Model:
    return keras.Sequential(
        [keras.Input((12,)), *(layers.Dense(4, activation="tanh") for _ in range(3)), layers.Dense(1)]
    )


def two_outputs() -> keras.Model:
    """Their names are in another order than the outputs."""
    inputs = keras.Input((12,))
    x = layers.Dense(4)(layers.Dense(4, activation="tanh")(inputs))
    return keras.Model(inputs, [layers.Dense(1, name="z")(x), layers.Dense(1, name="a")(x)])


def told(build: Any, fit: Any, **compiled: Any) -> list[dict[str, list[float]]]:
    """The histories of the undivided model and of its pipeline."""
    found = []
    for parallel in (False, True):
        keras.utils.set_random_seed(5)
        model = hk.pipeline_parallel(build, microbatches=4) if parallel else build()
        model.compile(keras.optimizers.SGD(0.01), **compiled)
        found.append(fit(model))
    return found


def check_equal(found: list[dict[str, list[float]]]) -> None:
    assert found[0].keys() == found[1].keys()
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-5, err_msg=name)


def test_a_loss_that_is_a_sum_is_that_of_the_batch() -> None:
    x, _ = batches(mlp, 21)
    y = x[:, :1]

    def fit(model: Any) -> Any:
        options = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(x, y, sample_weight=np.linspace(0, 1, 21), validation_data=(x, y), **options).history

    check_equal(told(one_output, fit, loss=keras.losses.MeanSquaredError(reduction="sum")))


@pytest.mark.parametrize("reduction", [None, "mean_with_sample_weight"])
def test_a_reduction_that_parts_cannot_have_is_refused(reduction: str | None) -> None:
    pipe = hk.pipeline_parallel(one_output)
    with pytest.raises(HvpipeError, match=f"mean_squared_error with reduction={reduction!r}"):
        pipe.compile(sgd(), keras.losses.MeanSquaredError(reduction=reduction))


def test_targets_are_needed_for_a_loss() -> None:
    x, _ = batches(mlp, 8)
    pipe = hk.pipeline_parallel(one_output)
    pipe.compile(sgd(), "mse")
    with pytest.raises(HvpipeError, match="compiled with a loss, so it wants targets"):
        pipe.fit(x, batch_size=8, verbose=0)


def test_a_metric_may_have_a_value_for_each_class() -> None:
    x, y = batches(mlp, 16)

    def evaluate(model: Any) -> Any:
        return model.evaluate(x, keras.utils.to_categorical(y, 4), verbose=0, return_dict=True)

    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    check_equal(told(mlp, evaluate, loss=loss, metrics=[keras.metrics.F1Score(), "accuracy"]))


def test_targets_may_be_structured_otherwise_in_validation() -> None:
    x, _ = batches(mlp, 16)
    z, a = x[:, :1], 3 * x[:, 1:2]

    def fit(model: Any) -> Any:
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        return model.fit(x, {"z": z, "a": a}, validation_data=(x, [z, a]), **options).history

    check_equal(told(two_outputs, fit, loss="mse"))


def test_metrics_do_not_count_what_is_masked() -> None:
    def tagger() -> keras.Model:
        tokens = keras.Input((6,), dtype="int32")
        x = layers.Embedding(9, 4, mask_zero=True)(tokens)
        return keras.Model(tokens, layers.Dense(4)(layers.LSTM(4, return_sequences=True)(x)))

    rng = np.random.default_rng(1)
    x, y = rng.integers(0, 9, (16, 6)), rng.integers(0, 4, (16, 6))
    x[:5, 2:] = 0

    def evaluate(model: Any) -> Any:
        return {"accuracy": [model.evaluate(x, y, verbose=0)[1]]}

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    check_equal(told(tagger, evaluate, loss=loss, metrics=["accuracy"]))
