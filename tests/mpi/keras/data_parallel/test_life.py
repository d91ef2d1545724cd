"""A model after `data_parallel`: compiled, wrapped and trained again, with a learning rate schedule."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError
from training import (
    State,
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


def test_compiled_again() -> None:
    """An update is still pending, and the new optimizer is another one."""

    def run(overlap: str) -> dict[str, np.ndarray]:
        model = parallel(compiled(), overlap)
        for x, y in my_batches(2):
            model.train_on_batch(x.numpy(), y.numpy())
        model.compile(keras.optimizers.Adam(0.01), loss=loss())
        fit(model, my_batches(3))
        assert int(model.optimizer.iterations) == 3
        return state_of(model)

    found = run("step")
    assert_same_on_all_ranks(found)
    assert_same_bits(found, run("none"))


def test_compiled_after_data_parallel() -> None:
    keras.utils.set_random_seed(5)
    model = parallel(mlp())
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=loss())
    fit(model, my_batches(3))
    reference = again(usual, "step")
    fit(reference, my_batches(3))
    assert_same_bits(state_of(model), state_of(reference))


def test_fit_twice() -> None:
    def run(overlap: str) -> dict[str, np.ndarray]:
        model = again(usual, overlap)
        fit(model, my_batches(3))
        fit(model, my_batches(3, batch=4, seed=1), epochs=2)
        assert int(model.optimizer.iterations) == 9
        return state_of(model)

    assert_same_bits(run("step"), run("none"))


@pytest.mark.older_tensorflow
def test_changing_the_overlap_between_fits() -> None:
    model = parallel(compiled(), "step")
    fit(model, my_batches(3))
    for overlap in ("backward", "step", "none"):
        assert parallel(model, overlap) is model
        fit(model, my_batches(3))
    linear = again(usual, "none")
    for _ in range(4):
        fit(linear, my_batches(3))
    assert_same_bits(state_of(model), state_of(linear))


def test_wrapped_twice_reduces_once() -> None:
    def run(model: keras.Model) -> tuple[State, float]:
        before = hvpipe.counters().get("operations", 0)
        fit(model, my_batches(2))
        return state_of(model), hvpipe.counters().get("operations", 0) - before

    once, operations = run(parallel(compiled()))
    twice, operations_of_twice = run(parallel(parallel(compiled())))
    assert_same_bits(twice, once)
    assert operations_of_twice == operations
    # Each step has at least three buckets.
    assert operations >= (2 * 3 if hvpipe.size() > 1 else 0)


def test_learning_rate_scheduler() -> None:
    def run(overlap: str) -> dict[str, np.ndarray]:
        schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        model = again(usual, overlap)
        fit(model, my_batches(3), epochs=3, callbacks=[schedule])
        assert float(model.optimizer.learning_rate) == pytest.approx(0.0125)
        return state_of(model)

    assert_same_bits(run("step"), run("none"))


@pytest.mark.older_tensorflow
def test_detach_restores_the_methods() -> None:
    """After `detach`, the model has its own methods again and lacks none of its attributes."""
    model = compiled()
    before = vars(model).keys() - {"_hvpipe"}
    parallel(model)
    assert vars(model).keys() > before
    model._hvpipe.detach()
    assert vars(model).keys() == before
    fit(model, my_batches(1))
    assert len(hvpipe.allgather_object(0)) == hvpipe.size()  # no rank waits in a collective


def test_clear_errors() -> None:
    with pytest.raises(HvpipeError, match="Received: overlap='foo'"):
        hk.data_parallel(mlp(), overlap="foo")
    with pytest.raises(HvpipeError, match="Received: compression='int4'"):
        hk.data_parallel(mlp(), compression="int4")
    with pytest.raises(HvpipeError, match="Received: bucket_bytes=0"):
        hk.data_parallel(mlp(), bucket_bytes=0)
    with pytest.raises(HvpipeError, match=r"needs a keras\.Model of Keras 3\. Received: str"):
        hk.data_parallel("model")
    with pytest.raises(ValueError, match="compile"):
        fit(parallel(mlp()), my_batches(1))
    if hvpipe.size() > 1:
        model = mlp()
        model.compile(loss=loss(), optimizer=None)
        with pytest.raises(HvpipeError, match="compiled with one optimizer"):
            fit(parallel(model), my_batches(1))


def test_a_train_function_made_before_another() -> None:
    """Regression: the steps of the earlier one updated by a plan that the later one had replaced."""

    def run(overlap: str) -> State:
        model = parallel(compiled(), overlap)
        batches = iter(my_batches(4))
        earlier = model.make_train_function()
        earlier(batches)
        later = model.make_train_function(force=True)
        for function in (earlier, later, earlier):
            function(batches)
        assert len(model.get_weights()) == int(model.optimizer.iterations) == 4
        return state_of(model)

    found = run("step")
    assert_same_on_all_ranks(found)
    assert_same_bits(found, run("none"))
