"""Replicas of stages share batches: any size, any share, their own random numbers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import MismatchError
from hvpipe.keras.graph.layer_graph import layer_graph
from hvpipe.keras.profiling.estimate import estimate
from hvpipe.plan.greedy import partition
from hvpipe.plan.pipelining import Pipelining
from hvpipe.specs.cluster import equal_cluster
from pipelines import (
    MODELS,
    WITHIN,
    batches,
    both,
    check_same,
    compile_as_all,
    mlp,
    pipelined,
    plain,
)
from training import by_rank_0


@pytest.mark.every_size
def test_replicas_of_stages_train_alike() -> None:
    """Half as many stages as ranks, and one stage on all ranks but one."""
    size = hvpipe.size()
    if size == 1:
        pytest.skip("replicas are several ranks")
    replicas = (size - 1, 1) if size > 2 else (2,)
    check_same(pipelined("resnet", replicas=replicas), plain("resnet"), WITHIN)
    if size == 4:
        check_same(pipelined("mlp", stages=2), plain("mlp"), WITHIN)


class Drops(keras.layers.Layer):
    """Dropout that records which entries of the last micro-batch's first sample remain."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)

    def build(self, shape: Any) -> None:
        self.left = self.add_weight(shape=shape[1:], trainable=False, initializer="zeros")
        super().build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        y = self.dropout(x, training=training)
        if training:
            self.left.assign(keras.ops.cast(y[0] != 0, "float32"))
        return y


def dropping() -> keras.Model:
    return keras.Sequential([keras.Input((64,)), Drops(), keras.layers.Dense(4)])


def left_by_replicas() -> list[list[float]]:
    """Return what every rank's Drops records after one step.

    One stage runs on all ranks, with a micro-batch each.
    """
    size = hvpipe.size()
    keras.utils.set_random_seed(5)
    pipe = compile_as_all(hk.pipeline_parallel(dropping, stages=1, microbatches=size))
    pipe.train_on_batch(np.ones((size, 64), np.float32), np.zeros(size, np.int32))
    (mine,) = (layer.left.numpy().tolist() for layer in pipe.layers if isinstance(layer, Drops))
    return hvpipe.allgather_object(mine)


def test_replicas_draw_their_own_random_numbers() -> None:
    """Every run draws the same numbers. The first replica draws those of the undivided model."""
    left = left_by_replicas()
    assert left == left_by_replicas()
    assert len({tuple(mask) for mask in left}) == hvpipe.size()
    keras.utils.set_random_seed(5)
    model = compile_as_all(dropping())
    model.train_on_batch(np.ones((1, 64), np.float32), np.zeros(1, np.int32))
    assert left[0] == model.layers[0].left.numpy().tolist()


