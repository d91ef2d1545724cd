"""What files and checkpoints of a pipeline keep: every optimizer's state, half types, frozen layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from saved_pipelines import (
    BATCH,
    EPOCH,
    adam,
    assert_same,
    build,
    build_with_more_state,
    data,
    fill,
    pipeline,
    state,
)

import hvpipe
import hvpipe.keras as hk
from hvpipe.checkpoints.manifest import read_manifest
from hvpipe.errors import MismatchError
from training import by_rank_0


def test_without_an_optimizer_the_weights_are_saved(folder: Path) -> None:
    keras.utils.set_random_seed(5)
    pipe = hk.pipeline_parallel(build, microbatches=4)
    pipe.save(folder / "model.keras")
    pipe.save_checkpoint(folder / "checkpoint")
    expected = pipe.predict(data()[0], batch_size=BATCH)
    model = keras.models.load_model(folder / "model.keras")
    assert not model.compiled
    found = by_rank_0(lambda: model.predict(data()[0], batch_size=BATCH, verbose=0))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    compiled = pipeline()
    fill(compiled)
    compiled.load_checkpoint(folder / "checkpoint")
    np.testing.assert_array_equal(compiled.predict(data()[0], batch_size=BATCH), expected)


def schedule_free() -> Any:
    """Return an optimizer whose slots begin as copies of the weights."""
    return keras.optimizers.ScheduleFreeAdamW(0.01)


has_schedule_free = hasattr(keras.optimizers, "ScheduleFreeAdamW")


OPTIMIZERS = {
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "ema": lambda: keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, amsgrad=True)),
    "nadam": lambda: keras.optimizers.Nadam(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)),
    **({"schedule free": schedule_free} if has_schedule_free else {}),
}


def assert_both_hold(folder: Path, expected: dict[str, Any], pipe: Any) -> None:
    """Check that the Keras file and the checkpoint each have this state, with one pipeline for both."""
    for load, name in (("load", "model.keras"), ("load_checkpoint", "checkpoint")):
        for variable in pipe.rank_state().named.values():
            variable.assign(np.zeros(variable.shape).astype(variable.dtype))
        getattr(pipe, load)(folder / name)
        assert_same(expected, state(pipe))


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_the_state_of_every_optimizer_is_saved(folder: Path, kind: str) -> None:
    pipe = pipeline(optimizer=OPTIMIZERS[kind])
    fill(pipe)
    expected = state(pipe)
    model = build()
    model.compile(OPTIMIZERS[kind]())
    model.optimizer.build(model.trainable_variables)
    assert len([name for name in expected if name.startswith("optimizer")]) == len(model.optimizer.variables)
    pipe.save(folder / "model.keras")
    pipe.save_checkpoint(folder / "checkpoint")
    assert_both_hold(folder, expected, pipeline(optimizer=OPTIMIZERS[kind], schedule="gpipe"))
    loaded = keras.models.load_model(folder / "model.keras")
    for mine, plain in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        assert mine.shape == plain.shape
    sums = sorted(float(v.numpy().sum()) for v in loaded.optimizer.variables)
    slots = [v for name, v in expected.items() if name.startswith("optimizer")]
    np.testing.assert_allclose(sums, sorted(float(v.sum()) for v in slots), rtol=1e-6)


def test_half_types_are_saved(folder: Path) -> None:
    keras.config.set_dtype_policy("bfloat16")
    try:
        pipe = pipeline()
        fill(pipe)
        expected = state(pipe)
        pipe.save(folder / "model.keras")
        pipe.save_checkpoint(folder / "checkpoint")
        assert_both_hold(folder, expected, pipeline(schedule="gpipe"))
        loaded = keras.models.load_model(folder / "model.keras")
    finally:
        keras.config.set_dtype_policy("float32")
    for number, variable in enumerate(loaded.variables):
        np.testing.assert_array_equal(variable.numpy(), expected[f"weights/{number}"])


@pytest.mark.skipif(not has_schedule_free, reason="this Keras has no optimizer of the kind")
@pytest.mark.parametrize("load", ["load", "load_checkpoint"])
def test_slots_that_copy_weights_copy_the_loaded_ones(folder: Path, load: str) -> None:
    """Otherwise the first step would return to the weights from before loading."""
    model = build()
    keras.utils.set_random_seed(9)
    model.set_weights([np.random.normal(size=v.shape) for v in model.weights])
    path = folder / ("plain.keras" if load == "load" else "checkpoint")
    if load == "load_checkpoint":
        hk.pipeline_parallel(model, microbatches=4).save_checkpoint(path)
    elif hvpipe.rank() == 0:
        model.save(path)
    hvpipe.barrier()
    pipe = pipeline(optimizer=schedule_free)
    getattr(pipe, load)(path)
    found = pipe.fit(*data(), **EPOCH).history
    model.compile(schedule_free(), loss="mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)  # a traced build would not copy the weights
    expected = by_rank_0(lambda: model.fit(*data(), **EPOCH).history)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


def normalizing() -> Any:
    dense = [keras.layers.Dense(6), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((6,)), keras.layers.Normalization(), *dense])


def test_steps_that_ran_before_use_the_constants_that_were_loaded(folder: Path) -> None:
    """Regression: their graphs kept the mean and variance from before."""
    model, pipe = normalizing(), pipeline(normalizing)
    model.layers[0].adapt(data()[0] * 3 + 1)
    if hvpipe.rank() == 0:
        model.save(folder / "adapted.keras")
    hvpipe.barrier()
    pipe.predict(data()[0], batch_size=BATCH)
    pipe.load(folder / "adapted.keras")
    expected = by_rank_0(lambda: model.predict(data()[0], verbose=0))
    np.testing.assert_allclose(pipe.predict(data()[0], batch_size=BATCH), expected, rtol=1e-4, atol=1e-6)


def in_a_row() -> Any:
    dense = [keras.layers.Dense(6, activation="tanh") for _ in range(5)]
    return keras.Sequential([keras.Input((6,)), *dense, keras.layers.Dense(2, name="last")])


def freeze(model: Any, name: str) -> None:
    """Freeze the layer of this name. In a pipeline, `model.layers` are this rank's layers only."""
    for layer in model.layers:
        layer.trainable = layer.name != name
    model.compile(adam(), loss="mse", metrics=["mae"])


