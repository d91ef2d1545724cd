"""Models with their own train_step or fit, callbacks that raise, and unusual inputs."""

from __future__ import annotations

import itertools
import logging
import signal
import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError
from hvpipe.keras.horovod_callbacks import LearningRateWarmupCallback
from hvpipe.session import current
from training import (
    CLASSES,
    FEATURES,
    Remember,
    again,
    assert_same_bits,
    assert_same_on_all_ranks,
    compiled,
    fit,
    loss,
    mlp,
    my_batches,
    parallel,
    state_of,
    usual,
)

STEPS = 6


class OwnStep(keras.Sequential):
    """Trains as Keras does, in a train_step of its own. Subclasses add to it in `after_update`."""

    def __init__(self) -> None:
        hidden = keras.layers.Dense(8, activation="tanh")
        super().__init__([keras.Input((FEATURES,)), hidden, keras.layers.Dense(CLASSES)])
        self.teacher = [tf.Variable(v.value) for v in self.trainable_variables]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            value = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        self.update(tape.gradient(value, self.trainable_variables))
        self.after_update()
        return {"loss": value}

    def update(self, gradients: Any) -> None:
        self.optimizer.apply(gradients, self.trainable_variables)

    def after_update(self) -> None:
        pass


class Clipping(OwnStep):
    """Clips its weights after the update, as a Wasserstein GAN does."""

    def after_update(self) -> None:
        for variable in self.trainable_variables:
            variable.assign(tf.clip_by_value(variable.value, -0.05, 0.05))


class Teaching(OwnStep):
    """Has a teacher that follows the weights, as in mean teacher and BYOL."""

    def after_update(self) -> None:
        for mean, variable in zip(self.teacher, self.trainable_variables, strict=True):
            mean.assign(0.9 * mean + 0.1 * variable.value)


class CompiledClipping(Clipping):
    """Compiles its train_step, which many users do, although Keras would do it."""

    @tf.function
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class ForgetsVariables(OwnStep):
    """Passes no variables to the optimizer, which knows them. One gradient is None."""

    def update(self, gradients: Any) -> None:
        self.optimizer.apply([None, *gradients[1:]])


@pytest.mark.parametrize(
    "kind",
    [
        *(ForgetsVariables, Teaching),
        *(pytest.param(kind, marks=pytest.mark.older_tensorflow) for kind in (Clipping, CompiledClipping)),
    ],
)
def test_code_after_the_update_sees_the_new_weights(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    def trained(overlap: str) -> dict[str, np.ndarray]:
        model = parallel(compiled(kind), overlap)
        timed = current().step_durations_s
        before = len(timed)
        fit(model, my_batches(STEPS), epochs=2)
        assert len(timed) == before + 2 * STEPS
        teacher = {f"teacher {i}": np.array(v.numpy()) for i, v in enumerate(model.teacher)}
        return {**state_of(model), **teacher}

    found = trained("none")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert_same_bits(trained("step"), found)
    warned = "after the optimizer's update" in caplog.text
    assert warned == (kind is not ForgetsVariables and hvpipe.rank() == 0)


def test_functions_that_run_eagerly_do_not_leave_the_update_to_the_next_step() -> None:
    """Regression: only `run_eagerly` was looked at, so the clipping came before the update."""

    def trained(overlap: str) -> dict[str, np.ndarray]:
        model = parallel(compiled(Clipping), overlap)
        fit(model, my_batches(2))
        return state_of(model)

    tf.config.run_functions_eagerly(True)
    try:
        assert_same_bits(trained("step"), trained("none"))
    finally:
        tf.config.run_functions_eagerly(False)


def test_an_optimizer_other_than_the_compiled_one_is_refused() -> None:
    class Other(OwnStep):
        def update(self, gradients: Any) -> None:
            self.other.apply(gradients, self.trainable_variables)

    model = compiled(Other)
    model.other = keras.optimizers.SGD(0.1)
    with pytest.raises(HvpipeError, match=r"drift apart.*Received: train_step of Other"):
        fit(parallel(model), my_batches(STEPS))


def test_another_optimizer_may_be_a_distributed_one() -> None:
    class Other(OwnStep):
        def update(self, gradients: Any) -> None:
            self.other.apply(gradients, self.trainable_variables)

    model = compiled(Other)
    model.other = hk.DistributedOptimizer(keras.optimizers.SGD(0.1))
    fit(parallel(model), my_batches(STEPS))
    assert_same_on_all_ranks(state_of(model))


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_another_optimizer_may_follow_the_compiled_one(overlap: str) -> None:
    """Regression: nothing ordered their announcements, so the ranks soon disagreed about what came next."""

    class TwoParts(OwnStep):
        def update(self, gradients: Any) -> None:
            self.optimizer.apply(gradients[:2], self.trainable_variables[:2])
            self.other.apply(gradients[2:], self.trainable_variables[2:])

    model = compiled(TwoParts)
    model.other = hk.DistributedOptimizer(keras.optimizers.SGD(0.1))
    fit(parallel(model, overlap), my_batches(STEPS), epochs=8)
    assert_same_on_all_ranks(state_of(model))


class TrainsItsHead(OwnStep):
    def train_step(self, data: Any) -> Any:
        x, y = data
        head = self.layers[-1].trainable_variables
        with tf.GradientTape() as tape:
            value = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(value, head), head)
        return {"loss": value}


