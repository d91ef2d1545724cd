"""Saving and loading pipelines: files of plain Keras, and checkpoints that other layouts can load."""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from saved_pipelines import (
    BATCH,
    EPOCH,
    assert_same,
    build,
    build_with_more_state,
    data,
    fill,
    pipeline,
    state,
    without_memory,
)

import hvpipe
import hvpipe.keras as hk
from hvpipe.checkpoints import folder as folders
from hvpipe.checkpoints.manifest import _digest
from hvpipe.errors import HvpipeError
from hvpipe.keras.checkpoint import by_hand
from hvpipe.keras.pipeline import model_file
from hvpipe.keras.seeds import seeds_of
from training import by_rank_0


class Trained:
    """A pipeline saved in both ways after one epoch, with its state then and after another epoch."""

    def __init__(self, folder: Path) -> None:
        self.file, self.weights, self.checkpoint = (
            folder / name for name in ("model.keras", "model.weights.h5", "checkpoint")
        )
        self.pipe = pipeline()
        self.pipe.fit(*data(), **EPOCH)
        self.pipe.save(self.file)
        self.pipe.save_weights(self.weights)
        self.pipe.save_checkpoint(self.checkpoint)
        self.then = state(self.pipe)
        self.predicted = self.pipe.predict(data()[0], batch_size=BATCH)
        self.history = self.pipe.fit(*data(), **EPOCH).history
        self.after = state(self.pipe)


@pytest.fixture(scope="module")
def trained(world: None, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(Path(hvpipe.broadcast_object(str(tmp_path_factory.mktemp("trained")))))


# Files of plain Keras ---------------------------------------------------------------------------------------


@pytest.mark.older_tensorflow
def test_plain_keras_loads_the_file_and_continues_training(trained: Trained) -> None:

    def continued() -> tuple[Any, int, dict[str, Any]]:
        model = keras.models.load_model(trained.file)
        predicted = model.predict(data()[0], batch_size=BATCH, verbose=0)
        return predicted, int(model.optimizer.iterations), model.fit(*data(), **EPOCH).history

    predicted, steps, history = by_rank_0(continued)
    np.testing.assert_allclose(predicted, trained.predicted, rtol=1e-5, atol=1e-6)
    assert steps == 3
    for name, values in trained.history.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


@pytest.mark.older_tensorflow
@pytest.mark.parametrize("kind", ["file", "weights"])
def test_a_pipeline_takes_a_file_with_the_optimizer(trained: Trained, kind: str) -> None:
    pipe = pipeline(schedule="gpipe")
    before = without_memory(pipe)
    assert bool(before) == (hvpipe.size() > 1)
    pipe.load(getattr(trained, kind))
    assert_same(trained.then, state(pipe))
    assert without_memory(pipe) == before


def test_a_pipeline_takes_the_file_of_a_plain_model(folder: Path) -> None:
    model = build()
    model.compile("sgd", loss="mse")
    if hvpipe.rank() == 0:
        model.save(folder / "plain.keras")
    hvpipe.barrier()
    pipe = pipeline()
    optimizer = {name: v for name, v in state(pipe).items() if name.startswith("optimizer")}
    pipe.load(folder / "plain.keras")
    found = pipe.predict(data()[0], batch_size=BATCH)
    expected = by_rank_0(lambda: model.predict(data()[0], batch_size=BATCH, verbose=0))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    # SGD uses none of Adam's state.
    assert_same(optimizer, {name: v for name, v in state(pipe).items() if name.startswith("optimizer")})


def test_adapted_normalization_layers_are_loaded(folder: Path) -> None:
    """The layer computes with constants made from its variables."""

    def normalized() -> Any:
        inputs = keras.Input((6,))
        x = keras.layers.Dense(8)(keras.layers.Normalization()(inputs))
        return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Normalization()(x)))

    model, (x, _) = normalized(), data()
    for layer, shape in ((model.layers[1], x.shape), (model.layers[3], (len(x), 8))):
        layer.adapt(np.random.default_rng(1).normal(3.0, 2.0, shape))
    model.compile("adam", loss="mse")
    if hvpipe.rank() == 0:
        model.save(folder / "plain.keras")
    expected = by_rank_0(lambda: model.predict(x, batch_size=BATCH, verbose=0))
    of_file = pipeline(normalized)
    of_file.load(folder / "plain.keras")
    of_file.save_checkpoint(folder / "checkpoint")
    of_checkpoint = pipeline(normalized)
    of_checkpoint.load_checkpoint(folder / "checkpoint")
    for pipe in (of_file, of_checkpoint):
        np.testing.assert_allclose(pipe.predict(x, batch_size=BATCH), expected, rtol=1e-5, atol=1e-6)


