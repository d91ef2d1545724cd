"""Small data, small models, training runs, and bitwise comparisons of weights for the Keras cases."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk

FEATURES = 12
CLASSES = 5
# Small enough to cut the small models into several buckets.
BUCKET_BYTES = 200

State = dict[str, np.ndarray]


def samples(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs, and labels that depend on them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype(np.float32)
    y = np.argmax(x[:, :CLASSES] + 0.5 * x[:, CLASSES : 2 * CLASSES], axis=1)
    return x, y


def my_batches(steps: int, batch: int = 8, seed: int = 0) -> tf.data.Dataset:
    """Return this rank's batches of `batch` samples. All ranks together have `all_batches`."""
    data = samples(steps * batch * hvpipe.size(), seed)
    return hk.shard(tf.data.Dataset.from_tensor_slices(data).batch(batch))


def all_batches(steps: int, batch: int = 8, seed: int = 0) -> tf.data.Dataset:
    """Return the batches that one rank with the whole batch would train on."""
    whole = batch * hvpipe.size()
    return tf.data.Dataset.from_tensor_slices(samples(steps * whole, seed)).batch(whole)


def mlp() -> keras.Model:
    """Build two dense layers, which make three buckets."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(CLASSES),
        ]
    )


def table() -> keras.Model:
    """Build an embedding table of more than 1 MiB. hvpipe sends only the rows that a batch uses."""
    inputs = keras.Input((FEATURES,))
    words = keras.ops.cast(keras.ops.abs(inputs) * 20.0, "int32")  # the first hundred rows, with many repeats
    embedded = keras.layers.Embedding(4100, 64)(words)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.Flatten()(embedded)))


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(build: Callable[[], keras.Model] = mlp, optimizer: Any = None, **options: Any) -> keras.Model:
    """Return a new compiled model from seed 5, the same on all ranks and at every call."""
    keras.utils.set_random_seed(5)
    model = build()
    options.setdefault("loss", loss())
    model.compile(optimizer=optimizer or keras.optimizers.SGD(0.1, momentum=0.9), **options)
    return model


def parallel(model: keras.Model, overlap: str = "step", **options: Any) -> keras.Model:
    """Call `data_parallel` with several buckets."""
    options.setdefault("bucket_bytes", BUCKET_BYTES)
    return hk.data_parallel(model, overlap, **options)


@functools.cache
def _made(make: Callable[..., keras.Model], arguments: tuple[Any, ...]) -> tuple[keras.Model, list[Any]]:
    """Return a new model, and its variables with their initial values."""
    model = make(*arguments)
    model.optimizer.build(model.trainable_variables)
    return model, [(v, v.numpy()) for v in [*model.variables, *model.optimizer.variables]]


def again(make: Callable[..., keras.Model], *arguments: Any) -> keras.Model:
    """Return the model of `make` in its initial state: the same model at every call with these arguments.

    Its steps stay traced, and tracing is most of what a case costs. A case must not compile the model again,
    and must let it finish its last step.
    """
    model, start = _made(make, arguments)
    for variable, value in start:
        variable.assign(value)
    model.stop_training = False
    return model


def usual(overlap: str) -> keras.Model:
    """Build the common model and wrap it. For `again`."""
    return parallel(compiled(), overlap)


def fit(model: keras.Model, data: Any, **options: Any) -> dict[str, list[float]]:
    """Run `fit` silently and return its history."""
    history: dict[str, list[float]] = model.fit(data, verbose=0, **options).history
    return history


def state_of(model: keras.Model) -> State:
    """Copy all weights, seeds and optimizer slots without calling the model's own methods."""
    found: State = {}
    for variable in [*model.variables, *model.optimizer.variables]:
        name = f"{len(found)} {variable.path}"
        found[name] = np.array(variable.numpy())
    return found


def assert_same_bits(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], what: str = "") -> None:
    """Check that two states are equal bit for bit. Names may differ, because Keras numbers layers."""
    assert len(one) == len(other), what
    different = [
        f"{name}: by up to {np.max(np.abs(mine.astype(np.float64) - theirs.astype(np.float64)))}"
        for (name, mine), theirs in zip(one.items(), other.values(), strict=True)
        if mine.dtype != theirs.dtype or mine.tobytes() != theirs.tobytes()
    ]
    assert not different, f"{what}: {different}"


def assert_close(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], relative: float) -> None:
    """Check that every array is within `relative` of the largest number in the other."""
    assert len(one) == len(other)
    for (name, mine), theirs in zip(one.items(), other.values(), strict=True):
        if mine.dtype.kind == "f":
            scale = max(float(np.max(np.abs(theirs), initial=0.0)), 1e-3)
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=relative * scale, err_msg=name)
        else:
            np.testing.assert_array_equal(mine, theirs, err_msg=name)


def assert_same_on_all_ranks(value: Any) -> None:
    """Check that a state (or numbers) has the same bits on every rank, except sums not yet reduced."""
    if isinstance(value, dict):
        value = {name: array for name, array in value.items() if "gradient_accumulator" not in name}
        mine = {name: np.asarray(part).tobytes() for name, part in value.items()}
    else:
        mine = {"value": np.asarray(value).tobytes()}
    for rank, theirs in enumerate(hvpipe.allgather_object(mine)):
        different = [a for a, b in zip(mine, theirs, strict=True) if mine[a] != theirs[b]]
        assert not different, f"rank {hvpipe.rank()} and rank {rank} differ in {different}: {value}"


def by_rank_0(make: Callable[[], Any]) -> Any:
    """Return to all ranks what `make` returns on rank 0, where it trains with plain Keras.

    It runs eagerly, because a few steps take less time than tracing a graph.
    """
    made = None
    if hvpipe.rank() == 0:
        tf.config.run_functions_eagerly(True)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".* does not apply to tf.data functions")
                made = make()
        finally:
            tf.config.run_functions_eagerly(False)
    return hvpipe.broadcast_object(made)


class Remember(keras.callbacks.Callback):
    """Callback that keeps what `look` returns at the end of every batch and every epoch."""

    def __init__(self, look: Callable[[keras.Model], Any] = state_of) -> None:
        super().__init__()
        self.look = look
        self.at_batches: list[Any] = []
        self.at_epochs: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.at_batches.append(self.look(self.model))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.at_epochs.append(self.look(self.model))
