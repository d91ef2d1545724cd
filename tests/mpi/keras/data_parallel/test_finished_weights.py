"""Weights read outside a step are those after the last step, even in the middle of `step` training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hvpipe
from hvpipe.keras.callbacks import reads_at_batches, stops_at_batches
from training import (
    Remember,
    State,
    again,
    assert_same_bits,
    assert_same_on_all_ranks,
    compiled,
    fit,
    mlp,
    my_batches,
    parallel,
    samples,
    state_of,
    usual,
)

STEPS = 4


class Act(keras.callbacks.Callback):
    """Calls `act` at the end of each batch.

    It claims not to read weights, so hvpipe does not flush before it.
    """

    reads_weights = False

    def __init__(self, act: Callable[[keras.Model], Any]) -> None:
        super().__init__()
        self.act = act
        self.found: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append(self.act(self.model))


def test_which_callbacks_run_code_of_the_user_at_batches() -> None:
    """Regression: subclasses of Keras' callbacks did, whatever they override."""

    class SavesElsewhere(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None: ...

    class ActsAtBatches(keras.callbacks.ModelCheckpoint):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None: ...

    saves, acts = SavesElsewhere("x.keras"), ActsAtBatches("x.keras")
    listed = [
        saves,
        keras.callbacks.TensorBoard(),
        acts,
        keras.callbacks.LambdaCallback(on_train_batch_end=print),
    ]
    assert [reads_at_batches(callback) for callback in listed] == [False, False, True, True]
    assert [stops_at_batches(callback) for callback in (saves, acts)] == [False, True]


def with_adam(overlap: str) -> keras.Model:
    return parallel(compiled(mlp, keras.optimizers.Adam(0.01)), overlap)


def run(overlap: str, callback: Any) -> Any:
    fit(again(with_adam, overlap), my_batches(STEPS), callbacks=[callback])
    return callback


@functools.cache
def linear_states() -> list[State]:
    """Return the states after every step of a run without overlap."""
    found: list[State] = run("none", Act(state_of)).found
    return found


def weights(model: keras.Model) -> dict[str, np.ndarray]:
    return {str(place): np.array(array) for place, array in enumerate(model.get_weights())}


def outputs(model: keras.Model) -> dict[str, np.ndarray]:
    return {"outputs": model.predict(samples(5)[0], verbose=0)}


def results(model: keras.Model) -> dict[str, np.ndarray]:
    return {"results": np.array(model.evaluate(*samples(6), verbose=0))}


def configuration(model: keras.Model) -> dict[str, np.ndarray]:
    model.get_config()  # as keras.saving.save_model does first
    return state_of(model)


@pytest.mark.older_tensorflow
def test_reading_through_the_model() -> None:
    """Each batch ends with a different way of reading, while an update is still pending."""
    ways = [weights, outputs, results, configuration]

    def act(overlap: str) -> list[dict[str, np.ndarray]]:
        coming = iter(ways)
        found: list[dict[str, np.ndarray]] = run(overlap, Act(lambda model: next(coming)(model))).found
        return found

    for way, mine, theirs in zip(ways, act("step"), act("none"), strict=True):
        assert_same_bits(mine, theirs, way.__name__)


def test_an_update_is_pending_if_nothing_reads_the_weights() -> None:
    """The other tests here prove something only if an update is pending after a batch."""
    if hvpipe.size() == 1:
        pytest.skip("there is nothing to reduce")
    pipelined = run("step", Act(state_of)).found
    assert any(
        pipelined[1][name].tobytes() != array.tobytes()
        for name, array in zip(pipelined[1], linear_states()[1].values(), strict=True)
    )


def test_a_callback_that_reads_a_layer() -> None:
    def kernel(model: keras.Model) -> dict[str, np.ndarray]:
        return {
            "kernel": np.array(model.layers[0].kernel.numpy()),
            "slot": np.array(model.optimizer.variables[2].numpy()),
        }

    pipelined = run("step", Remember(kernel))
    for mine, theirs in zip(pipelined.at_batches, linear_states(), strict=True):
        arrays = list(theirs.values())  # the first four are weights
        assert_same_bits(mine, {"kernel": arrays[0], "slot": arrays[4 + 2]})


def test_a_lambda_callback_counts_as_the_users() -> None:
    """The class belongs to Keras, but the function that it calls belongs to the user."""

    def look(overlap: str) -> list[Any]:
        model = again(usual, overlap)
        seen: list[Any] = []
        callback = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(state_of(model))
        )
        fit(model, my_batches(3), callbacks=[callback])
        return seen

    for mine, theirs in zip(look("step"), look("none"), strict=True):
        assert_same_bits(mine, theirs)


