"""A resumed training is the same, bit for bit, as one that never stopped."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.checkpoints import folder as folders
from hvpipe.checkpoints.arrays import plain, write_arrays
from hvpipe.errors import HvpipeError
from hvpipe.keras.checkpoint.callback_state import callback_arrays, callback_notes, set_callbacks
from hvpipe.keras.checkpoint.state_of import training_state
from training import CLASSES, FEATURES, assert_same_bits, fit, loss, samples, state_of

layers = keras.layers
BATCHES = 5


class Crash(Exception):
    """Ends a `fit`."""


class At(keras.callbacks.Callback):
    """Calls a function at the end of the n-th batch, from 1. Batches wait for the disk: they take no time."""

    reads_weights = False

    def __init__(self, batches: int, call: Callable[[], None], checkpoint: Any) -> None:
        super().__init__()
        self._left = batches
        self._call = call
        self._checkpoint = checkpoint

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._checkpoint._running.fit._writer.wait()
        self._left -= 1
        if self._left == 0:
            self._call()


def crash() -> None:
    raise Crash


class OutOfTime(keras.callbacks.Callback):
    """Stops within an epoch, as a time limit does."""

    reads_weights = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training = batch == 2


@dataclass(frozen=True)
class Case:
    """How to train. `slows` adds a callback that sets the learning rate at the end of an epoch."""

    overlap: str
    optimizer: Callable[[], Any]
    steps_per_epoch: int | None = None
    compression: str | None = None
    fragments: int = 1
    batches: Callable[[], Any] | None = None
    slows: bool = True


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def averaging() -> Any:
    return keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5)


def scaled() -> Any:
    """Return an optimizer whose slots have other names if Keras builds it in its first step."""
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.01), initial_scale=4.0)


class Shuffled(keras.utils.PyDataset):
    """This rank's batches. Keras shuffles them by Python's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self._x, self._y = (part[hvpipe.rank() :: hvpipe.size()] for part in samples(20 * hvpipe.size()))

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        mine = slice(4 * index, 4 * index + 4)
        return self._x[mine], self._y[mine]


def accumulating() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3)


# A training that is cut short ends its epoch twice, so its callbacks would slow it sooner.
USUAL = Case("step", adam, slows=False)
CASES = [
    pytest.param(USUAL, id="step", marks=pytest.mark.older_tensorflow),
    pytest.param(Case("backward", accumulating, 4), id="accumulation and steps_per_epoch"),
    pytest.param(Case("stale", adam, 4), id="stale"),
    pytest.param(Case("local", adam, compression="powersgd:2"), id="local compressed"),
    pytest.param(Case("local", adam, fragments=2), id="local in fragments"),
    pytest.param(Case("step", adam, compression="powersgd:2"), id="compression"),
    pytest.param(
        Case("none", scaled, batches=Shuffled), id="loss scaling and PyDataset", marks=pytest.mark.every_size
    ),
]


def data(repeat: bool) -> Any:
    """Return this rank's batches of a dataset that has another order in every epoch."""
    whole = tf.data.Dataset.from_tensor_slices(samples(BATCHES * 4 * hvpipe.size()))
    whole = whole.shuffle(1000, seed=3).batch(4)
    return hk.shard(whole.repeat() if repeat else whole)


