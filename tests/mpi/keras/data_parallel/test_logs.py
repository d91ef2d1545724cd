"""Losses and metrics cover the samples of all ranks."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
from hvpipe.errors import MismatchError
from training import (
    CLASSES,
    FEATURES,
    again,
    all_batches,
    assert_same_on_all_ranks,
    by_rank_0,
    compiled,
    fit,
    mlp,
    my_batches,
    parallel,
    samples,
)


def still() -> keras.Model:
    """Return a model with a learning rate of 0, so that the loss of any samples is known in advance."""
    return compiled(mlp, keras.optimizers.SGD(0.0), metrics=["accuracy"])


def parallel_still() -> keras.Model:
    return parallel(still())


def own_samples() -> tuple[np.ndarray, np.ndarray]:
    """Return 5 samples on rank 0, 8 on rank 1, and so on."""
    counts = [5 + 3 * rank for rank in range(hvpipe.size())]
    start = sum(counts[: hvpipe.rank()])
    x, y = samples(sum(counts))
    return x[start : start + counts[hvpipe.rank()]], y[start : start + counts[hvpipe.rank()]]


@functools.cache
def expected() -> dict[str, float]:
    x, y = samples(sum(5 + 3 * rank for rank in range(hvpipe.size())))
    found: dict[str, float] = by_rank_0(
        lambda: still().evaluate(x, y, verbose=0, return_dict=True, batch_size=len(x))
    )
    return found


@pytest.mark.every_size
@pytest.mark.older_tensorflow
@pytest.mark.quick
def test_history_of_unequal_ranks() -> None:
    """This includes validation data. The arrays differ in length, but give the same number of batches."""
    x, y = own_samples()
    model = again(parallel_still)
    history = fit(model, x, y=y, batch_size=len(x), epochs=2, validation_data=(x, y), shuffle=False)
    assert_same_on_all_ranks(history)
    for name, value in expected().items():
        np.testing.assert_allclose(history[name], [value] * 2, rtol=1e-5)
        np.testing.assert_allclose(history[f"val_{name}"], [value] * 2, rtol=1e-5)


@pytest.mark.every_size
def test_evaluate_of_unequal_ranks() -> None:
    x, y = own_samples()
    model = again(parallel_still)
    found = model.evaluate(x, y, verbose=0, return_dict=True, batch_size=4)
    assert found == pytest.approx(expected(), rel=1e-5)
    assert_same_on_all_ranks(found)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(
        [expected()["loss"], expected()["accuracy"]], rel=1e-5
    )


@pytest.mark.filterwarnings("ignore:.*Your input ran out of data")
def test_a_rank_without_validation_batches_is_named() -> None:
    """Regression: "Rank 0 is at: results of evaluate (loss). Rank 1 is at: results of evaluate ()"."""
    if hvpipe.size() == 1:
        pytest.skip("there is no other rank")
    last = hvpipe.size() - 1
    data = tf.data.Dataset.from_tensor_slices(own_samples()).batch(4)
    with pytest.raises(MismatchError, match=f"no batch of validation data on rank {last}"):
        again(parallel_still).evaluate(data.filter(lambda *_: hvpipe.rank() != last), verbose=0)


def test_weighted_metrics_are_means_over_all_weights() -> None:
    """Regression guard: they were means over samples. Here the ranks have weights of very different sums."""

    def weighed() -> keras.Model:
        metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy")]
        return compiled(mlp, keras.optimizers.SGD(0.0), metrics=metrics, weighted_metrics=["accuracy"])

    x, y = own_samples()
    weights = np.linspace(1.0, 3.0, len(x), dtype=np.float32) * 10.0 ** hvpipe.rank()
    everything = [
        np.concatenate(parts) for parts in zip(*hvpipe.allgather_object((x, y, weights)), strict=True)
    ]

    def by_keras() -> Any:
        xs, ys, ws = everything
        return weighed().evaluate(xs, ys, sample_weight=ws, verbose=0, return_dict=True, batch_size=4)

    wanted = by_rank_0(by_keras)
    model = parallel(weighed())
    found = model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True, batch_size=4)
    assert found == pytest.approx(wanted, rel=1e-5)
    # Other data in the validation, whose weights must not count for the training's means.
    history = model.fit(
        *(x, y, len(x)), sample_weight=weights, validation_data=(x[:4], y[:4]), shuffle=False, verbose=0
    ).history
    assert {name: history[name][0] for name in wanted} == pytest.approx(wanted, rel=1e-5)


def test_a_validation_split_leaves_equal_epochs() -> None:
    """Regression guard: ranks were refused for batches that only their whole data has."""
    x, y = samples(49 if hvpipe.rank() == 0 else 48)
    history = fit(again(parallel_still), x, y=y, batch_size=16, validation_split=0.2)
    assert_same_on_all_ranks(history)


def test_evaluate_before_a_step_uses_rank_0s_weights() -> None:
    """For example, only rank 0 has loaded the weights."""
    x, y = own_samples()
    model = still()
    if hvpipe.rank() > 0:
        model.set_weights([0 * weight for weight in model.get_weights()])
    found = parallel(model).evaluate(x, y, verbose=0, return_dict=True, batch_size=4)
    assert found == pytest.approx(expected(), rel=1e-5)


@pytest.mark.every_size
def test_only_a_single_rank_uses_xla(caplog: Any) -> None:
    """On one rank, XLA compiles the sample counter too.

    Several ranks switch XLA off, also in `evaluate`, and warn once.
    """
    alone = hvpipe.size() == 1
    model = parallel(compiled(jit_compile=True))
    model.evaluate(*samples(8), verbose=0)
    assert model.jit_compile is alone
    fit(model, my_batches(2))
    assert model.jit_compile is alone
    assert model._hvpipe.steps.train_counter.total() == 16
    said = [record for record in caplog.records if "jit_compile is switched off" in record.getMessage()]
    assert len(said) == (hvpipe.rank() == 0 and not alone)


def test_logs_at_the_end_of_fit_are_those_of_the_last_epoch() -> None:
    x, y = own_samples()
    seen: list[dict[str, float]] = []
    look = keras.callbacks.LambdaCallback(on_train_end=lambda logs: seen.append(dict(logs)))
    options = {"validation_data": (x, y), "callbacks": [look]}
    history = fit(again(parallel_still), x, y=y, batch_size=len(x), epochs=2, **options)
    assert seen == [{name: values[-1] for name, values in history.items()}]


def test_train_on_batch_of_ranks_that_change_their_size() -> None:
    """Each call counts only its own samples."""
    model = again(parallel_still)
    x, y = own_samples()
    skewed = 9 if hvpipe.rank() == 0 else 1
    model.train_on_batch(np.repeat(x[:1], skewed, 0), np.repeat(y[:1], skewed, 0))
    found = model.train_on_batch(x, y, return_dict=True)
    assert found == pytest.approx(expected(), rel=1e-5)
    assert model.train_on_batch(x, y) == pytest.approx([expected()["loss"], expected()["accuracy"]], rel=1e-5)


def test_return_dict_may_be_a_positional_argument() -> None:
    x, y = own_samples()
    model = again(parallel_still)
    listed = pytest.approx([expected()["loss"], expected()["accuracy"]], rel=1e-5)
    for returned, as_dict in ((listed, False), (pytest.approx(expected(), rel=1e-5), True)):
        assert model.train_on_batch(x, y, None, None, as_dict) == returned
        assert model.evaluate(x, y, len(x), 0, None, None, None, as_dict) == returned


def test_metrics_with_a_value_for_each_class() -> None:
    """Each value is the mean over ranks, weighted by samples."""
    size = hvpipe.size()
    model = compiled(mlp, loss="categorical_crossentropy", metrics=[keras.metrics.F1Score()])
    x, y = own_samples()
    y = keras.utils.to_categorical(y, CLASSES)
    own = model.evaluate(x, y, verbose=0, return_dict=True)["f1_score"]
    found = parallel(model).evaluate(x, y, verbose=0, return_dict=True)["f1_score"]
    everyone = np.array(hvpipe.allgather_object(own))
    np.testing.assert_allclose(found, np.average(everyone, 0, weights=[5 + 3 * r for r in range(size)]))
    assert found.shape == (CLASSES,)
    history = fit(model, x, y=y, batch_size=len(x), epochs=2)
    assert_same_on_all_ranks(history["f1_score"])


def test_layers_numbered_differently_on_another_rank() -> None:
    """For example, one rank has made more layers before.

    Metrics pair up although 10 sorts before 9 as text.
    """
    first = 9 + hvpipe.rank()
    inputs = keras.Input((FEATURES,))
    outputs = [keras.layers.Dense(CLASSES, name=f"dense_{first + i}")(inputs) for i in range(2)]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["sparse_categorical_crossentropy"] * 2, metrics=[["accuracy"]] * 2)
    x, y = own_samples()
    history = fit(parallel(model), x, y=[y, y], batch_size=len(x))
    numbers = [history[f"dense_{first}_accuracy"], history[f"dense_{first + 1}_loss"]]
    assert_same_on_all_ranks(np.array(numbers))


def test_a_metric_that_only_runs_eagerly() -> None:
    model = parallel(compiled(metrics=[lambda y, _: float(y.numpy().max())], run_eagerly=True))
    assert_same_on_all_ranks(fit(model, my_batches(2)))


def test_history_equals_one_rank_with_the_whole_batch() -> None:
    model = parallel(compiled(metrics=["accuracy"]))
    validation = samples(30, seed=9)
    mine = fit(model, my_batches(4), epochs=2, validation_data=validation)
    theirs = by_rank_0(
        lambda: fit(compiled(metrics=["accuracy"]), all_batches(4), epochs=2, validation_data=validation)
    )
    assert mine.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-4, err_msg=name)


def test_early_stopping_and_plateau_see_the_averages() -> None:
    """The local losses of the ranks differ, but all ranks stop at the same epoch."""
    model = parallel(compiled(mlp, keras.optimizers.SGD(5.0)))
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=0, restore_best_weights=True)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1)
    data = tf.data.Dataset.from_tensor_slices(own_samples()).batch(5).take(1).repeat(2)
    history = fit(model, data, epochs=8, callbacks=[stop, plateau])
    assert_same_on_all_ranks(history["loss"])
    assert_same_on_all_ranks(model.get_weights()[0])
