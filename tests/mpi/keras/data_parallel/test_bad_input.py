"""Wrong arguments and ranks that differ, where a program can catch the error.

Errors that end all ranks are in tests/test_bad_input.py.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError, InitError, MismatchError
from hvpipe.keras.supported import check_keras
from training import (
    CLASSES,
    FEATURES,
    again,
    assert_same_bits,
    assert_same_on_all_ranks,
    by_rank_0,
    compiled,
    fit,
    mlp,
    my_batches,
    parallel,
    samples,
    state_of,
    usual,
)

layers = keras.layers
several_ranks = pytest.mark.usefixtures("_several_ranks")


@pytest.fixture
def _several_ranks() -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank agrees with itself")


def is_last() -> bool:
    return hvpipe.rank() == hvpipe.size() - 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"overlap": "foo"},
            "overlap should be one of 'none', 'backward', 'step', 'stale', 'local'. Received: overlap='foo'",
        ),
        ({"overlap": None}, "Received: overlap=None"),
        ({"compression": "int4"}, "'powersgd:R' with a rank R of 1 or more. Received: compression='int4'"),
        ({"bucket_bytes": 0}, "Received: bucket_bytes=0"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    model = compiled()
    with pytest.raises(HvpipeError, match=says):
        hk.data_parallel(model, **options)


def test_arguments_that_are_no_model_or_dataset() -> None:
    with pytest.raises(HvpipeError, match="Received: SGD"):
        hk.data_parallel(keras.optimizers.SGD())
    with pytest.raises(HvpipeError, match="Received: dataset of type list"):
        hk.shard([1, 2, 3])


def test_models_of_keras_2() -> None:
    """With TF_USE_LEGACY_KERAS=1, `tf.keras` is Keras 2."""
    members = {"__module__": "tf_keras.src.engine.functional", "__call__": lambda self: None}
    functional = type("Functional", (), members)()
    says = "Received: Functional of tf_keras, which is Keras 2: leave TF_USE_LEGACY_KERAS unset"
    with pytest.raises(HvpipeError, match=f"needs a keras.Model of Keras 3. {says}"):
        hk.data_parallel(functional)
    with pytest.raises(HvpipeError, match=says):
        hk.DistributedOptimizer(functional)
    with pytest.raises(HvpipeError, match=f"needs a Keras model or a function.*{says}"):
        hk.pipeline_parallel(functional)


@pytest.mark.parametrize(
    ("version", "backend", "says"),
    [
        (
            "3.5.0",
            "tensorflow",
            r"needs Keras 3\.12 or later.*pip install 'keras>=3\.12'.*Received: keras 3\.5\.0",
        ),
        ("2.15.1", "tensorflow", r"Received: keras 2\.15\.1"),
        ("3.12.0", "jax", r"KERAS_BACKEND=tensorflow.*Received: the backend 'jax'"),
    ],
)
def test_a_keras_too_old_or_on_another_backend_is_refused(version: str, backend: str, says: str) -> None:
    with pytest.raises(InitError, match=says):
        check_keras(version, backend)


@pytest.mark.parametrize("version", ["3.12.0", "3.15.1", "3.20.0.dev2026", "4.0"])
def test_a_keras_that_is_new_enough(version: str) -> None:
    check_keras(version, "tensorflow")


def test_a_dataset_with_too_few_batches_for_the_ranks() -> None:
    if hvpipe.size() > 1:
        few = tf.data.Dataset.from_tensor_slices(np.zeros(hvpipe.size() - 1)).batch(1)
        with pytest.raises(HvpipeError, match=f"Received: {hvpipe.size() - 1} batches"):
            hk.shard(few)


def test_fit_before_compile() -> None:
    model = parallel(mlp())
    with pytest.raises(ValueError, match=r"You must call `compile\(\)` before"):
        fit(model, my_batches(2))
    model.compile("sgd", "sparse_categorical_crossentropy")
    assert fit(model, my_batches(2))["loss"]


def other_width() -> keras.Model:
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(9), layers.Dense(CLASSES)])


def one_layer_more() -> keras.Model:
    return keras.Sequential([*mlp().layers, layers.Dense(CLASSES)])


def other_dtype() -> keras.Model:
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(8, dtype="float64"), layers.Dense(CLASSES)]
    )


def other_layer_frozen() -> keras.Model:
    model = mlp()
    model.layers[0].trainable = False
    return model


@several_ranks
@pytest.mark.parametrize(
    ("other", "says"),
    [
        (other_width, r"float32\[12, 8\] on rank 0 and .*float32\[12, 9\] on rank"),
        (one_layer_more, "4 variables on rank 0 and 6 on rank"),
        (other_dtype, r"float32\[12, 8\] on rank 0 and .*float64\[12, 8\] on rank"),
        (other_layer_frozen, r"float32\[12, 8\] on rank 0 and .*float32\[8, 5\] on rank"),
    ],
)
def test_different_models_on_the_ranks(other: Callable[[], keras.Model], says: str) -> None:
    model = parallel(compiled(other if is_last() else mlp))
    with pytest.raises(MismatchError, match=f"All ranks should train the same model. Received: .*{says}"):
        fit(model, my_batches(2))
    # Every rank got the error, so all are still in step.
    assert hvpipe.allgather_object(hvpipe.rank()) == list(range(hvpipe.size()))


class Subclassed(keras.Model):
    """Has no `get_config`, but its layers have."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(8, activation=activation), layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))


