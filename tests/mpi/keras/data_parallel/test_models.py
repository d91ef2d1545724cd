"""Kinds of models: on each, `step` gives the same bits as `none`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError
from training import (
    CLASSES,
    FEATURES,
    assert_same_bits,
    assert_same_on_all_ranks,
    compiled,
    fit,
    loss,
    my_batches,
    parallel,
    samples,
    state_of,
)

layers = keras.layers
STEPS = 10


class Subclassed(keras.Model):
    """A model that is not built before fit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.hidden = layers.Dense(8, activation="relu")
        self.dropout = layers.Dropout(0.3)
        self.out = layers.Dense(CLASSES)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.out(self.dropout(self.hidden(inputs), training=training))


class WithUnused(Subclassed):
    """A model with trainable variables in the middle that receive no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = layers.Dense(3, name="unused")

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.unused(inputs)
        return super().call(inputs, training=training)


class OwnStep(Subclassed):
    """A model with its own train_step, which clips gradients."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            value = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(value, self.trainable_variables)
        self.optimizer.apply([tf.clip_by_norm(g, 1.0) for g in gradients], self.trainable_variables)
        return {"loss": value}


class CompiledStep(WithUnused):
    """A model whose train_step AutoGraph converts, which changes the types of errors raised inside."""

    @tf.function
    def train_step(self, data: Any) -> dict[str, Any]:
        return super().train_step(data)


class NoCall(keras.Model):
    """A model with a train_step and built parts but no call(), like the autoencoders of Keras's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(3, activation="tanh")])
        self.decoder = keras.Sequential([keras.Input((3,)), layers.Dense(FEATURES)])

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0]
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(tf.square(self.decoder(self.encoder(x)) - x))
        gradients = tape.gradient(value, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"loss": value}


def unbuilt_sequential() -> keras.Model:
    return keras.Sequential([layers.Dense(8, activation="relu"), layers.Dropout(0.2), layers.Dense(CLASSES)])


def several_ends() -> keras.Model:
    """Build a model with two inputs and two outputs. One input indexes an embedding.

    Two submodels have equal layer names, so that variables have equal paths. Each has a frozen, a normalised
    and a constrained layer.
    """

    def tower() -> keras.Model:
        inputs = keras.Input((FEATURES,))
        y = layers.BatchNormalization()(layers.Dense(8, trainable=False)(inputs))
        hidden = layers.Dense(
            *(4, "tanh"), kernel_constraint="max_norm", kernel_regularizer="l2", name="hidden"
        )
        return keras.Model(inputs, hidden(y))

    x = keras.Input((FEATURES,), name="x")
    word = keras.Input((3,), dtype="int32", name="word")
    embedded = layers.Flatten()(layers.Embedding(20, 4)(word))
    joined = layers.Concatenate()([tower()(x), tower()(x), embedded])
    outputs = {
        "label": layers.Dense(CLASSES, name="label")(joined),
        "size": layers.Dense(1, name="size")(joined),
    }
    return keras.Model({"x": x, "word": word}, outputs)


def several_ends_batches(steps: int) -> tf.data.Dataset:
    count = steps * 8 * hvpipe.size()
    x, y = samples(count)
    word = np.random.default_rng(3).integers(0, 20, (count, 3)).astype(np.int32)
    size = np.abs(x).sum(axis=1, keepdims=True)
    data = tf.data.Dataset.from_tensor_slices(({"x": x, "word": word}, {"label": y, "size": size}))
    return hk.shard(data.batch(8))


def half_precision() -> keras.Model:
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(8, activation="relu", dtype=policy),
            layers.Dense(CLASSES, dtype=policy),
            layers.Activation("linear", dtype="float32"),
        ]
    )


def all_bfloat16() -> keras.Model:
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(8, dtype="bfloat16"), layers.Dense(CLASSES, dtype="bfloat16")]
    )


@dataclass(frozen=True)
class Case:
    build: Callable[[], keras.Model]
    options: dict[str, Any] = field(default_factory=dict)
    batches: Callable[[int], tf.data.Dataset] = my_batches
    # It has the fewest operations to trace. test_exact.py tests other optimizers.
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1, momentum=0.9)


def overflowing() -> keras.optimizers.Optimizer:
    """Return an optimizer whose loss scale overflows float16 in the first steps, and sometimes later."""
    adam = keras.optimizers.Adam(0.01)
    return keras.optimizers.LossScaleOptimizer(adam, initial_scale=2.0**26, dynamic_growth_steps=3)


SEVERAL_LOSSES = {"loss": {"label": loss(), "size": "mse"}}
CASES = {
    "inputs_outputs_and_towers": Case(several_ends, SEVERAL_LOSSES, several_ends_batches),
    "unused_variables": Case(WithUnused),
    "sequential_unbuilt": Case(unbuilt_sequential),
    "own_train_step": Case(OwnStep),
    "no_call": Case(NoCall, {"loss": None}),
    "unused_in_compiled_step": Case(CompiledStep),
    "unused_eager": Case(WithUnused, {"run_eagerly": True}),
    "half_precision_overflow": Case(half_precision, optimizer=overflowing),
    "bfloat16": Case(all_bfloat16),
}


OLDER_TENSORFLOW = (
    *("inputs_outputs_and_towers", "no_call"),
    *("unused_in_compiled_step", "half_precision_overflow"),
)
# Each of these differs in what an overlap must find out: which variables have gradients, when, and by whose
# code.
WITH_BACKWARD = ("inputs_outputs_and_towers", "unused_variables", "own_train_step", "half_precision_overflow")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.older_tensorflow] * (name in OLDER_TENSORFLOW)) for name in CASES],
)
def test_step_gives_the_bits_of_none(name: str) -> None:
    assert_same_bits(trained(name, "step"), trained_linearly(name))


@pytest.mark.parametrize("name", WITH_BACKWARD)
def test_backward_gives_the_bits_of_none(name: str) -> None:
    assert_same_bits(trained(name, "backward"), trained_linearly(name))


@functools.cache
def trained_linearly(name: str) -> dict[str, Any]:
    linear = trained(name, "none")
    assert_same_on_all_ranks(linear)
    return linear


def trained(name: str, overlap: str) -> dict[str, Any]:
    case = CASES[name]
    model = parallel(compiled(case.build, case.optimizer(), **case.options), overlap)
    fit(model, case.batches(STEPS), epochs=2)
    return state_of(model)


def test_a_loss_scale_that_is_too_large_is_halved() -> None:
    """Steps that overflow change nothing but the scale. Some steps do not overflow."""
    state = trained_linearly("half_precision_overflow")
    (scale,) = (value for name, value in state.items() if name.endswith("dynamic_scale"))
    assert 2.0 ** (26 - 2 * STEPS) < scale < 2.0**26
    assert all(np.isfinite(value).all() for value in state.values())


def test_unused_variables_in_train_on_batch() -> None:
    """Finding the variables without a gradient must not lose the batch during which the step is traced."""

    def run(overlap: str) -> dict[str, Any]:
        model = parallel(compiled(WithUnused), overlap)
        for x, y in my_batches(4):
            model.train_on_batch(x.numpy(), y.numpy())
        assert int(model.optimizer.iterations) == 4
        return state_of(model)

    linear = run("none")
    for overlap in ("backward", "step"):
        assert_same_bits(run(overlap), linear, overlap)


def test_unused_variables_cause_a_warning() -> None:
    """Rank 0 warns, with the message of plain Keras."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(parallel(compiled(WithUnused)), my_batches(2))
    told = [str(w.message) for w in caught if "Gradients do not exist for variables" in str(w.message)]
    assert bool(told) == (hvpipe.rank() == 0)
    assert all("unused" in message for message in told)