def test_a_callback_list_of_the_user() -> None:
    def look(overlap: str) -> Remember:
        model = again(usual, overlap)
        remember = Remember()
        fit(
            model,
            my_batches(3),
            callbacks=keras.callbacks.CallbackList([remember], add_history=True, model=model),
        )
        return remember

    mine, theirs = look("step"), look("none")
    for one, other in zip(
        mine.at_batches + mine.at_epochs, theirs.at_batches + theirs.at_epochs, strict=True
    ):
        assert_same_bits(one, other)


def test_end_of_every_epoch_and_of_fit() -> None:
    def epochs(overlap: str) -> list[Any]:
        model = again(usual, overlap)
        seen: list[Any] = []
        look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(state_of(model)))
        fit(model, my_batches(3), epochs=3, callbacks=[look])
        return [*seen, state_of(model)]

    pipelined = epochs("step")
    for mine, theirs in zip(pipelined, epochs("none"), strict=True):
        assert_same_on_all_ranks(mine)
        assert_same_bits(mine, theirs)


def test_checkpoints_of_every_batch(tmp_path: Path) -> None:
    """Each checkpoint loads in plain Keras, with the weights after its step."""
    run("step", keras.callbacks.ModelCheckpoint(str(tmp_path / "{batch}.keras"), save_freq=1))
    files = sorted(tmp_path.iterdir())
    assert len(files) == STEPS
    for file, expected in zip(files, linear_states(), strict=True):
        assert_same_bits(state_of(keras.models.load_model(file)), expected)


@pytest.mark.older_tensorflow
def test_saved_between_two_steps(tmp_path: Path) -> None:
    """Each batch ends with a different way of saving, while an update is still pending."""
    ways: list[Callable[[keras.Model, Path], None]] = [
        lambda model, path: model.save(path / "model.keras"),
        lambda model, path: keras.saving.save_model(model, path / "saving.keras"),
        lambda model, path: model.save_weights(path / "last.weights.h5"),
        lambda model, path: None,
    ]

    def saved(overlap: str) -> list[dict[str, np.ndarray]]:
        path = tmp_path / overlap
        path.mkdir()
        coming = iter(ways)
        run(overlap, Act(lambda model: next(coming)(model, path)))
        last = mlp()
        last.load_weights(path / "last.weights.h5")
        models = [keras.models.load_model(path / name) for name in ("model.keras", "saving.keras")]
        return [*map(state_of, models), weights(last)]

    for mine, theirs in zip(saved("step"), saved("none"), strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("rate", ["learning_rate", "read_layer"])
def test_between_two_calls_of_train_on_batch(rate: str) -> None:
    """The caller may read a layer or set the learning rate.

    train_on_batch must therefore finish its update.
    """

    def seen(overlap: str) -> list[Any]:
        model = again(usual, overlap)
        found = []
        for number, (x, y) in enumerate(my_batches(4)):
            if rate == "learning_rate":
                model.optimizer.learning_rate = 0.1 / (1 + number)
            model.train_on_batch(x.numpy(), y.numpy())
            found.append(state_of(model))
        return found

    for mine, theirs in zip(seen("step"), seen("none"), strict=True):
        assert_same_bits(mine, theirs)


def test_setting_weights_between_two_steps() -> None:
    """The pending update runs before the weights are set, so it does not change them."""
    start = [array.copy() for array in compiled().get_weights()]
    linear = run("none", Act(lambda model: (model.set_weights(start), state_of(model))[1])).found
    pipelined = run("step", Act(lambda model: (model.set_weights(start), state_of(model))[1])).found
    for mine, theirs in zip(pipelined, linear, strict=True):
        assert_same_bits(mine, theirs)