def with_dropout(rate: float) -> keras.Model:
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dropout(rate), layers.Dense(CLASSES)])


def chained(odd: int) -> keras.Model:
    """Return a model whose calls differ, but not its layers."""
    inputs = keras.Input((FEATURES,))
    first = layers.Dense(8)(inputs)
    one = layers.Dense(8)(first)
    other = layers.Dense(8)(one if odd else first)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.Add()([one, other])))


def loss_of(odd: int) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=bool(odd))


@several_ranks
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda odd: compiled(lambda: Subclassed(("relu", "tanh")[odd])), "activation: 'relu' .* 'tanh'"),
        (lambda odd: compiled(lambda: with_dropout(0.1 + odd / 2)), r"\(Dropout\) rate: 0.1 on .* 0.6 on"),
        (
            lambda odd: compiled(optimizer=keras.optimizers.SGD(momentum=0.5 - odd / 4)),
            "optimizer momentum: 0.5",
        ),
        (lambda odd: compiled(loss=loss_of(odd)), "loss from_logits: False on rank 0 and True on rank"),
        (
            lambda odd: compiled(lambda: chained(odd)),
            r"call 3 in .*: Dense of call 1 on .* call 2 on",
        ),
    ],
)
def test_models_that_only_their_settings_tell_apart(make: Callable[[int], keras.Model], says: str) -> None:
    """Regression: relu on one rank and tanh on the other trained, and nobody noticed."""
    model = parallel(make(int(is_last())))
    with pytest.raises(MismatchError, match=f"should train the same model. Received: .*{says}"):
        fit(model, my_batches(2))
    assert hvpipe.allgather_object(hvpipe.rank()) == list(range(hvpipe.size()))


class Other(layers.Layer):
    """Its config cannot be read."""

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError

    def call(self, x: Any) -> Any:
        return x


class Scaled(layers.Layer):
    """Keras makes its config from the arguments."""

    def __init__(self, scale: float) -> None:
        super().__init__()

    def call(self, x: Any) -> Any:
        return x