def test_unused_variables_of_a_multi_optimizer() -> None:
    """MultiOptimizer must receive all of its variables."""

    def run(overlap: str) -> dict[str, Any]:
        kernels, biases = keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.01)
        both = keras.optimizers.MultiOptimizer(lambda v: kernels if v.name == "kernel" else biases)
        model = parallel(compiled(WithUnused, both), overlap)
        fit(model, my_batches(3), epochs=2)
        assert int(kernels.iterations) == 6
        return state_of(model)

    found = run("step")
    assert_same_on_all_ranks(found)
    assert_same_bits(found, run("none"))


def test_no_variable_has_a_gradient() -> None:
    class NoGradient(Subclassed):
        def call(self, inputs: Any, training: bool = False) -> Any:
            return tf.stop_gradient(super().call(inputs, training=training))

    if hvpipe.size() == 1:
        pytest.skip("plain Keras says it in its own words")
    with pytest.raises(HvpipeError, match="None for all 4 gradients"):
        fit(parallel(compiled(NoGradient)), my_batches(2))


def test_no_trainable_variable() -> None:
    model = compiled()
    model.trainable = False
    model.compile("sgd", loss=loss())
    if hvpipe.size() == 1:
        pytest.skip("plain Keras warns")
    with pytest.raises(HvpipeError, match="at least one trainable variable"):
        fit(parallel(model), my_batches(2))


def test_two_updates_in_one_step_are_refused_in_step() -> None:
    class Twice(OwnStep):
        def train_step(self, data: Any) -> dict[str, Any]:
            super().train_step(data)
            return super().train_step(data)

    if hvpipe.size() == 1:
        pytest.skip("there is nothing to overlap")
    with pytest.raises(HvpipeError, match='use overlap="backward"'):
        fit(parallel(compiled(Twice)), my_batches(2))
    twice = [parallel(compiled(Twice), overlap) for overlap in ("none", "backward")]
    for model in twice:
        fit(model, my_batches(3))
        assert int(model.optimizer.iterations) == 6
    assert_same_bits(state_of(twice[1]), state_of(twice[0]))


class Traced(layers.Layer):
    """Counts its calls in training mode."""

    calls = 0

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.calls += bool(training)
        return inputs


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_step_with_metrics_is_traced_once(outputs: int) -> None:
    """Keras would build metrics in its first step, and would then trace the step again."""
    traced = Traced()
    inputs = keras.Input((FEATURES,))
    hidden = traced(inputs)
    built = keras.Model(inputs, [layers.Dense(CLASSES)(hidden) for _ in range(outputs)])
    built.compile("adam", [loss() for _ in range(outputs)], metrics=[["accuracy"]] * outputs)
    model = parallel(built)
    x, y = samples(16, seed=hvpipe.rank())
    history = fit(model, x, y=[y] * outputs if outputs > 1 else y, batch_size=8)
    assert sum("accuracy" in name for name in history) == outputs
    assert traced.calls == (1 if hvpipe.size() > 1 else 2)