def test_an_optimizer_that_was_built_for_a_part_of_the_model() -> None:
    """Regression: a KeyError of Keras. In a GAN each optimizer has a part."""

    def trained(overlap: str) -> dict[str, np.ndarray]:
        model = compiled(TrainsItsHead, keras.optimizers.Adam(0.01))
        model.optimizer.build(model.layers[-1].trainable_variables)
        fit(parallel(model, overlap), my_batches(STEPS))
        return state_of(model)

    assert_same_bits(trained("step"), trained("none"))


class TellsRate(OwnStep):
    """Returns the learning rate in the logs, as some Keras examples do."""

    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), "rate": tf.convert_to_tensor(self.optimizer.learning_rate)}


def test_reading_the_rate_of_a_scaled_optimizer_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    history = fit(parallel(compiled(TellsRate, scaled)), my_batches(2))
    assert history["rate"] == pytest.approx([0.1])
    assert "after the optimizer's update" not in caplog.text


class HandsOn(keras.Sequential):
    """Overrides fit to prepare data, as KerasHub's tasks do."""

    def fit(self, x: Any = None, **kwargs: Any) -> Any:
        return super().fit(x, **kwargs)


class HandsAllOn(keras.Sequential):
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return super().fit(*args, **kwargs)


@pytest.mark.parametrize("kind", [HandsOn, HandsAllOn])
def test_a_fit_that_passes_its_arguments_on(kind: Any) -> None:
    """Logs cover all ranks, the last update is finished, and the user's callbacks run."""

    def trained(overlap: str) -> dict[str, np.ndarray]:
        model = parallel(compiled(lambda: kind(mlp().layers)), overlap)
        seen: list[float] = []
        look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
        if kind is HandsOn:
            history = model.fit(my_batches(STEPS), epochs=2, verbose=0, callbacks=[look]).history
        else:
            history = model.fit(my_batches(STEPS), None, None, 2, 0, [look]).history
        assert_same_on_all_ranks(history)
        assert seen == history["loss"]
        assert len(seen) == 2
        return state_of(model)

    assert_same_bits(trained("step"), trained("none"))


def test_a_fit_that_takes_no_callbacks() -> None:
    class Closed(keras.Sequential):
        def fit(self, x: Any, epochs: int = 1) -> Any:
            return super().fit(x, epochs=epochs, verbose=0)

    model = parallel(compiled(lambda: Closed(mlp().layers)))
    if hvpipe.size() == 1:
        model.fit(my_batches(1))
        return
    says = r"fit should take callbacks.*Received: Closed.fit\(x: .*, epochs: .*\)"
    with pytest.raises(HvpipeError, match=says):
        model.fit(my_batches(1))


def test_gradients_that_need_no_weights() -> None:
    """The gradients of a linear loss need no weights. They are ready before the previous step's update."""
    x = np.random.default_rng(hvpipe.rank()).normal(size=(40, 100)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, np.ones((40, 4000), np.float32)))
    data = data.batch(4, drop_remainder=True)

    def trained(overlap: str) -> dict[str, np.ndarray]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(4000, use_bias=False)])
        model.compile("sgd", lambda y, p: tf.reduce_mean(y * p))
        fit(hk.data_parallel(model, overlap), data, epochs=2)
        return state_of(model)

    assert_same_bits(trained("step"), trained("none"))