@several_ranks
def test_ranks_with_other_lengths_and_values_train_together(caplog: pytest.LogCaptureFixture) -> None:
    """A Sequential without an Input keeps the shape of its first batch. Rank 0 tells of the `scale`."""
    rank = hvpipe.rank()
    bias = keras.initializers.Constant(rank)
    last = layers.Dense(CLASSES, name=f"head_{rank}", bias_initializer=bias)
    model = parallel(compiled(lambda: keras.Sequential([layers.GRU(3), Scaled(0.5 + rank), last])))
    x = np.random.default_rng(rank).normal(size=(4 + rank, 3 + rank, 2))
    model.train_on_batch(x, np.zeros(len(x), np.int32))
    assert_same_on_all_ranks(np.concatenate([np.ravel(weight) for weight in model.get_weights()]))
    told = [text for text in caplog.messages if "give all ranks the same value" in text]
    assert len(told) == (rank == 0)
    assert all("(Scaled) scale: 0.5 on rank 0 and 1.5 on rank 1." in text for text in told)


@several_ranks
def test_ranks_with_different_layer_names_train_together() -> None:
    """Keras numbers the layers that a process has made. Seeds, rates and batch sizes may differ, too."""
    if is_last():
        one_layer_more()
        keras.ops.add(keras.Input((3,)), 1.0)
        layers.Activation("relu")
    odd = int(is_last())

    def build() -> keras.Model:
        batch = keras.Input((FEATURES,), batch_size=(None, 8)[odd], name=f"input_{odd}")
        hidden = layers.Dropout(0.1, seed=odd, name=f"drop_{odd + 1}")(Other()(batch))
        hidden = layers.Activation("relu")(hidden)  # on one rank its name is that of a setting
        doubled = keras.ops.add(hidden, hidden)  # Keras numbers operations, too
        normal = keras.initializers.RandomNormal(seed=odd)
        return keras.Model(batch, layers.Dense(CLASSES, kernel_initializer=normal)(layers.Dense(8)(doubled)))

    model = parallel(compiled(build, keras.optimizers.SGD(0.1 + odd)))
    fit(model, my_batches(3))
    assert_same_on_all_ranks(state_of(model))


@several_ranks
def test_different_variables_to_broadcast() -> None:
    variables = [keras.Variable(np.zeros(3 + is_last(), np.float32))]
    with pytest.raises(MismatchError, match=r"float32\[3\] on rank 0 and .*float32\[4\] on rank"):
        hk.broadcast_variables(variables)


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def tensorflow_log() -> Iterator[list[str]]:
    """Return the messages that reach TensorFlow's log."""
    handler = Records()
    tf.get_logger().addHandler(handler)
    yield handler.messages
    tf.get_logger().removeHandler(handler)


@several_ranks
@pytest.mark.parametrize("overlap", ["none", "step"])
def test_a_dataset_that_is_shorter_on_one_rank(overlap: str, tensorflow_log: list[str]) -> None:
    data = my_batches(7)
    model = again(usual, overlap)
    history = fit(model, data.take(4) if is_last() else data, epochs=3)
    assert len(history["loss"]) == 3
    assert int(model.optimizer.iterations.numpy()) == 3 * 4
    assert_same_on_all_ranks(state_of(model))
    told = [message for message in tensorflow_log if "differ in length" in message]
    assert len(told) == (hvpipe.rank() == 0)
    if told:
        assert f"7 on rank 0, {4 if hvpipe.size() == 2 else 7} on rank 1" in told[0]
        assert "every epoch ends after 4" in told[0]


