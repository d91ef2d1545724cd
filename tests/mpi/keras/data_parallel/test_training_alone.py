"""Training that no rank averages is told of, once and by name; training that something averages is not."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError
from hvpipe.horovod import tensorflow as hvd
from hvpipe.horovod.tensorflow import keras as hvd_keras
from hvpipe.session import current
from training import CLASSES, FEATURES, assert_same_on_all_ranks, loss, my_batches, state_of

# Of Keras, for a copy whose optimizer has no variables yet.
pytestmark = pytest.mark.filterwarnings("ignore:Skipping variable loading:UserWarning")


def compiled(name: str, optimizer: Any = None, kind: type[keras.Sequential] = keras.Sequential) -> Any:
    """Return a compiled model whose weights are equal on all ranks."""
    keras.utils.set_random_seed(5)
    model = kind([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, name=f"{name}_dense")], name=name)
    return compile_again(model, optimizer)


def compile_again(model: Any, optimizer: Any = None) -> Any:
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss())
    return model


def train(model: Any, **options: Any) -> None:
    model.fit(my_batches(2), verbose=0, **options)


@contextlib.contextmanager
def told(caplog: pytest.LogCaptureFixture, *wanted: str) -> Iterator[None]:
    """Check that the block warns once on rank 0 with all of `wanted`, and not at all if nothing is wanted."""
    caplog.clear()
    yield
    mine = [r.getMessage() for r in caplog.records if "trains alone" in r.getMessage()]
    everyones = hvpipe.allgather_object(mine)
    assert [len(found) for found in everyones] == [int(bool(wanted) and hvpipe.size() > 1)] + [0] * (
        hvpipe.size() - 1
    ), everyones
    assert all(part in text for text in everyones[0] for part in wanted), everyones


def test_copies_keep_the_hooks(caplog: pytest.LogCaptureFixture) -> None:
    model = hk.data_parallel(compiled("original"), "backward")
    train(model)
    wrapper = keras.wrappers.SKLearnClassifier
    copies = [
        copy.deepcopy({"inside": model})["inside"],
        compile_again(keras.models.clone_model(model)),
        compile_again(vars(__import__("sys").modules[wrapper.__module__])["clone_model"](model)),
    ]
    copies.append(copy.deepcopy(copies[-1]))
    assert copies[0].get_weights()[0].tobytes() == model.get_weights()[0].tobytes()
    for copied in copies:
        with told(caplog):
            train(copied)
        assert_same_on_all_ranks(state_of(copied))
    with hk.alone(), told(caplog):
        probes = [compile_again(make(model)) for make in (copy.deepcopy, keras.models.clone_model)]
        if hvpipe.rank() == 0:
            for probe in probes:
                train(probe)
        for method in (model.fit, model.evaluate, model.train_on_batch) if hvpipe.size() > 1 else ():
            with pytest.raises(
                HvpipeError, match=f"{method.__name__} of a data_parallel model needs all ranks"
            ):
                method(np.zeros((2, FEATURES)), np.zeros(2))


def unpickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def around(model: Any) -> Any:
    layers = [keras.Input((FEATURES,)), model, keras.layers.Dense(CLASSES)]
    return compile_again(keras.Sequential(layers, name=f"{model.name}_around"))


def test_models_without_hooks_are_told_of(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    def loaded(model: Any) -> Any:
        model.save(tmp_path / "model.keras")
        return keras.models.load_model(tmp_path / "model.keras")

    for make in (unpickled, copy.copy, loaded, around):
        model = make(hk.data_parallel(compiled(make.__name__)))
        with told(caplog):
            model.evaluate(my_batches(1), verbose=0)
            model.predict(my_batches(1), verbose=0)
            with hk.alone():
                train(model)
        with told(
            caplog,
            f"model {model.name} ",
            "`model = hk.data_parallel(model)`",
            f"{make.__name__}_dense/kernel",
        ):
            train(model)
        with told(caplog):
            train(model)
            model.train_on_batch(np.zeros((3, FEATURES)), np.zeros(3))  # traced again
        hk.data_parallel(model)
        with told(caplog):
            train(model)
        assert_same_on_all_ranks(state_of(model))
    model = compiled("on_batch")
    with told(caplog, "model on_batch "):
        for x, y in my_batches(2):
            model.train_on_batch(x, y)


class OwnUpdate(keras.Sequential):
    """Updates without an optimizer of Keras, or averages by hand before the compiled one updates, or not."""

    by_hand = gathers = False

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            value = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(value, self.trainable_variables)
        if self.by_hand:
            self.optimizer.apply([hvd.allreduce(g) for g in gradients], self.trainable_variables)
        elif self.gathers:  # what the loss compares, as CLIP does
            hk.allgather(tf.concat([self(x), self(x)], 0))
            self.optimizer.apply(gradients, self.trainable_variables)
        else:
            for gradient, variable in zip(gradients, self.trainable_variables, strict=True):
                variable.assign_sub(0.1 * gradient)
        return {"loss": hk.allreduce(value)}


def test_a_fit_that_averages_otherwise_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled("distributed", hk.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with told(caplog):
        train(model, callbacks=[hk.BroadcastGlobalVariablesCallback(0)])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    for each in (scaled, keras.optimizers.Adam()):
        with told(caplog):
            train(hk.data_parallel(compiled("scaled", each)))
            train(
                compiled("horovod", hvd_keras.DistributedOptimizer(type(each).from_config(each.get_config())))
            )
    with told(caplog, "model updates_itself ", "Received: updates by its train_step"):
        train(compiled("updates_itself", kind=OwnUpdate))
    model = compiled("gathers", kind=OwnUpdate)
    model.gathers = True
    with told(caplog, "model gathers ", "gathers_dense/kernel"):
        train(model)
    model = compiled("by_hand", kind=OwnUpdate)
    model.by_hand = True
    with told(caplog):
        train(model)
    assert_same_on_all_ranks(state_of(model))


@pytest.mark.parametrize("in_graph", [True, False])
def test_loops(in_graph: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Only updates with gradients of this rank are told of, and not those that build an optimizer."""

    def run(name: str, average: Any = lambda gradients, _: gradients, tape: Any = lambda t: t) -> None:
        model = compiled(f"{name}_{'graph' if in_graph else 'eager'}")
        optimizer = keras.optimizers.SGD(0.1)
        if name == "optimizer":
            hk.DistributedOptimizer(optimizer)
        optimizer.apply([tf.zeros(v.shape) for v in model.trainable_variables], model.trainable_variables)

        def step(x: Any, y: Any) -> None:
            with tape(tf.GradientTape()) as recording:
                value = loss()(y, model(x))
            gradients = recording.gradient(value, model.trainable_variables)
            optimizer.apply(average(gradients, model.trainable_variables), model.trainable_variables)

        for x, y in my_batches(2):
            (tf.function(step) if in_graph else step)(x, y)

    current().reduced_by_hand = 0  # by cases before
    line = "`optimizer = hk.DistributedOptimizer(optimizer)`"
    for name, wanted, ways in (
        ("optimizer", (), {}),
        ("tape", (), {"tape": hk.DistributedGradientTape}),
        ("horovods_tape", (), {"tape": hvd.DistributedGradientTape}),
        ("averages", (), {"average": hk.average_gradients}),
        ("nothing", ("optimizer sgd", line, "nothing_"), {}),
        # Nor are statistics of the data gradients.
        (
            "statistics",
            ("optimizer sgd", line),
            {"average": lambda g, _: (hvd.allreduce(tf.ones([FEATURES])), g)[1]},
        ),
        ("in_one_array", (), {"average": in_one_array}),
        ("by_hand", (), {"average": lambda gradients, _: [hk.allreduce(g) for g in gradients]}),
    ):
        with told(caplog, *wanted):
            run(name, **ways)
    with told(caplog), hk.alone():
        run("on_purpose")
    with told(caplog):  # the noise of an adversarial example
        keras.optimizers.SGD(0.1).apply([tf.ones([FEATURES])], [tf.Variable(tf.zeros([FEATURES]))])


