"""Small pipelines that the cases of files and checkpoints save and load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import hvpipe
import hvpipe.keras as hk

BATCH = 8
EPOCH = {"batch_size": BATCH, "epochs": 1, "shuffle": False, "verbose": 0}


def build() -> Any:
    """Build a model of dense layers. The first and the last stage share one of them."""
    twice = keras.layers.Dense(6, activation="tanh", name="twice")
    inputs = keras.Input((6,))
    x = twice(inputs)
    x = keras.layers.Dense(8, activation="relu", kernel_regularizer="l2")(x)
    x = keras.layers.Dense(8, activation="tanh")(x)
    x = keras.layers.Dense(6, activation="relu")(x)
    x = twice(x)
    return keras.Model(inputs, keras.layers.Dense(2)(x))


def build_with_more_state() -> Any:
    """Build a model with seeds, statistics, and weights that receive no gradient."""
    inputs = keras.Input((6,))
    x = keras.ops.stop_gradient(keras.layers.Dense(8)(inputs))
    x = keras.layers.BatchNormalization()(keras.layers.Dropout(0.3)(x))
    x = keras.layers.BatchNormalization()(keras.layers.Dropout(0.3)(keras.layers.Dense(8)(x)))
    return keras.Model(inputs, keras.layers.Dense(2)(x))


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def pipeline(
    model: Any = build, optimizer: Callable[[], Any] = adam, schedule: str = "1f1b", **layout: Any
) -> Any:
    keras.utils.set_random_seed(5)
    pipe = hk.pipeline_parallel(model, microbatches=4, schedule=schedule, **layout)
    pipe.compile(optimizer(), loss="mse", metrics=["mae"])
    return pipe


def data() -> tuple[Any, Any]:
    random = np.random.default_rng(3)
    return random.normal(size=(3 * BATCH, 6)).astype("float32"), random.normal(size=(3 * BATCH, 2))


def state(pipe: Any) -> dict[str, Any]:
    """Return all weights and slots of the pipeline by name, gathered from all ranks."""
    own = pipe.rank_state()
    mine = {name: own.named[name].numpy() for name in own.owned}
    return {name: value for part in hvpipe.allgather_object(mine) for name, value in part.items()}


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def without_memory(pipe: Any) -> list[str]:
    return [v.path for v in pipe._context.model.variables if v._value is None]


def fill(pipe: Any) -> None:
    """Set weights and slots to values drawn from their names. Ranks that share them get the same."""
    for name, variable in pipe.rank_state().named.items():
        random = np.random.default_rng(list(name.encode()))
        variable.assign(random.uniform(1, 9, variable.shape).astype(variable.dtype))