def model_of(case: Case) -> keras.Model:
    """Return a model with seeds, statistics and slots."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(CLASSES),
        ]
    )
    model.compile(case.optimizer(), loss=loss(), metrics=["accuracy"])
    rounds: dict[str, Any] = {}
    if case.overlap == "local":  # at the checkpoint a round is being averaged, and another one is under way
        rounds = {"every": 2, "fragments": case.fragments, "outer_momentum": 0.9}
    return hk.data_parallel(
        model, case.overlap, compression=case.compression, bucket_bytes=200, warmup_steps=2, **rounds
    )


def train(
    case: Case,
    folder: Path,
    every: int | str,
    at: tuple[int, Callable[[], None]] | None = None,
    others: Sequence[Any] = (),
    batches: Callable[[], Any] | None = None,
) -> tuple[Any, Any]:
    """Train three epochs with a checkpoint and other callbacks; return the state and the history.

    `at` has the number of a batch and a function to call then. `batches` makes those that
    take the place of the case's, after the seeds are set.
    """
    model = model_of(case)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0, factor=0.5)
    callbacks: list[Any] = [hk.Checkpoint(folder, every=every), *[plateau] * case.slows, *others]
    if at:
        callbacks.append(At(*at, callbacks[0]))
    batches = batches or case.batches or (lambda: data(case.steps_per_epoch is not None))
    history = fit(model, batches(), epochs=3, steps_per_epoch=case.steps_per_epoch, callbacks=callbacks)
    return state_of(model), history


def shared(path: Path) -> Path:
    """Return rank 0's folder on all ranks."""
    return Path(hvpipe.broadcast_object(str(path)))


def copies_newest(source: Path, to: Path) -> Callable[[], None]:
    """Return a function that copies the newest checkpoint: what a job that is killed then leaves."""

    def copy() -> None:
        if hvpipe.rank() == 0:
            (newest, *_) = folders.complete(source)
            shutil.copytree(newest, to / newest.name)

    return copy


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for what several tests use."""
    return shared(tmp_path_factory.mktemp("kept"))


@functools.cache
def uninterrupted(case: Case, kept: Path) -> tuple[Any, Any, Path]:
    """Train once for all tests. Return the state, the history, and a folder as of within the second epoch."""
    folder = shared(Path(tempfile.mkdtemp(dir=kept)))
    steps = case.steps_per_epoch or BATCHES
    state, history = train(
        case, folder / "whole", 1, (steps + 4, copies_newest(folder / "whole", folder / "cut"))
    )
    hvpipe.barrier()
    return state, history, folder / "cut"


@pytest.mark.parametrize("case", CASES)
def test_resumed_in_the_middle_of_an_epoch(case: Case, kept: Path) -> None:
    """Weights, slots, statistics, seeds, sums and the logs of the epoch are as without the interruption."""
    steps = case.steps_per_epoch or BATCHES
    wanted, history, cut = uninterrupted(case, kept)
    (copy,) = folders.complete(cut)
    assert steps < int(copy.name[:10]) < 2 * steps  # in the second epoch
    found, rest = train(case, cut, 1000)
    assert_same_bits(found, wanted)
    assert {name: values[-2:] for name, values in history.items()} == rest


def test_resumed_between_epochs_and_after_the_end(tmp_path: Path) -> None:
    """Learning rates that callbacks set after an epoch are there; a finished training stays as it is.

    Regression: EarlyStopping sets the best weights when `fit` ends, but not if no epoch was left.
    """
    case, folder = Case("step", adam), shared(tmp_path)

    def best_first() -> list[Any]:
        return [keras.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True)]

    wanted, history = train(case, folder / "whole", "1epoch", others=best_first())
    with pytest.raises(Crash):
        train(case, folder / "cut", "1epoch", (2 * BATCHES + 1, crash), best_first())
    killed_in = folder / "cut" / "0000009999-abcdef"  # what a job that was killed was writing
    killed_in.mkdir(exist_ok=True)
    folders._forget_locks()  # they end with its process
    hvpipe.barrier()
    found, rest = train(case, folder / "cut", "1epoch", others=best_first())
    assert_same_bits(found, wanted)
    assert {name: values[-1:] for name, values in history.items()} == rest
    assert not killed_in.exists()
    again, nothing = train(case, folder / "cut", "1epoch", others=best_first())
    assert_same_bits(again, wanted)
    assert nothing == {}


def test_a_rank_that_cannot_write_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: rank 0 waited for the part as long as HVPIPE_TIMEOUT says, twice, and blamed the folder."""
    folder, last, begin = shared(tmp_path), hvpipe.size() - 1, folders.begin
    left = [2]

    def without_descriptors(*where: Any) -> Path:
        left[0] -= 1
        if hvpipe.rank() == last and left[0] >= 0:
            raise OSError(errno.EMFILE, "Too many open files", str(where[0]))
        return begin(*where)

    class Slow(keras.callbacks.Callback):
        reads_weights = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.1)  # threads write meanwhile

    monkeypatch.setattr(folders, "begin", without_descriptors)
    began_s = time.monotonic()
    train(USUAL, folder, 1, others=[Slow()])
    assert time.monotonic() - began_s < 60  # HVPIPE_TIMEOUT is 120 in the tests
    told = [r.getMessage() for r in caplog.records if "was not written" in r.getMessage()]
    if hvpipe.rank() in (0, last):
        assert len(told) == 2
        assert all(f"Too many open files: '{folder}'" in each for each in told)
    if hvpipe.rank() == 0 < last:
        assert f"Received on rank 0: rank {last}: [Errno {errno.EMFILE}]" in told[0]
    assert folders.complete(folder)[0].name.startswith(f"{3 * BATCHES:010d}")  # training went on
    left[0] = 1_000_000
    says = f"Rank (0|{last}) could not write the checkpoint of step {3 * BATCHES} .*Too many open files"
    with pytest.raises(HvpipeError, match=says):  # nothing was saved
        train(USUAL, folder / "other", 1)