class Rows(keras.utils.PyDataset):
    """Batches of 8 rows, in order."""

    def __init__(self, x: Any, y: Any, **options: Any) -> None:
        super().__init__(**options)
        self._x, self._y = x, y

    def __len__(self) -> int:
        return -(-len(self._x) // 8)

    def __getitem__(self, index: int) -> Any:
        part = slice(8 * index, 8 * index + 8)
        return self._x[part], self._y[part]


@several_ranks
def test_arrays_and_py_datasets_that_are_shorter_on_one_rank(tensorflow_log: list[str]) -> None:
    """As for tf.data, epochs end with the shortest: also its last batch, which may be smaller."""
    x, y = samples(20 if is_last() else 40, seed=hvpipe.rank())
    model = again(usual, "step")
    found = []
    for data in ((x, y), (Rows(x, y),), (Rows(x, y, workers=2),)):
        model = again(usual, "step")
        model.fit(*data, batch_size=8 if len(data) > 1 else None, shuffle=False, epochs=2, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 2 * 3
        found.append(state_of(model))
    assert_same_on_all_ranks(found[0])
    assert_same_bits(found[1], found[0])
    assert_same_bits(found[2], found[0])
    told = [message for message in tensorflow_log if "differ in length" in message]
    assert len(told) == (3 if hvpipe.rank() == 0 else 0)


@several_ranks
def test_shorter_validation_data_on_one_rank_are_weighted_by_samples() -> None:
    x, y = samples(40 * hvpipe.size(), seed=3)
    start = 40 * hvpipe.rank()
    mine = slice(start, start + (10 if is_last() else 40))
    model = again(usual, "step")
    fit(model, my_batches(2))
    found = model.evaluate(x[mine], y[mine], batch_size=10, verbose=0)
    everyone = np.r_[: 40 * (hvpipe.size() - 1) + 10]
    with_all = model.compute_loss(y=y[everyone], y_pred=model(x[everyone]), training=False)
    assert found == pytest.approx(float(with_all), rel=1e-5)


# --- NaN ------------------------------------------------------------------------------------------------


def nan_batches(rank: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two batches of 4 samples with three targets each.

    On the last rank one target of the second output is NaN.
    """
    rng = np.random.default_rng(rank)
    x, y = rng.normal(size=(8, 6)).astype(np.float32), rng.normal(size=(8, 3)).astype(np.float32)
    if rank == size - 1:
        y[1, 1] = np.nan
    return x, y


def regression() -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3, name="out")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


@functools.cache
def plain_with_nan() -> tuple[list[float], list[np.ndarray]]:
    """Return losses and weights of one rank that trains on the batches of all."""
    size = hvpipe.size()
    parts = [nan_batches(rank, size) for rank in range(size)]
    order = np.concatenate([np.arange(8 * size).reshape(size, 2, 4)[:, step].ravel() for step in range(2)])
    x, y = (np.concatenate([part[i] for part in parts])[order] for i in range(2))

    def trained() -> tuple[list[float], list[np.ndarray]]:
        model = regression()
        history = model.fit(x, y, batch_size=4 * size, shuffle=False, verbose=0).history
        return history["loss"], model.get_weights()

    found: tuple[list[float], list[np.ndarray]] = by_rank_0(trained)
    return found


@pytest.mark.parametrize("overlap", ["none", "backward", "step"])
def test_nan_gradients_spread_as_in_plain_keras(overlap: str) -> None:
    x, y = nan_batches(hvpipe.rank(), hvpipe.size())
    model = parallel(regression(), overlap)
    history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
    losses, weights = plain_with_nan()
    assert np.isnan(history["loss"]).all()
    assert np.isnan(losses).all()
    for found, wanted in zip(model.get_weights(), weights, strict=True):
        # The NaN is in the second output only.
        assert np.isnan(wanted).any()
        assert not np.isnan(wanted).all()
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert_same_on_all_ranks(state_of(model))


# --- Layers ---------------------------------------------------------------------------------------------


@several_ranks
@pytest.mark.parametrize("options", [{}, {"sync_batch_norm": True}])
def test_synchronized_batch_normalization_causes_a_warning(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It does not if hvpipe normalises over all ranks."""
    normalization = layers.BatchNormalization(synchronized=True, name="between")
    model = compiled(
        lambda: keras.Sequential([keras.Input((FEATURES,)), normalization, layers.Dense(CLASSES)])
    )
    fit(parallel(model, **options), my_batches(1), epochs=2)
    told = [message for message in caplog.messages if "is not synchronized" in message]
    assert len(told) == (not options and hvpipe.rank() == 0)
    assert all("Received: layer between" in message for message in told)
