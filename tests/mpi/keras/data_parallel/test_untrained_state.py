"""Variables that no gradient trains: `aggregation` says how ranks combine them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError
from training import assert_same_on_all_ranks

LARGE = 2**56  # float64 cannot hold it and the numbers after it
AGGREGATIONS = ("mean", "sum", "only_first_replica", "none")


class Statistics(keras.layers.BatchNormalization):
    """BatchNormalization that counts its calls."""

    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        self.calls = self.add_weight(
            shape=(), initializer="zeros", dtype="int32", trainable=False, name="calls"
        )

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if training:
            self.calls.assign_add(hvpipe.rank() + 1)
        return super().call(inputs, training=training, mask=mask)


class Memory(keras.Model):
    """Keeps the last rows that it has seen, each of norm 1, and counts, in every kind of variable."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((4,)), Statistics(momentum=0.0), keras.layers.Dense(4)])
        kinds: dict[str, Any] = {"shape": (), "initializer": "zeros", "dtype": "int64", "trainable": False}
        self.counts = {how: self.add_weight(**kinds, name=how, aggregation=how) for how in AGGREGATIONS}
        kinds |= {"shape": (16, 4), "dtype": "float32"}
        self.rows = {
            how: self.add_weight(**kinds, name=f"rows_{how}", aggregation=how) for how in AGGREGATIONS
        }
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        return self.encoder(x, training=training)

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        trained = self.encoder.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
        for rows in self.rows.values():
            rows.assign(tf.concat([tf.math.l2_normalize(x, 1), rows[:-8]], 0))
        for count in self.counts.values():
            count.assign_add(LARGE + 2 * hvpipe.rank())
        return {"loss": loss}

    def norms(self, how: str) -> Any:
        return np.linalg.norm(self.rows[how].numpy(), axis=1)

    def counted(self) -> dict[str, int]:
        return {how: int(count.numpy()) for how, count in self.counts.items()}


def remembering(**options: Any) -> Memory:
    keras.utils.set_random_seed(1)
    model = Memory()
    model.compile("sgd", "mse")
    return hk.data_parallel(model, **options)


def mine() -> tuple[Any, Any]:
    x = np.random.default_rng(hvpipe.rank()).normal(size=(64, 4)).astype("float32")
    return x, x


def test_a_bool_has_no_mean() -> None:
    dense = keras.layers.Dense(1)
    dense.add_weight(
        shape=(), initializer="zeros", dtype="bool", trainable=False, aggregation="mean", name="seen"
    )
    model = keras.Sequential([keras.Input((4,)), dense])
    model.compile("sgd", "mse")
    x = mine()[0] + hvpipe.rank()
    if hvpipe.size() == 1:
        return
    with pytest.raises(HvpipeError, match=r"needs numbers.*Received: variable .*seen of bool"):
        hk.data_parallel(model).fit(x, x[:, :1], verbose=0)


@pytest.mark.every_size
@pytest.mark.quick
def test_aggregation_says_how_ranks_combine_a_variable(caplog: pytest.LogCaptureFixture) -> None:
    size, rank = hvpipe.size(), hvpipe.rank()
    model = remembering(verify_every=1)
    options: dict[str, Any] = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model.fit(*mine(), epochs=2, **options)

    own, everyone = 16 * (LARGE + 2 * rank), sum(16 * (LARGE + 2 * r) for r in range(size))
    mean = 16 * LARGE + 16 * (size - 1)
    wanted = {"mean": mean, "sum": everyone, "only_first_replica": 16 * LARGE, "none": own}
    assert model.counted() == wanted
    for how in ("only_first_replica", "none"):
        np.testing.assert_allclose(model.norms(how), 1.0, rtol=1e-6)
    assert model.norms("mean").max() < 0.999 or size == 1
    last = np.concatenate([mine()[0][56:], mine()[0][48:56]])
    last /= np.linalg.norm(last, axis=1, keepdims=True)
    np.testing.assert_allclose(model.rows["none"], last, rtol=1e-5)
    everyones = np.stack(hvpipe.allgather_object(last))
    np.testing.assert_allclose(model.rows["only_first_replica"], everyones[0], rtol=1e-5)
    np.testing.assert_allclose(model.rows["mean"], everyones.mean(0), rtol=1e-4, atol=1e-6)
    statistics = model.encoder.layers[0]
    assert_same_on_all_ranks({"mean": statistics.moving_mean.numpy(), "sum": model.rows["sum"].numpy()})
    assert int(statistics.calls) == 16 * (rank + 1)  # a subclass's own variable is no statistic
    told = [r.getMessage() for r in caplog.records if "keeps its own value" in r.getMessage()]
    assert len(told) == (rank == 0 and size > 1)
    if told:
        assert "memory/none, memory/rows_none" in told[0]
        assert "statistics/calls" in told[0]
        assert 'aggregation="mean", "sum" or "only_first_replica"' in told[0]

    # What is set counts as nothing that ranks have added.
    model.set_weights([np.full_like(w, 3) for w in model.get_weights()])
    model.train_on_batch(mine()[0][:8], mine()[1][:8])
    model.evaluate(*mine(), verbose=0)
    added = sum(LARGE + 2 * r for r in range(size))
    assert model.counted()["sum"] == 3 + added
    for count in model.counts.values():
        count.assign(5)
    model.fit(*mine(), **options)
    assert model.counted()["sum"] == 5 + 8 * added


def test_a_checkpoint_within_an_epoch_has_each_ranks_own(folder: Path) -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 2

    class First(keras.callbacks.Callback):
        seen: Any = None

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.seen is None:
                self.seen = model.counted()

    data = tf.data.Dataset.from_tensor_slices(mine()).batch(8)
    model = remembering()
    model.fit(data, epochs=1, verbose=0, callbacks=[hk.Checkpoint(folder), Stop()])
    model = remembering()
    first = First()
    model.fit(data, epochs=1, verbose=0, callbacks=[hk.Checkpoint(folder), first])
    assert first.seen["none"] == 3 * (LARGE + 2 * hvpipe.rank())
    never_stopped = remembering()
    never_stopped.fit(data, epochs=1, verbose=0)
    assert model.counted()["none"] == 8 * (LARGE + 2 * hvpipe.rank())
    assert never_stopped.counted()["none"] == model.counted()["none"]