def test_layers_frozen_on_one_rank_are_frozen_in_every_file(folder: Path) -> None:
    pipe = pipeline(in_a_row)
    freeze(pipe, "last")
    before = state(pipe)
    pipe.fit(*data(), **EPOCH)
    after = state(pipe)
    assert sorted(name for name in before if np.array_equal(before[name], after[name])) == [
        "optimizer/_learning_rate",
        "weights/10",
        "weights/11",
    ]
    pipe.save(folder / "model.keras")
    pipe.save_weights(folder / "model.weights.h5")
    pipe.save_checkpoint(folder / "checkpoint")
    for name in ("model.keras", "model.weights.h5", "checkpoint"):
        other = pipeline(in_a_row, schedule="gpipe")
        freeze(other, "last")
        getattr(other, "load_checkpoint" if name == "checkpoint" else "load")(folder / name)
        assert_same(after, state(other))
    history = pipe.fit(*data(), **EPOCH).history
    loaded = keras.models.load_model(folder / "model.keras")
    assert [layer.trainable for layer in loaded.layers] == [*[True] * 5, False]
    for name, values in by_rank_0(lambda: loaded.fit(*data(), **EPOCH).history).items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


def test_a_shared_layer_frozen_on_only_one_rank_is_an_error(folder: Path) -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank agrees with itself")
    pipe = pipeline()
    freeze(pipe, "twice" if hvpipe.rank() == 0 else "")
    says = "all train it or none.* Received: twice with trainable=False on rank 0 and trainable=True on rank"
    with pytest.raises(MismatchError, match=says):
        pipe.fit(*data(), **EPOCH)
    with pytest.raises(MismatchError, match=says):
        pipe.save(folder / "model.keras")


def test_frozen_weights_of_replicas_are_no_statistics(folder: Path) -> None:
    """They may be large, are equal on all replicas, and are written once."""
    pipe = pipeline(build_with_more_state, stages=1)
    for layer in pipe.layers:
        layer.trainable = False
    pipe.save_checkpoint(folder)
    manifest = read_manifest(folder)
    paths = {name: path for name, path, _, _ in manifest.model["variables"]}
    names = [name for part in manifest.parts for name in part.names if "@" in name]
    kinds = {paths[name.partition("@")[0]].rpartition("/")[2] for name in names}
    several = {"moving_mean", "moving_variance", "seed_generator_state"}
    assert kinds == (several if hvpipe.size() > 1 else set())


def test_statistics_that_are_equal_keep_their_bits() -> None:
    pipe = pipeline(build_with_more_state, stages=1)
    (mean, *_) = [v for v in pipe.variables if v.path.endswith("moving_mean")]
    value = np.random.default_rng(1).normal(size=mean.shape).astype(np.float32)
    mean.assign(value)
    pipe._context.shared.mark_diverged()
    pipe._context.shared.combine_state()
    np.testing.assert_array_equal(mean.numpy(), value)