AVERAGING = Case("step", averaging, slows=False)


def swapping() -> keras.callbacks.Callback:
    return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)


@functools.cache
def swapped(kept: Path) -> tuple[Any, Path]:
    """Train once for two tests. Return the state, and a folder as of the end of the second epoch."""
    folder = shared(Path(tempfile.mkdtemp(dir=kept)))
    copy = copies_newest(folder / "whole", folder / "cut")
    state, _ = train(AVERAGING, folder / "whole", "1epoch", (2 * BATCHES + 1, copy), [swapping()])
    hvpipe.barrier()
    return state, folder / "cut"


def test_resumed_where_a_callback_has_swapped_weights_and_averages(kept: Path) -> None:
    """Regression: training went on from the averages."""
    wanted, cut = swapped(kept)
    found, _ = train(AVERAGING, cut, "1epoch", others=[swapping()])
    assert_same_bits(found, wanted)


class TwoOptimizers(keras.Sequential):
    """Trains a recurrent layer, whose state goes on from batch to batch, with an optimizer of its own."""

    def __init__(self, *, built: bool) -> None:
        keras.utils.set_random_seed(7)
        recurrent = layers.LSTM(4, stateful=True)
        super().__init__([keras.Input(batch_shape=(4, 3, FEATURES)), recurrent, layers.Dense(CLASSES)])
        self.other = hk.DistributedOptimizer(keras.optimizers.Adam(0.01))
        self.compile(keras.optimizers.Adam(0.01), loss())
        self.optimizer.build(self.layers[-1].trainable_variables)
        if built:
            self.other.build(self.layers[0].trainable_variables)

    def train_step(self, data: Any) -> Any:
        x, y = data
        parts = [self.layers[0].trainable_variables, self.layers[-1].trainable_variables]
        with tf.GradientTape() as tape:
            value = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(value, parts)
        self.other.apply(gradients[0], parts[0])
        self.optimizer.apply(gradients[1], parts[1])
        return {"loss": value}

    def everything(self) -> dict[str, Any]:
        states = [*self.other.variables, *self.layers[0].states]
        return {**state_of(self), **{f"other {i}": np.array(v.numpy()) for i, v in enumerate(states)}}


