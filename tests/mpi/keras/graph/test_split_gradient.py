"""Separate forward and backward graphs give a tape's results: whole, in two parts, or recomputed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvpipe.keras.graph.split_gradient import SplitGradient, split_gradient

pytestmark = pytest.mark.older_tensorflow
layers = keras.layers


def convolutions() -> keras.Model:
    """Build a model with state that the forward writes, a loop, and sizes that the backward needs."""
    inputs = keras.Input((6, 6, 3))
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(inputs)))
    x = layers.Reshape((6, 24))(layers.Dropout(0.3)(x))
    return keras.Model(inputs, layers.Dense(3)(layers.LSTM(5)(x)))


def tokens() -> keras.Model:
    """Build a model with integer inputs, sparse gradients, masks and attention."""
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True)(inputs)
    x = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


class Branches(layers.Layer):
    """Takes one of two branches, each with a weight, depending on the input."""

    def build(self, shape: Any) -> None:
        self.left, self.right = (self.add_weight(shape=(shape[-1], shape[-1])) for _ in range(2))

    def call(self, x: Any) -> Any:
        return tf.cond(
            tf.reduce_mean(x) > 0, lambda: tf.tanh(x @ self.left), lambda: tf.nn.sigmoid(x @ self.right) * x
        )


class Counted(layers.Layer):
    """Multiplies by the number of its calls, and increments that in a branch, a loop or a function."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        y = tf.tanh(x) * self.count.value
        if self.how == "branch":
            tf.cond(tf.reduce_max(x) > -100, self._raise, lambda: 0)
        elif self.how == "loop":
            tf.while_loop(lambda i: i < 1, lambda i: i + self._raise(), [0])
        else:
            tf.function(lambda _: self._raise())(x)
        return y

    def _raise(self) -> int:
        self.count.assign_add(1.0)
        return 1


def branches() -> keras.Model:
    inputs = keras.Input((6,))
    x = layers.Dense(6)(Branches()(inputs))
    return keras.Model(inputs, layers.Dense(3)(Branches()(x)))


def counts() -> keras.Model:
    counted = [Counted(how) for how in ("branch", "loop", "function")]
    return keras.Sequential([keras.Input((6,)), layers.Dense(4), *counted, layers.Dense(3)])


class Forgetful(layers.SimpleRNNCell):
    """Draws new random numbers in every step of the loop."""

    def __init__(self, units: int) -> None:
        super().__init__(units)
        self.forget = layers.Dropout(0.3)

    def call(self, x: Any, states: Any, training: bool = False) -> Any:
        return super().call(self.forget(x, training=training), states, training=training)


def random_steps() -> keras.Model:
    inputs = keras.Input((5, 6))
    return keras.Model(inputs, layers.Dense(3)(layers.RNN(Forgetful(4))(inputs)))


BUILDS = [convolutions, tokens, branches, counts, random_steps]


def values(model: keras.Model) -> Any:
    rng = np.random.default_rng(0)
    shape = (6, *model.input_shape[1:])
    return (
        rng.integers(0, 9, shape)
        if model.inputs[0].dtype == "int32"
        else rng.normal(size=shape).astype(np.float32)
    )


def run(functions: SplitGradient, x: Any, gradient: Any, split: bool) -> tuple[list[Any], list[Any]]:
    """Run the forwards of two micro-batches, then their backwards. Return outputs and input gradients."""
    parts = [tf.constant(x[:4]), tf.constant(x[4:])]
    forwards = [functions.forward([part]) for part in parts]
    found = []
    for i, (outputs, kept) in enumerate(forwards):
        given = [gradient[: outputs[0].shape[0]]]
        if split:
            of_inputs, further = functions.backward_inputs(kept, given)
            functions.backward_weights(further, i == 0)
        else:
            of_inputs = functions.backward(kept, given, i == 0)
        found.append(of_inputs)
    return [outputs[0] for outputs, _ in forwards], found