def in_one_array(gradients: Any, _: Any) -> Any:
    """Average gradients as half types, in one array."""
    flat = tf.cast(tf.concat([tf.reshape(g, [-1]) for g in gradients], 0), tf.float16)
    parts = tf.split(tf.cast(hk.allreduce(flat), tf.float32), [int(np.prod(g.shape)) for g in gradients])
    return [tf.reshape(part, g.shape) for part, g in zip(parts, gradients, strict=True)]


class TwoNets(keras.Model):
    """Has a second net, which its own optimizer trains, or none."""

    context: Any = contextlib.nullcontext

    def __init__(self, name: str, optimizer: Any) -> None:
        super().__init__(name=name)
        self.first, self.second = (
            keras.layers.Dense(CLASSES, name=f"{name}_{n}") for n in ("first", "second")
        )
        self.other = optimizer
        self.noise = tf.Variable(tf.zeros([FEATURES]))
        self.noises = keras.optimizers.SGD(0.1)

    def call(self, x: Any) -> Any:
        return self.first(x) + self.second(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            value = loss()(y, self(x + self.noise))
        first, second = self.first.trainable_variables, self.second.trainable_variables
        # Of this rank's batch, as in adversarial training.
        self.noises.apply([tape.gradient(value, self.noise)], [self.noise])
        gradients = tape.gradient(value, second)
        if self.other is None:
            for gradient, variable in zip(gradients, second, strict=True):
                variable.assign_sub(0.1 * gradient)
        else:
            with self.context():
                self.other.apply(gradients, second)
        self.optimizer.apply(tape.gradient(value, first), first)
        return {"loss": value}


@pytest.mark.parametrize("overlap", ["step", "none"])
def test_a_second_net_that_nobody_averages_is_named(overlap: str, caplog: pytest.LogCaptureFixture) -> None:
    def trained(name: str, optimizer: Any) -> Any:
        keras.utils.set_random_seed(5)
        model = compile_again(TwoNets(f"{name}_{overlap}", optimizer))
        model(np.zeros((1, FEATURES)))
        hk.data_parallel(model, overlap)
        train(model)
        return model

    with told(
        caplog, f"a part of model plain_{overlap} ", f"plain_{overlap}_second/kernel", "optimizer adam"
    ):
        trained("plain", keras.optimizers.Adam())
    with told(
        caplog, f"weights of model assigned_{overlap} differ", f"assigned_{overlap}_second (2 of 2 weights)"
    ):
        trained("assigned", None)
    with told(caplog):
        model = trained("wrapped", hk.DistributedOptimizer(keras.optimizers.Adam()))
    assert_same_on_all_ranks({v.path: v.numpy() for v in model.trainable_variables})


def test_a_second_net_that_ranks_train_alone_on_purpose(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing compares it, and the next `fit` does not replace it by rank 0's."""
    monkeypatch.setattr(current(), "settings", replace(current().settings, strict=True))
    keras.utils.set_random_seed(5)
    model = compile_again(TwoNets("own", keras.optimizers.SGD(0.1)))
    model.context = hk.alone
    model(np.zeros((1, FEATURES)))
    hk.data_parallel(model, verify_every=1)
    starts: list[Any] = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: starts.append(model.second.kernel.numpy())
    )
    train(model)
    before = model.second.kernel.numpy()
    train(model, callbacks=[look])
    np.testing.assert_array_equal(starts[0], before)
    assert_same_on_all_ranks({v.path: v.numpy() for v in model.first.variables})
    assert len(set(hvpipe.allgather_object(before.tobytes()))) == hvpipe.size()
    assert not [r for r in caplog.records if "rank 0's" in r.getMessage()]


def test_strict_makes_it_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current(), "settings", replace(current().settings, strict=True))
    if hvpipe.size() == 1:
        train(compiled("one_rank"))
        return
    with pytest.raises(HvpipeError, match="model strict trains alone"):
        train(compiled("strict"))
    with hk.alone():
        train(compiled("strict_alone"))
    keras.utils.set_random_seed(5)
    model = compile_again(TwoNets("strict_net", None))
    with pytest.raises(HvpipeError, match=r"strict_net_second \(2 of 2 weights\)"):
        train(hk.data_parallel(model))
