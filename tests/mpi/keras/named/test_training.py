"""Horovod's optimizers, tapes, callbacks and state on hvpipe, and BatchNormalization over all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.horovod.keras as plain_hvd_keras
import hvpipe.horovod.tensorflow as hvd
import hvpipe.horovod.tensorflow.keras as hvd_keras
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError
from training import assert_same_bits, assert_same_on_all_ranks, by_rank_0

ROWS = 8


def data() -> tuple[Any, Any]:
    """Return the rows of all ranks, and their targets."""
    numbers = np.random.default_rng(3)
    return numbers.normal(size=(ROWS * hvd.size(), 5)), numbers.normal(size=(ROWS * hvd.size(), 2))


def mine(array: Any) -> Any:
    return array[ROWS * hvd.rank() : ROWS * (hvd.rank() + 1)]


def model_of(seed: int = 1, *, normalised: Any = None) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((5,), dtype="float64"), keras.layers.Dense(4, activation="tanh", dtype="float64")]
    layers += [normalised] if normalised is not None else []
    return keras.Sequential([*layers, keras.layers.Dense(2, dtype="float64")])


def weights_of(layer: Any) -> dict[str, Any]:
    return {str(place): value for place, value in enumerate(layer.get_weights())}


def gradients_of(model: keras.Model, x: Any, y: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    return tape.gradient(loss, [v.value for v in model.trainable_variables])


def fitted(reference: keras.Model, epochs: int) -> tuple[dict[str, Any], list[Any]]:
    """Train the model with plain Keras on the rows of all ranks. Return its history and weights."""
    x, y = data()

    def fit() -> tuple[dict[str, Any], list[Any]]:
        logs = reference.fit(x, y, len(x), epochs, verbose=0, shuffle=False).history
        return logs, reference.get_weights()

    found: tuple[dict[str, Any], list[Any]] = by_rank_0(fit)
    return found


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6, atol=1e-8)


# --- Tapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 1.0),
        ({"op": hvd.Sum}, None),
        ({"gradient_predivide_factor": 2.0}, 1.0),
        ({"groups": 2}, 1.0),
        ({"sparse_as_dense": True}, 1.0),
    ],
)
def test_a_tape_reduces(options: dict[str, Any], factor: float | None, in_graph: bool) -> None:
    model, (x, y) = model_of(), data()
    expected = gradients_of(model, x, y)
    sources = [v.value for v in model.trainable_variables]

    def step() -> list[Any]:
        with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = tf.reduce_mean(tf.square(model(mine(x), training=True) - mine(y)))
        return tape.gradient(loss, sources)

    found = tf.function(step)() if in_graph else step()
    assert_close(found, [g * (hvd.size() if factor is None else factor) for g in expected])


def test_a_tape_keeps_slices_and_the_gradients_of_local_layers() -> None:
    table = tf.Variable(tf.zeros([6, 2]))
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        picked = tf.gather(table, [hvd.rank()])
    slices = tape.gradient(picked, [table])[0]
    assert isinstance(slices, tf.IndexedSlices)
    np.testing.assert_array_equal(slices.indices, np.arange(hvd.size()))
    np.testing.assert_allclose(slices.values, np.full((hvd.size(), 2), 1 / hvd.size()))

    model, (x, y) = model_of(), data()
    own = gradients_of(model, mine(x), mine(y))
    tape = hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=model.layers[0])
    with tape:
        loss = tf.reduce_mean(tf.square(model(mine(x)) - mine(y)))
    found = tape.gradient(loss, [v.value for v in model.trainable_variables])
    whole = gradients_of(model, x, y)
    assert_close(found, [*[g / hvd.size() for g in own[:2]], *whole[2:]])
    with pytest.raises(ValueError, match="Keras layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[1])


def averaged(gradients: list[Any], sources: list[Any]) -> list[Any]:
    return hk.average_gradients(gradients, sources)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("how", [hvd.DistributedGradientTape, hk.DistributedGradientTape, averaged])
def test_gradients_of_reduced_gradients(how: Any, in_graph: bool) -> None:
    """Regression: they were None where the reduction went by the plan."""
    weight = tf.Variable(2.0)
    mine, mean = hvd.rank() + 1.0, (hvd.size() + 1) / 2

    def step() -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = mine * weight**3
            if how is averaged:
                (gradient,) = averaged(inner.gradient(loss, [weight]), [weight])
            else:
                (gradient,) = how(inner).gradient(loss, [weight])
            penalty = gradient**2
        return outer.gradient(penalty, weight)

    found = (tf.function(step) if in_graph else step)()
    np.testing.assert_allclose(found, 2 * (12 * mean) * (12 * mine), rtol=1e-6)
    if how is averaged and hvd.size() > 1:
        with tf.GradientTape(), pytest.raises(HvpipeError, match=r"a tape records .*compression='int8'"):
            hk.average_gradients([weight * 1.0], [weight], compression="int8")


# --- Optimizers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({}, 0.1),
        ({"op": hvd.Sum}, 0.1 / 2),
        ({"gradient_predivide_factor": 4.0}, 0.1),
        ({"compression": hvd.Compression.none, "groups": 3, "gradient_predivide_factor": 2.0}, 0.1),
    ],
)
def test_an_optimizer_trains_as_one_rank_with_the_whole_batch(options: dict[str, Any], rate: float) -> None:
    x, y = data()
    rate = rate * 2 / hvd.size() if options.get("op") == hvd.Sum else rate
    model, reference = model_of(), model_of()
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9), **options), "mse")
    start = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    average = hvd_keras.callbacks.MetricAverageCallback()
    logs = model.fit(mine(x), mine(y), ROWS, 3, verbose=0, shuffle=False, callbacks=[start, average]).history
    reference.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    expected, weights = fitted(reference, epochs=3)
    assert_close(model.get_weights(), weights)
    np.testing.assert_allclose(logs["loss"], expected["loss"], rtol=1e-6)
    assert_same_on_all_ranks(weights_of(model))


@pytest.mark.parametrize("average", [False, True])
def test_gradients_of_several_backward_passes_add_up(average: bool) -> None:
    x, y = data()
    model, reference = model_of(), model_of()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    model.compile(optimizer, "mse")
    model.fit(mine(x), mine(y), ROWS // 4, 1, verbose=0, shuffle=False)
    plain = keras.optimizers.SGD(0.1)
    for turn in range(2):
        passes = []
        for batch in (2 * turn, 2 * turn + 1):
            rows = [ROWS * rank + 2 * batch + i for rank in range(hvd.size()) for i in range(2)]
            passes.append(gradients_of(reference, x[rows], y[rows]))
        factor = 0.5 if average else 1.0
        plain.apply([factor * (a + b) for a, b in zip(*passes, strict=True)], reference.trainable_variables)
    assert_close(model.get_weights(), reference.get_weights())
    assert int(optimizer.iterations) == 4  # schedules count every pass, as in Horovod


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("options", [{"backward_passes_per_step": 2}, {"op": hvd.Sum}])
def test_epochs_of_unknown_length(options: dict[str, Any]) -> None:
    """Passes, weight decay and counters need no data, so the call that finds the end must not run them."""
    x, y = data()
    batches = tf.data.Dataset.from_tensor_slices((mine(x), mine(y))).batch(2)

    def trained(batches: tf.data.Dataset) -> tuple[dict[str, Any], int]:
        model = model_of()
        own = hvd.DistributedOptimizer(keras.optimizers.AdamW(0.01, weight_decay=0.1), **options)
        model.compile(own, "mse")
        model.fit(batches, epochs=2, verbose=0)
        return weights_of(model), int(own.iterations)

    weights, steps = trained(batches.filter(lambda *row: True))
    assert steps == 8
    assert_same_bits(weights, trained(batches)[0])


def test_a_partial_optimizer_leaves_a_layer_to_its_rank() -> None:
    x, y = data()
    model = model_of()
    optimizer = hvd_keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=[model.layers[0]], scale_local_gradients=False
    )
    model.compile(optimizer, "mse")
    own = gradients_of(model, mine(x), mine(y))[0]
    before = model.layers[0].kernel.numpy()
    model.fit(mine(x), mine(y), ROWS, 1, verbose=0)
    assert_close([model.layers[0].kernel.numpy()], [before - 0.1 * own])
    assert_same_on_all_ranks(weights_of(model.layers[1]))


def test_arguments_that_do_not_fit() -> None:
    optimizer = keras.optimizers.SGD()
    with pytest.raises(ValueError, match="Adasum"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    with pytest.raises(ValueError, match="op=Average"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="groups"):
        hvd.DistributedGradientTape(tf.GradientTape(), groups="all")


def test_a_saved_model_is_loaded_with_a_distributed_optimizer(tmp_path: Path) -> None:
    path = Path(hvpipe.broadcast_object(str(tmp_path))) / "model.keras"
    x, y = data()
    model = model_of()
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(mine(x), mine(y), ROWS, 1, verbose=0)
    if hvd.rank() == 0:
        model.save(path)
    hvd.barrier()
    loaded = plain_hvd_keras.load_model(path)
    for each in (model, loaded):
        each.fit(mine(x), mine(y), ROWS, 1, verbose=0)
    assert_same_bits(weights_of(loaded), weights_of(model))
    assert_same_on_all_ranks(weights_of(loaded))


# --- Callbacks and state ----------------------------------------------------------------------------------


def test_learning_rates() -> None:
    x, y = data()
    model = model_of()
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.8, momentum=0.5)), "mse")
    warm_up = hvd_keras.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2)
    drop = hvd_keras.callbacks.LearningRateScheduleCallback(0.8, 0.1, start_epoch=2, end_epoch=4)
    logs = model.fit(mine(x), mine(y), ROWS // 2, 5, verbose=0, callbacks=[warm_up, drop]).history
    size = hvd.size()
    assert logs["lr"] == pytest.approx([0.8 / size * ((size - 1) / 2 + 1), 0.8, 0.8, 0.08, 0.08], rel=1e-5)


def test_state_is_synced_committed_and_restored() -> None:
    model = model_of(seed=hvd.rank() + 1)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    x, y = data()
    state = hvd.elastic.TensorFlowKerasState(model, epoch=hvd.rank(), seen=[])
    calls: list[int] = []
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(1)])

    @hvd.elastic.run
    def train(given: Any) -> str:
        calls.append(given.epoch)
        assert_same_on_all_ranks(weights_of(model))
        given.epoch += 1
        given.seen.append("committed")
        given.commit()
        committed = weights_of(model)
        if len(calls) < 2:
            model.fit(mine(x), mine(y), ROWS, 1, verbose=0)
            given.seen.append("lost")
            raise hvd.elastic.HorovodInternalError("a collective failed")
        assert_same_bits(weights_of(model), committed)
        return "done"

    assert train(state) == "done"
    assert (calls, resets) == ([0, 1], [1])
    assert state.seen == ["committed", "committed"]


def test_state_callbacks() -> None:
    x, y = data()
    model = model_of()
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    state = hvd_keras.elastic.KerasState(model, epoch=3, batch=0)
    callbacks = [
        hvd_keras.elastic.UpdateEpochStateCallback(state),
        hvd_keras.elastic.UpdateBatchStateCallback(state),
        hvd_keras.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    model.fit(mine(x), mine(y), ROWS // 4, 2, verbose=0, callbacks=callbacks)
    state.epoch = 99
    state.restore()
    assert (state.epoch, state.batch) == (5, 0)


# --- BatchNormalization over all ranks --------------------------------------------------------------------


@pytest.mark.three_suffice
@pytest.mark.every_size
@pytest.mark.parametrize("layer", ["own class", "replaced"])
def test_statistics_of_the_whole_batch(layer: str) -> None:
    x, y = data()
    if layer == "replaced":
        model = model_of(normalised=keras.layers.BatchNormalization(dtype="float64"))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model = hk.data_parallel(model, sync_batch_norm=True)
    else:
        model = model_of(normalised=hvd.SyncBatchNormalization(dtype="float64"))
        model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    reference = model_of(normalised=keras.layers.BatchNormalization(dtype="float64"))
    reference.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(mine(x), mine(y), ROWS, 3, verbose=0, shuffle=False)
    assert_close(model.get_weights(), fitted(reference, epochs=3)[1])


def test_layers_that_a_model_builds_late_normalise_over_ranks_until_wrapped_anew() -> None:
    """Regression: layers that did not exist yet were left out, and the others kept it for ever."""

    class Late(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.normalised = keras.layers.BatchNormalization()
            self.normalised.build(shape)

        def call(self, inputs: Any, training: bool = False) -> Any:
            return self.normalised(inputs, training=training)

    x, y = data()
    model = keras.Sequential([keras.layers.Dense(4), Late(), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    hk.data_parallel(model, sync_batch_norm=True)
    model.fit(mine(x), mine(y), ROWS, verbose=0)
    assert ("_moments" in vars(model.layers[1].normalised)) == (hvd.size() > 1)
    hk.data_parallel(model)
    assert "_moments" not in vars(model.layers[1].normalised)


def test_a_layer_of_statistics_over_ranks_is_saved_and_masked() -> None:
    layer = hk.SyncBatchNormalization(momentum=0.5)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert isinstance(again, hk.SyncBatchNormalization)
    assert again.momentum == 0.5
    x = np.random.default_rng(hvd.rank()).normal(size=(3, 4, 2)).astype(np.float32)
    mask = np.arange(4) < 2 + hvd.rank() % 2
    masks = np.broadcast_to(mask, (3, 4))
    layer(x, training=True, mask=tf.constant(masks))
    kept = np.concatenate(hvd.allgather_object(x[masks]))
    np.testing.assert_allclose(layer.moving_mean.numpy(), kept.mean(0) * 0.5, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), 0.5 + kept.var(0) * 0.5, rtol=1e-5)