def test_saving_frees_its_memory(folder: Path) -> None:
    pipe = pipeline()
    before, attributes = without_memory(pipe), set(vars(pipe._context.model))
    pipe.rank_state()  # builds the optimizer
    held = held_bytes()
    pipe.save(folder / "model.keras")
    assert held_bytes() == held
    assert without_memory(pipe) == before
    assert set(vars(pipe._context.model)) == attributes


def held_bytes() -> int:
    """Return the bytes of all TensorFlow variables of this process."""
    gc.collect()
    found = [v for v in gc.get_objects() if isinstance(v, tf.Variable)]
    return sum(int(np.prod(v.shape)) * v.dtype.size for v in found)


# Checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.older_tensorflow
@pytest.mark.quick
def test_training_continues_with_the_same_bits(trained: Trained) -> None:
    pipe = pipeline()
    pipe.load_checkpoint(trained.checkpoint)
    assert_same(trained.then, state(pipe))
    assert pipe.fit(*data(), **EPOCH).history == trained.history
    assert_same(trained.after, state(pipe))


def test_seeds_and_statistics_continue_too(folder: Path) -> None:
    pipe = pipeline(build_with_more_state)
    pipe.fit(*data(), **EPOCH)
    pipe.save_checkpoint(folder)
    history = pipe.fit(*data(), **EPOCH).history
    again = pipeline(build_with_more_state)
    again.load_checkpoint(folder)
    assert again.fit(*data(), **EPOCH).history == history
    assert_same(state(pipe), state(again))
    for one, other in zip(pipe.variables, again.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_new_replicas_draw_their_own_random_numbers(folder: Path) -> None:
    pipe = pipeline(build_with_more_state)
    pipe.fit(*data(), **EPOCH)
    pipe.save_checkpoint(folder)
    again = pipeline(build_with_more_state, stages=1)
    again.load_checkpoint(folder)
    states = hvpipe.allgather_object([state.numpy().tolist() for state in seeds_of(again.layers)])
    seeds = [seed for of_rank in states for seed, _ in of_rank]
    assert len(set(seeds)) == len(seeds) == 2 * hvpipe.size()
    # All replicas continue after the same number of micro-batches.
    assert {draws for of_rank in states for _, draws in of_rank} == {12}


@pytest.mark.parametrize("layout", [{"schedule": "interleaved"}, {"schedule": "gpipe", "stages": 1}])
def test_another_layout_continues(trained: Trained, layout: dict[str, Any]) -> None:
    pipe = pipeline(**layout)
    pipe.load_checkpoint(trained.checkpoint)
    assert_same(trained.then, state(pipe))
    pipe.fit(*data(), **EPOCH)
    assert_same(trained.after, state(pipe), 1e-6)


@pytest.mark.parametrize("at", ["write_file", "write_manifest"])
def test_an_interrupted_save_keeps_the_previous_checkpoint(
    trained: Trained, folder: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = trained.pipe
    pipe.save_checkpoint(folder)
    before = state(pipe)
    fill(pipe)
    if hvpipe.rank() == (hvpipe.size() - 1 if at == "write_file" else 0):
        monkeypatch.setattr(by_hand, at, full_disk)
    with pytest.raises(HvpipeError, match=r"saving a checkpoint in .*rank \d: OSError: disk full"):
        pipe.save_checkpoint(folder)
    monkeypatch.undo()
    pipe.load_checkpoint(folder)
    assert_same(before, state(pipe))
    pipe.save_checkpoint(folder)
    hvpipe.barrier()
    assert len(os.listdir(folder)) == hvpipe.size() + 1


def test_a_checkpoint_of_a_fit_is_loaded_and_never_overwritten(folder: Path) -> None:
    pipe = pipeline()
    pipe.fit(*data(), **EPOCH, callbacks=[hk.Checkpoint(folder)])
    (place,) = folders.complete(folder)
    again = pipeline(schedule="gpipe")
    again.load_checkpoint(place)
    assert_same(state(pipe), state(again))
    with pytest.raises(HvpipeError, match=rf"load one, such as {place}"):
        again.load_checkpoint(folder)
    for own in (folder, place):
        with pytest.raises(HvpipeError, match=r"folder of its own.*where hk.Checkpoint has written"):
            again.save_checkpoint(own)
    again.save_checkpoint(folder / "by hand")
    with pytest.raises(HvpipeError, match=r"folder for several checkpoints.*is one itself"):
        again.fit(*data(), **EPOCH, callbacks=[hk.Checkpoint(folder / "by hand")])


def full_disk(*_: Any) -> None:
    raise OSError("disk full")


# Models and files that cannot be saved or loaded ------------------------------------------------------------


def test_a_checkpoint_of_another_model_is_refused(trained: Trained) -> None:
    pipe = pipeline(build_with_more_state)
    before = state(pipe)
    with pytest.raises(HvpipeError, match=r"weights/0 is dense.* here and twice/kernel"):
        pipe.load_checkpoint(trained.checkpoint)
    assert_same(before, state(pipe))


def test_a_checkpoint_of_another_optimizer_is_refused(trained: Trained) -> None:
    with pytest.raises(HvpipeError, match=r"same model and optimizer.*Received: SGD here and Adam"):
        pipeline(optimizer=lambda: keras.optimizers.SGD(0.1)).load_checkpoint(trained.checkpoint)
    with pytest.raises(HvpipeError, match=r"settings it was saved with.*_velocity_hats"):
        pipeline(optimizer=lambda: keras.optimizers.Adam(0.1, amsgrad=True)).load_checkpoint(
            trained.checkpoint
        )


def test_a_checkpoint_with_extra_optimizer_state_is_refused(folder: Path) -> None:
    saved = pipeline(optimizer=lambda: keras.optimizers.Adam(0.1, amsgrad=True))
    saved.save_checkpoint(folder / "amsgrad")
    with pytest.raises(HvpipeError, match=r"settings it was saved with.*_velocity_hats.*which .* has"):
        pipeline(optimizer=lambda: keras.optimizers.Adam(0.1)).load_checkpoint(folder / "amsgrad")


@pytest.mark.parametrize(
    "fault",
    [
        *("no manifest", "manifest cut", "manifest changed", "another version", "another kind"),
        *("missing", "cut", "changed", "elsewhere", "above", "packed"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(trained: Trained, folder: Path, fault: str) -> None:
    damaged = folder / "damaged"
    if hvpipe.rank() == 0:
        shutil.copytree(trained.checkpoint, damaged)
        path = damaged / "manifest.json"
        manifest = json.loads(path.read_text())
        del manifest["sha256"]
        file = manifest["parts"][-1]["file"]
        arrays = damaged / file["name"]
        if fault == "missing":
            arrays.unlink()
        elif fault == "another version":
            manifest["version"] = 2
        elif fault == "another kind":
            manifest["kind"] = "data_parallel"
        elif fault in ("elsewhere", "above"):
            file["name"] = f"../checkpoint/{arrays.name}" if fault == "elsewhere" else ".."
        elif fault == "packed":
            with np.load(arrays) as values:
                np.savez_compressed(arrays, **values)
            content = arrays.read_bytes()
            file |= {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        elif fault in ("changed", "cut"):
            changed = bytearray(arrays.read_bytes())
            changed[200] ^= 1
            arrays.write_bytes(changed if fault == "changed" else changed[:-1])
        manifest["sha256"] = _digest(manifest)
        if fault == "manifest changed":
            manifest["kind"] = "other"
        text = json.dumps(manifest)
        path.write_text(text[:100] if fault == "manifest cut" else text)
        if fault == "no manifest":
            path.unlink()
    hvpipe.barrier()
    says = {
        "no manifest": r"should have a manifest, manifest\.json",
        "manifest cut": r"manifest\.json, line \d+, column \d+: should be JSON",
        "manifest changed": r"manifest\.json should be unchanged",
        "another version": r"manifest\.json should be of version 1.*version=2",
        "another kind": r"resume only a checkpoint of pipeline training",
        "missing": r"npz is missing",
        "cut": r"npz has \d+ bytes instead of \d+",
        "changed": r"npz has another SHA-256 than when written",
        "elsewhere": r"name should be the name of a file beside it. Received: name='../checkpoint/",
        "above": r"name should be the name of a file beside it. Received: name='..'",
        "packed": r"npz should be unchanged. Received: ValueError: .* is packed, or takes more bytes",
    }
    pipe = trained.pipe
    before = state(pipe)
    with pytest.raises(HvpipeError, match=says[fault]):
        pipe.load_checkpoint(damaged)
    assert_same(before, state(pipe))


def test_a_path_that_cannot_be_written_is_an_error_on_all_ranks(trained: Trained, folder: Path) -> None:
    if hvpipe.rank() == 0:
        (folder / "file").write_text("")
    hvpipe.barrier()
    calls = {
        "save": "no/model.keras",
        "save_weights": "no/model.weights.h5",
        "save_checkpoint": "file/checkpoint",
    }
    for method, path in calls.items():
        with pytest.raises(HvpipeError, match=r"should succeed on every rank. Received: rank 0: \w+Error"):
            getattr(trained.pipe, method)(folder / path)
    with pytest.raises(HvpipeError, match=r"Received: rank 0: ValueError: Invalid filepath extension"):
        trained.pipe.save(folder / "model.unknown")


def test_a_file_that_cannot_be_read_is_an_error_on_all_ranks(
    trained: Trained, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("none.keras", "none.weights.h5"):
        before = state(trained.pipe)
        with pytest.raises(
            HvpipeError, match=rf"loading .*{file} should succeed on every rank. Received: rank"
        ):
            trained.pipe.load(folder / file)
        assert_same(before, state(trained.pipe))
    with pytest.raises(HvpipeError, match=r"ends with \.keras, .*Received: '.*/old\.h5'"):
        trained.pipe.load(folder / "old.h5")
    if hvpipe.rank() == 0:  # a small file that would fill the memory
        with zipfile.ZipFile(folder / "large.keras", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("config.json", bytes(1 << 22))
        os.mkfifo(folder / "pipe.keras")
    hvpipe.barrier()
    monkeypatch.setattr(model_file, "MOST_BYTES", 1 << 20)
    with pytest.raises(HvpipeError, match=r"unpack to [\d,]+ bytes at most. Received: 4,194,304 bytes"):
        trained.pipe.load(folder / "large.keras")
    with pytest.raises(HvpipeError, match=r"should be a .keras file. Received: .*a named pipe"):
        trained.pipe.load(folder / "pipe.keras")


def with_layers_of(widths: Sequence[int]) -> keras.Model:
    x = inputs = keras.Input((6,))
    for number, width in enumerate(widths):
        x = keras.layers.Dense(width, name=f"wide{number}")(x)
    return keras.Model(inputs, x, name="wide")


@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_a_file_of_another_model_names_the_first_variable_that_differs(folder: Path) -> None:
    """Regression: each rank said in Keras's words what differs in its own layers."""
    pipe = pipeline(functools.partial(with_layers_of, [8, 7, 6, 5, 2]))
    cases = {"first": [9, 9, 6, 5, 2], "last": [8, 7, 6, 5, 3], "short": [8, 7, 6]}
    for name, widths in cases.items():
        if hvpipe.rank() == 0:
            with_layers_of(widths).save(folder / f"{name}.keras")
            with_layers_of(widths).save_weights(folder / f"{name}.weights.h5")
    hvpipe.barrier()
    says = {
        "first": r"wide0/kernel should have the shape \[6, 8\], and the file has it as \[6, 9\]",
        "last": r"wide4/kernel should have the shape \[5, 2\], and the file has it as \[5, 3\]",
        "short": r"wide3/kernel should have the shape \[6, 5\], and the file does not have it",
    }
    before = state(pipe)
    for name in cases:
        for suffix in (".keras", ".weights.h5"):
            with pytest.raises(
                HvpipeError, match=rf"{name}{suffix} should be .* model, wide\..* {says[name]}$"
            ):
                pipe.load(folder / f"{name}{suffix}")
            assert_same(before, state(pipe))


# Callbacks --------------------------------------------------------------------------------------------------


class Worse(keras.callbacks.Callback):
    """Must be the first callback. Reports a worse score in each epoch, and records the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert logs is not None
        logs["score"] = float(epoch)
        self.weights.append(self.model.get_weights())


def test_keras_callbacks_save_and_restore(trained: Trained, folder: Path) -> None:
    pipe, worse = trained.pipe, Worse()
    pipe.load_checkpoint(trained.checkpoint)
    callbacks = [
        worse,
        keras.callbacks.ModelCheckpoint(folder / "new" / "{epoch}.keras"),
        keras.callbacks.ModelCheckpoint(folder / "new" / "{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.EarlyStopping("score", mode="min", patience=1, restore_best_weights=True),
    ]
    pipe.fit(*data(), batch_size=BATCH, epochs=5, shuffle=False, verbose=0, callbacks=callbacks)
    assert len(worse.weights) == 2
    for found, expected in zip(pipe.get_weights(), worse.weights[0], strict=True):
        np.testing.assert_array_equal(found, expected)
    hvpipe.barrier()
    assert sorted(os.listdir(folder / "new")) == ["1.keras", "1.weights.h5", "2.keras", "2.weights.h5"]
    for file in ("2.keras", "2.weights.h5"):
        pipe.load(folder / "new" / file)
        for found, expected in zip(pipe.get_weights(), worse.weights[1], strict=True):
            np.testing.assert_array_equal(found, expected)


class Orbax(keras.callbacks.Callback):
    """Stands in for OrbaxCheckpoint, which needs another package."""


def test_callbacks_that_cannot_write_for_a_pipeline_are_refused(
    trained: Trained, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keras.callbacks, "OrbaxCheckpoint", Orbax, raising=False)
    for callback in (keras.callbacks.BackupAndRestore(folder), Orbax()):
        with pytest.raises(HvpipeError, match=rf"Checkpoint.*Received: a callback {type(callback).__name__}"):
            trained.pipe.fit(*data(), **EPOCH, callbacks=[callback])
    with pytest.raises(HvpipeError, match=r"placeholders into the file name.*Received: filepath="):
        trained.pipe.fit(
            *data(), **EPOCH, callbacks=[keras.callbacks.ModelCheckpoint(folder / "{epoch}" / "m.keras")]
        )