@pytest.mark.parametrize("build", BUILDS)
def test_the_same_as_a_tape(build: Callable[[], keras.Model]) -> None:
    """Whole or split, recomputed or not."""
    model = build()
    x = values(model)
    dtype = "float32" if x.dtype == np.float32 else "int32"
    x = x.astype(dtype)
    weights = [v.value for v in model.trainable_variables]
    start = [v.numpy() for v in model.variables]
    gradient = tf.constant(np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32))

    rows = [tf.TensorSpec((None, *x.shape[1:]), dtype), tf.TensorSpec((None, 3), "float32")]

    @tf.function(input_signature=rows)
    def reference(part: Any, given: Any) -> Any:
        with tf.GradientTape() as tape:
            if dtype == "float32":
                tape.watch(part)
            y = model(part, training=True)
        sources = [*([part] if dtype == "float32" else []), *weights]
        return y, [tf.convert_to_tensor(g) for g in tape.gradient(y, sources, given)]

    outputs, sums, of_inputs = [], None, []
    for part in (x[:4], x[4:]):
        y, found = reference(tf.constant(part), gradient[: len(part)])
        outputs.append(y)
        of_inputs.append(found[: len(found) - len(weights)])
        mine = found[len(found) - len(weights) :]
        sums = mine if sums is None else [a + b for a, b in zip(sums, mine, strict=True)]
    end = [v.numpy() for v in model.variables]

    of_both = [
        split_gradient(
            lambda part: [model(part, training=True)],
            [tf.TensorSpec((None, *x.shape[1:]), dtype)],
            weights,
            differentiated_inputs=1,
            recompute=recompute,
        )
        for recompute in (False, True)
    ]
    for functions, split in itertools.product(of_both, (False, True)):
        for v, value in zip(model.variables, start, strict=True):
            v.assign(value)
        ours, our_inputs = run(functions, x, gradient, split)
        for a, b in zip(ours, outputs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
        for a, b in zip(our_inputs, of_inputs, strict=True):
            assert len(a) == len(b)
            for one, other in zip(a, b, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5)
        for a, b in zip(functions.accumulators, sums, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        # The forward updates moving averages and seeds once for each micro-batch; the backward does not.
        for v, value in zip(model.variables, end, strict=True):
            np.testing.assert_allclose(v.numpy(), value, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_backward_of_a_loop_reuses_its_random_numbers(recompute: bool) -> None:
    """The random operation has no state variable.

    As y = r x with x = 1, the gradient must equal the output.
    """

    def times_random(x: Any) -> list[Any]:
        loop = tf.while_loop(lambda i, _: i < 1, lambda i, y: (i + 1, y * tf.random.uniform([])), (0, x))
        return [loop[1]]

    functions = split_gradient(
        times_random, [tf.TensorSpec((None, 3), "float32")], [], differentiated_inputs=1, recompute=recompute
    )
    outputs, kept = functions.forward([tf.ones((2, 3))])
    np.testing.assert_allclose(functions.backward(kept, [tf.ones((2, 3))], True)[0], outputs[0], rtol=1e-6)


def kept_bytes(kept: list[Any]) -> int:
    return sum(int(np.prod(t.shape)) * t.dtype.size for t in kept if t.dtype != tf.variant)


def test_recompute_keeps_only_inputs_and_seeds() -> None:
    model = keras.Sequential([keras.Input((64,))])
    for _ in range(4):
        model.add(layers.Dense(64, activation="tanh"))
        model.add(layers.Dropout(0.5))
    found = {}
    for recompute in (False, True):
        functions = split_gradient(
            lambda x: [model(x, training=True)],
            [tf.TensorSpec((None, 64), "float32")],
            [v.value for v in model.trainable_variables],
            differentiated_inputs=1,
            recompute=recompute,
        )
        _, kept = functions.forward([tf.ones((32, 64))])
        found[recompute] = kept_bytes(kept)
    row = 32 * 64 * 4
    assert row <= found[True] < 1.1 * row
    assert found[False] > 6 * row


def test_no_copy_of_the_weights_is_kept() -> None:
    dense = layers.Dense(500)
    dense.build((None, 500))
    functions = split_gradient(
        lambda x: [dense(x)],
        [tf.TensorSpec((None, 500), "float32")],
        [v.value for v in dense.trainable_variables],
        differentiated_inputs=1,
    )
    _, kept = functions.forward([tf.ones((2, 500))])
    assert kept_bytes(kept) < 10_000


def test_many_gradients_of_half_precision_weights_add_up() -> None:
    """Regression: bfloat16 drops what is added to a sum 256 times as large."""
    weight = tf.Variable(tf.ones([2], tf.bfloat16))
    spec = tf.TensorSpec([2], tf.bfloat16)
    parts = split_gradient(lambda x: [x * weight], [spec], [weight], differentiated_inputs=1)
    ones = tf.ones([2], tf.bfloat16)
    for turn in range(1000):
        _, saved = parts.forward([ones])
        parts.backward(saved, [ones], turn == 0)
    np.testing.assert_array_equal(parts.accumulators[0], [1000, 1000])