@pytest.mark.older_tensorflow
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_weights_after_an_exception_in_fit(error: type[BaseException]) -> None:
    class Raise(keras.callbacks.Callback):
        reads_weights = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                raise error

    def trained(overlap: str) -> dict[str, np.ndarray]:
        model = parallel(compiled(), overlap)
        with pytest.raises(error):
            fit(model, my_batches(STEPS), callbacks=[Raise()])
        return state_of(model)

    found = trained("step")
    assert_same_bits(found, trained("none"))


def test_ctrl_c_within_a_step() -> None:
    """Regression: the update that waits for the next step was lost."""

    def trained(overlap: str) -> dict[str, np.ndarray]:
        calls = itertools.count()

        def press() -> Any:
            if next(calls) == 2:
                signal.raise_signal(signal.SIGINT)  # Python raises it when the step has run
            return np.float32(0)

        def pressing(wanted: Any, found: Any) -> Any:
            with tf.control_dependencies([tf.numpy_function(press, [], tf.float32)]):
                return tf.reduce_mean(
                    (tf.one_hot(tf.cast(tf.reshape(wanted, [-1]), tf.int32), CLASSES) - found) ** 2
                )

        model = parallel(compiled(loss=pressing), overlap)
        with pytest.raises(KeyboardInterrupt):
            fit(model, my_batches(STEPS))
        return state_of(model)

    assert_same_bits(trained("step"), trained("none"))


def test_another_thread_reads_weights_during_fit() -> None:
    """Regression: between two steps it could take a bucket that the next step collects."""
    over, failures = threading.Event(), []

    def read(model: keras.Model) -> None:
        while not over.is_set():
            try:
                model.get_weights()
            except Exception as error:
                failures.append(error)
                return

    def trained(overlap: str) -> dict[str, np.ndarray]:
        model = again(usual, overlap)
        reader = threading.Thread(target=read, args=(model,))
        fit(model, my_batches(2))
        if overlap == "step":
            reader.start()
        fit(model, my_batches(200))
        over.set()
        if overlap == "step":
            reader.join()
        return state_of(model)

    found = trained("step")
    assert not failures
    assert_same_bits(found, trained("none"))


def test_data_that_the_model_chooses() -> None:
    """A step waits for its data, and so for the code that makes it."""
    model = parallel(compiled(), "step")
    x = np.random.default_rng(hvpipe.rank()).normal(size=(8, FEATURES)).astype(np.float32)

    def hard_examples() -> Any:
        while True:
            found = model(x).numpy() if not model.built else model.predict_on_batch(x)
            yield x, np.argmin(found, axis=-1)

    spec = (tf.TensorSpec((8, FEATURES), tf.float32), tf.TensorSpec((8,), tf.int64))
    data = tf.data.Dataset.from_generator(hard_examples, output_signature=spec)
    assert np.isfinite(fit(model, data, steps_per_epoch=STEPS)["loss"][0])


def test_a_learning_rate_that_changes_at_every_batch() -> None:
    """Regression: the update that "step" leaves to the next step had that step's rate."""

    def trained(overlap: str) -> dict[str, np.ndarray]:
        model = again(usual, overlap)
        fit(model, my_batches(STEPS), epochs=3, callbacks=[LearningRateWarmupCallback(0.4, warmup_epochs=2)])
        return state_of(model)

    assert_same_bits(trained("step"), trained("none"))


def test_sparse_input() -> None:
    count = 8 * STEPS
    dense = np.random.default_rng(hvpipe.rank()).normal(size=(count, FEATURES)).astype(np.float32)
    dense[dense < 0] = 0
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(dense), np.arange(count) % CLASSES))
    keras.utils.set_random_seed(1)
    head = keras.Input((FEATURES,), sparse=True)
    model = keras.Model(head, keras.layers.Dense(CLASSES)(head))
    model.compile("sgd", loss())
    look = Remember()
    fit(parallel(model), data.batch(8), callbacks=[look])
    assert int(model.optimizer.iterations) == STEPS
    assert_same_on_all_ranks(look.at_epochs[-1])


def test_dataset_elements_that_are_not_batches() -> None:
    class Counting(OwnStep):
        def train_step(self, data: Any) -> Any:
            x = tf.fill((1, FEATURES), tf.cast(data, tf.float32))
            return super().train_step((x, tf.zeros((1,), tf.int32)))

    model = parallel(compiled(Counting))
    fit(model, tf.data.Dataset.range(STEPS * hvpipe.rank(), STEPS * (hvpipe.rank() + 1)))
    assert int(model.optimizer.iterations) == STEPS
    assert_same_on_all_ranks(state_of(model))