class Scaled(keras.layers.Layer):
    """Has a scalar weight and a scalar statistic."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.largest.assign(tf.maximum(self.largest, tf.reduce_max(x)))
        return self.scale * x


def scaled() -> keras.Model:
    return keras.Sequential([keras.Input((12,)), Scaled(), keras.layers.Dense(4)])


def test_replicas_may_share_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "scaled", scaled)
    found, expected = pipelined("scaled", stages=1), plain("scaled")
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], rtol=WITHIN)
    np.testing.assert_allclose(found.prediction, expected.prediction, rtol=1e-4, atol=1e-6)


def normalised() -> keras.Model:
    return keras.Sequential([keras.Input((12,)), keras.layers.BatchNormalization(), keras.layers.Dense(4)])


def test_replicas_predict_the_same_after_training() -> None:
    """Each replica has taken statistics from its own micro-batches."""
    x, y = batches(mlp, 16)
    pipe = compile_as_all(hk.pipeline_parallel(normalised, stages=1, microbatches=4))
    pipe.train_on_batch(x * np.arange(16)[:, None], y)
    found = pipe.predict(np.repeat(x[:1], 8, axis=0), batch_size=8, verbose=0)
    np.testing.assert_allclose(found, np.repeat(found[:1], 8, axis=0), rtol=1e-6)


@pytest.mark.three_suffice
@pytest.mark.every_size
def test_batches_smaller_than_the_replicas_are_evaluated() -> None:
    """The last batch has a single sample."""
    x, y = batches(mlp, 9)

    def told(model: Any) -> tuple[np.ndarray, list[list[float]]]:
        compile_as_all(model)
        parts = (slice(0, 9), slice(8, 9))
        evaluated = [model.evaluate(x[part], y[part], batch_size=8, verbose=0) for part in parts]
        return model.predict(x, batch_size=8, verbose=0), evaluated

    expected, found = both(mlp, told, stages=1)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)


@pytest.mark.three_suffice
@pytest.mark.parametrize("shares", [pytest.param((), marks=pytest.mark.every_size), (0.7, 0.1)])
def test_batches_smaller_than_the_replicas_are_trained_on(shares: tuple[float, ...]) -> None:
    """In the last batches, one replica may get all samples.

    The others add nothing and get the same weights.
    """
    size = hvpipe.size()
    if size == 1:
        pytest.skip("replicas are several ranks")
    found = trained_on_few_samples(of_replicas(shares or (1.0,) * size))
    np.testing.assert_allclose(found, plain_on_few_samples(), rtol=1e-4, atol=1e-6)


def trained_on_few_samples(model: Any) -> list[float]:
    """Return losses, metrics and outputs. The last batches have 2 samples and 1."""
    compile_as_all(model, keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0))
    history = [
        model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0).history
        for x, y in (batches(mlp, 26), batches(mlp, 25))
    ]
    prediction = model.predict(batches(mlp, 8)[0], verbose=0).ravel()
    return [*(value for of in history for name in sorted(of) for value in of[name]), *prediction]


@functools.cache
def plain_on_few_samples() -> list[float]:
    def trained() -> list[float]:
        keras.utils.set_random_seed(5)
        return trained_on_few_samples(mlp())

    found: list[float] = by_rank_0(trained)
    return found


def of_replicas(shares: Sequence[float]) -> Any:
    """Build one stage on all ranks.

    It deals 24 micro-batches by `shares`; further ranks get the last share.
    """
    size = hvpipe.size()
    keras.utils.set_random_seed(5)
    profile = estimate(layer_graph(mlp()), samples=1)
    every = (*shares, *[shares[-1]] * (size - len(shares)))
    names = tuple(f"rank{rank}" for rank in range(size))
    plan = partition(profile, equal_cluster(1), 1, Pipelining("1f1b", 24))
    stages = (dataclasses.replace(plan.stages[0], devices=names, shares=every),)
    keras.utils.set_random_seed(5)
    return hk.pipeline_parallel(mlp, dataclasses.replace(plan, stages=stages))


def test_gradients_are_clipped_by_the_norm_over_all_stages() -> None:
    def plain_weights() -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        model = compile_as_all(mlp(), keras.optimizers.SGD(0.5, global_clipnorm=0.05))
        x, y = batches(mlp)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        weights: list[np.ndarray] = model.get_weights()
        return weights

    reference = by_rank_0(plain_weights)
    run = pipelined("mlp", keras.optimizers.SGD(0.5, global_clipnorm=0.05))
    for number, value in run.weights.items():
        np.testing.assert_allclose(value, reference[number], rtol=1e-4, atol=1e-6)


@pytest.mark.three_suffice
@pytest.mark.every_size
def test_replicas_that_drift_apart_are_noticed() -> None:
    """One rank changes a weight of a stage that it shares with others, after the third step."""
    size = hvpipe.size()
    if size == 1:
        pytest.skip("replicas are several ranks")
    x, y = batches(mlp, 32)
    odd = size - 2  # the last replica of the first stage

    def spoil(batch: int, logs: Any) -> None:
        if batch == 2 and hvpipe.rank() == odd and size > 2:
            pipe.trainable_variables[1].assign_add(np.full(10, 1e-6))

    replicas = (size - 1, 1) if size > 2 else (2,)
    pipe = compile_as_all(
        hk.pipeline_parallel(mlp, microbatches=4, replicas=replicas, verify_every=2), keras.optimizers.Adam()
    )
    pipe.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    if size > 2:
        spoiling = keras.callbacks.LambdaCallback(on_train_batch_end=spoil)
        with pytest.raises(MismatchError, match=rf"after step 8\..*dense/bias differs on rank {odd} from"):
            pipe.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[spoiling])


class Calls(keras.layers.Layer):
    """Adds rank + 1 to a float and an integer for each rule of combining them, in each call in training."""

    def build(self, shape: Any) -> None:
        self.counters = {
            (dtype, rule): self.add_weight(
                shape=(),
                trainable=False,
                initializer="zeros",
                dtype=dtype,
                aggregation=rule,
                name=f"{rule}_{dtype}",
            )
            for dtype in ("float32", "int64")
            for rule in ("mean", "sum", "only_first_replica", "none")
        }

    def call(self, x: Any, training: bool = False) -> Any:
        for (dtype, _), counter in self.counters.items() if training else ():
            counter.assign(counter + keras.ops.cast(hvpipe.rank() + 1, dtype))
        return x


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layers_own_state_follows_its_aggregation(
    recompute: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """docs/model-parallel.md says so. Regression guard: floats were averaged whatever they are."""
    size = hvpipe.size()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), Calls(name="calls")])
    pipe = hk.pipeline_parallel(model, stages=1, microbatches=2 * size, recompute=recompute)
    pipe.compile("sgd", "mse")
    x = np.ones((8 * size, 6), np.float32)
    pipe.fit(x, x[:, :3], batch_size=4 * size, epochs=1, verbose=0)  # 4 micro-batches on each rank
    every = sum(4 * (rank + 1) for rank in range(size))
    expected = {"sum": every, "only_first_replica": 4, "none": 4 * (hvpipe.rank() + 1)}
    for (dtype, rule), counter in pipe.get_layer("calls").counters.items():
        mean = every / size if dtype == "float32" else round(every / size)
        assert float(counter) == expected.get(rule, mean), (dtype, rule)
    warned = [
        record.getMessage() for record in caplog.records if "keeps its own value" in record.getMessage()
    ]
    assert len(warned) == (1 if size > 1 and hvpipe.rank() == 0 else 0)
    assert all("calls/none_float32, " in text and "none_int64 keeps" in text for text in warned)
