"""Updating bucket by bucket gives the bits of the optimizer's own `apply`, for every optimizer of Keras.

These cases are eager and exchange nothing. test_exact.py trains in graphs, on several ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from hvpipe.keras.data_parallel.bucket_update import acts_by_variable, apply_all, apply_some, count_step
from training import State, assert_same_bits, state_of

optimizers = keras.optimizers
STEPS = 3
WRAPPERS = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer", "OptimizerMap"}
EVERY_OPTIMIZER = sorted(
    name for name, kind in inspect.getmembers(optimizers, inspect.isclass) if name not in WRAPPERS
)
# They override a method that `apply` calls once for all variables, so hvpipe calls `apply` itself.
ONCE_PER_STEP = {"Muon", "Nadam"}
OPTIONS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "centered": lambda: optimizers.RMSprop(0.1, centered=True),
    "clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.01),
    "loss_scale": lambda: optimizers.Adam(0.01, loss_scale_factor=8.0),
}


@pytest.mark.parametrize("name", [name for name in EVERY_OPTIMIZER if name not in ONCE_PER_STEP])
def test_every_optimizer(name: str) -> None:
    make = getattr(optimizers, name)
    assert_same_bits(updated(make(0.01), by_bucket=True), updated(make(0.01), by_bucket=False))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    make = OPTIONS[name]
    assert_same_bits(updated(make(), by_bucket=True), updated(make(), by_bucket=False))


@pytest.mark.parametrize("name", sorted(ONCE_PER_STEP & set(EVERY_OPTIMIZER)))
def test_an_optimizer_that_acts_once_per_step(name: str) -> None:
    assert not acts_by_variable(getattr(optimizers, name)(0.01), [])


def updated(optimizer: Any, by_bucket: bool) -> State:
    """Return a model's state after some updates with random gradients."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((7,)),
            keras.layers.Dense(6, kernel_constraint="max_norm"),
            keras.layers.Dense(5),
        ]
    )
    model.compile(optimizer)
    variables = model.trainable_variables
    optimizer.build(variables)
    assert acts_by_variable(optimizer, variables)
    for step in range(STEPS):
        gradients = [tf.random.stateless_normal(v.shape, (step, n)) for n, v in enumerate(variables)]
        if by_bucket:
            for bucket in (slice(3, 4), slice(1, 3), slice(0, 1)):
                apply_some(optimizer, gradients[bucket], variables[bucket])
            count_step(optimizer)
        else:
            apply_all(optimizer, gradients, variables)
    return state_of(model)