def test_resumed_with_another_optimizer_and_the_state_of_a_recurrent_layer(tmp_path: Path) -> None:
    folder = shared(tmp_path)
    x, y = samples(3 * 4 * BATCHES * hvpipe.size())
    x, y = x.reshape(-1, 3, FEATURES), y[::3]
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).shard(hvpipe.size(), hvpipe.rank())

    def run(name: str, built: bool = True) -> dict[str, Any]:
        model = hk.data_parallel(TwoOptimizers(built=built), "backward")
        checkpoint = hk.Checkpoint(folder / name, every=BATCHES + 2)
        copy = copies_newest(folder / "whole", folder / "cut")
        at = [At(BATCHES + 4, copy, checkpoint)] if name == "whole" else []
        fit(model, batches, epochs=2, callbacks=[checkpoint, *at])
        found: dict[str, Any] = model.everything()
        return found

    wanted = run("whole")
    hvpipe.barrier()
    with pytest.raises(HvpipeError, match=r"attribute 'other' of .*: build it for the same variables"):
        run("cut", built=False)
    hvpipe.barrier()
    assert_same_bits(run("cut"), wanted)


def without_statistics(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a stop averages over ranks once more."""
    return {name: value for name, value in state.items() if "moving" not in name}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # which Keras says if it does not know when
@pytest.mark.parametrize("known", [True, False])
def test_stopped_by_a_callback(known: bool, kept: Path, tmp_path: Path) -> None:
    """Within an epoch, whose length may be unknown: the rest of it follows. At its end: nothing does.

    Regression: the epoch counted as finished, and the training as complete at every later start.
    """

    class GoodEnough(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    folder = shared(tmp_path)

    def batches() -> Any:
        return data(False) if known else data(False).filter(lambda *_: True)

    def run(name: str, *others: Any, case: Case = USUAL, every: int = 1000) -> dict[str, Any]:
        state, _ = train(case, folder / name, every, others=others, batches=batches)
        return without_statistics(state)

    run("cut", OutOfTime())
    if not known:  # its shuffle has another seed
        assert_same_bits(run("cut"), run("whole"))
        return
    assert_same_bits(run("cut"), without_statistics(uninterrupted(USUAL, kept)[0]))
    assert_same_bits(run("good", GoodEnough()), run("good"))
    run("averaged", OutOfTime(), swapping(), case=AVERAGING, every=1)  # before Keras' own end of `fit`
    # Keras swaps by adding and subtracting, here once more, so the last bits differ; those of biases before a
    # normalisation are all that they have.
    found, wanted = run("averaged", swapping(), case=AVERAGING), without_statistics(swapped(kept)[0])
    for (name, value), expected in zip(found.items(), wanted.values(), strict=True):
        if name.endswith("/kernel"):
            np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-4, err_msg=name)


def test_bfloat16_is_saved_by_its_bits(tmp_path: Path) -> None:
    """Regression: accumulated gradients were added, and best weights set, as the integers that hold them."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        state = training_state(model_of(Case("none", accumulating)))
        wrote = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
        wrote.set_model(state.model)
        wrote.best_weights = state.model.get_weights()
    finally:
        keras.config.set_dtype_policy(policy)
    reads = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    reads.set_model(state.model)
    saved = {name: plain(value) for name, value in callback_arrays([wrote]).items()}
    set_callbacks([reads], callback_notes([wrote]), saved)
    for one, other in zip(reads.best_weights, wrote.best_weights, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    name = "own/optimizer/0"
    hundredth = np.asarray(tf.cast([0.01], tf.bfloat16))
    parts = [SimpleNamespace(file=SimpleNamespace(name=f"{rank}.npz"), names=(name,)) for rank in range(2)]
    for part in parts:
        with (tmp_path / part.file.name).open("wb") as sink:
            write_arrays(sink, {name: hundredth})
    rows = [[name, "x/gradient_accumulator", [1], "bfloat16"]]
    manifest: Any = SimpleNamespace(ranks=hvpipe.size() + 1, model={"variables": rows}, parts=parts)
    found = state._redistributed(tmp_path, manifest, {name: plain(hundredth)})
    assert float(found[name][0]) == (2 * float(hundredth[0]) if hvpipe.rank() == 0 else 0)


def test_a_rank_that_is_asked_to_stop_at_the_end(tmp_path: Path) -> None:
    """Regression: SIGTERM during the last validation, or the last checkpoint, had no effect, or killed."""

    class StopsAtEnd(keras.callbacks.Callback):
        reads_weights = False

        def on_train_end(self, logs: Any = None) -> None:
            if hvpipe.rank() == hvpipe.size() - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    folder = shared(tmp_path)
    with pytest.raises(SystemExit) as ended:
        train(USUAL, folder, 1000, others=[StopsAtEnd()])
    assert ended.value.code == 75
    hvpipe.barrier()
    assert [int(place.name[:10]) for place in folders.complete(folder)] == [3 * BATCHES]


def test_callbacks_continue_from_those_of_their_class() -> None:
    """Regression: only one rank has a ModelCheckpoint, so others could not use that rank's notes."""
    wrote = [
        keras.callbacks.ModelCheckpoint("model.keras"),
        keras.callbacks.ReduceLROnPlateau("loss"),
        keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
    ]
    for callback in wrote[1:]:
        callback.wait, callback.best = 2, 0.5
    wrote[2].best_weights = [np.ones(3)]
    reads = [
        keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
        keras.callbacks.EarlyStopping("loss"),
        keras.callbacks.ReduceLROnPlateau("loss"),
    ]
    for callback in reads:
        callback.wait = 0
    assert set_callbacks(reads[:1], callback_notes(wrote), {})  # would take the weights of now for the best
    assert (reads[0].wait, reads[0].best) == (0, None)
    assert not set_callbacks(reads, callback_notes(wrote), callback_arrays(wrote))
    assert [callback.wait for callback in reads] == [2, 0, 2]
    np.testing.assert_array_equal(reads[0].best_weights, [np.ones(3)])


def test_another_number_of_ranks_compresses_without_the_errors_before(tmp_path: Path) -> None:
    state = training_state(model_of(Case("step", adam, compression="powersgd:2")))
    manifest: Any = SimpleNamespace(ranks=hvpipe.size() + 1, model={"variables": []})
    own = {"own/weights/4": np.ones(8), "own/compression/error/0": np.ones((FEATURES, 8))}
    own["own/compression/left/0"] = np.ones((FEATURES, 2))
    assert list(state._redistributed(tmp_path, manifest, own)) == ["own/weights/4"]


def test_errors(tmp_path: Path) -> None:
    folder = shared(tmp_path)
    with pytest.raises(hvpipe.HvpipeError, match="Received: keep=0"):
        hk.Checkpoint(folder, keep=0)
    with pytest.raises(hvpipe.HvpipeError, match=r"a whole number of at least 1\. Received: keep=1\.5"):
        hk.Checkpoint(folder, keep=1.5)  # type: ignore[arg-type]
    with pytest.raises(hvpipe.HvpipeError, match=r"path of a folder\. Received: folder=''"):
        hk.Checkpoint("")
    with pytest.raises(hvpipe.HvpipeError, match="Received: every='soon'"):
        hk.Checkpoint(folder, every="soon")
    plain = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(CLASSES)])
    plain.compile("sgd", loss())
    with pytest.raises(hvpipe.HvpipeError, match=r"needs a model of hvpipe\.keras\.data_parallel"):
        fit(plain, data(repeat=False), callbacks=[hk.Checkpoint(folder)])
    hk.data_parallel(plain)
    two = [hk.Checkpoint(folder / "often"), hk.Checkpoint(folder / "rarely")]
    with pytest.raises(
        hvpipe.HvpipeError, match=r"should get one .*Received: one each for .*often, .*rarely"
    ):
        fit(plain, data(repeat=False), callbacks=two)
