"""What of a model's settings counts as different."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from hvpipe.keras.compat import layers_in
from hvpipe.keras.same_model import Item, layer_items, loss_items, settings_items

layers = keras.layers


def items(*members: Any) -> list[Item]:
    """Return what counts of layers, or of a model."""
    return list(layer_items(layers_in(members[0]) if isinstance(members[0], keras.Model) else members))


def dense(**options: Any) -> list[Item]:
    return items(layers.Dense(2, **options), layers.Activation("relu"))


@pytest.mark.parametrize(
    "options",
    [{"activation": "tanh"}, {"use_bias": False}, {"dtype": "bfloat16"}, {"bias_constraint": "non_neg"}],
)
def test_settings_count(options: dict[str, Any]) -> None:
    assert dense(**options) != dense()
    assert not any(one.own for one in dense())


@pytest.mark.parametrize("name", ["dense_3", "units", "relu", "head_of_rank_1"])
def test_names_do_not_count(name: str) -> None:
    """Regression: a layer may be named as a setting, or as its value."""
    assert dense(name=name) == dense()


def test_initial_values_do_not_count() -> None:
    """Regression: nor is a large table turned into a list, which took minutes."""
    for value in (0.5, np.random.default_rng().normal(size=(2, 2))):
        assert dense(bias_initializer=keras.initializers.Constant(value)) == dense()
    assert keras.initializers.Constant(0.5).get_config() == {"value": 0.5}


def called_on(length: int, name: str) -> list[Item]:
    model = keras.Sequential([layers.LSTM(3), layers.Dense(1)], name=name)
    model(np.zeros((length, length, 2), np.float32))
    return items(model)


def test_shapes_of_batches_do_not_count() -> None:
    """Regression: a Sequential without an Input keeps the shape of its first batch in its config."""
    assert called_on(5, "a") == called_on(6, "b")


def branched(layers_before: int) -> keras.Model:
    for _ in range(layers_before):  # Keras numbers names
        layers.Dense(1)
    inputs = keras.Input((4,))
    one, other = layers.Dense(3)(inputs), layers.Dense(3)(inputs)
    return keras.Model(inputs, {"a": layers.Dense(1)(one + other), "b": layers.Dense(1)(one * 2 - other)})


def test_operations_and_links() -> None:
    assert items(branched(0)) == items(branched(3))
    inputs, first, second = keras.Input((4,)), layers.Dense(4), layers.Dense(4)
    chained, beside = second(first(inputs)), layers.Add()([first(inputs), second(inputs)])
    assert items(keras.Model(inputs, chained)) != items(keras.Model(inputs, beside))


class Own(layers.Layer):
    """Has arguments that may differ, and a `scale`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.arguments}


def test_arguments_of_own_classes_are_marked() -> None:
    def own(rank: int, scale: float) -> list[Item]:
        text = str([lambda: rank])  # with its address
        return items(Own(batch_size=rank, noise_seed=rank, file=f"/data/{rank}", text=text, scale=scale))

    assert own(0, 0.5) == own(1, 0.5)
    pairs = zip(own(0, 0.5), own(1, 0.25), strict=True)
    assert [ours.place for ours, theirs in pairs if ours != theirs and ours.own] == ["layer 0 (Own) scale:"]


def losses(**by_name: str) -> list[Item]:
    model = branched(0)
    model.compile(loss=by_name)
    return list(loss_items(model))


def test_losses_by_name() -> None:
    """Automatic names are numbered, and sets of names have another order on each rank."""
    assert losses(a_3="mae", b="mse") == losses(b="mse", a_11="mae") != losses(a_3="mse", b="mae")
    assert len(losses(a_3="mae", a_4="mse")) == 3


def scaled(name: str, **options: Any) -> list[Item]:
    inner = keras.optimizers.SGD(name=name, **options)
    return list(settings_items("optimizer", keras.optimizers.LossScaleOptimizer(inner, name=name)))


def test_names_and_rates_of_optimizers_do_not_count() -> None:
    assert (
        scaled("sgd_5", learning_rate=0.1)
        == scaled("sgd_7", learning_rate=0.2)
        != scaled("sgd", nesterov=True)
    )
