"""Optimizers of a pipeline: settings equal on all ranks, half precision, weights without a gradient."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError, MismatchError
from pipelines import batches, both, compile_as_all, mlp, sgd, small


def in_float16(build: Any = small) -> keras.Model:
    """Build the model under a float16 policy, and restore the policy afterwards."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return build()
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.older_tensorflow
def test_half_precision_scales_the_loss_and_clips_over_all_stages() -> None:
    x, y = batches(mlp, 48)

    def losses(model: Any) -> Any:
        compile_as_all(model, keras.optimizers.SGD(0.5, global_clipnorm=0.05))
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history
        assert float(model.optimizer.dynamic_scale) == 2.0**15
        return history["loss"]

    expected, found = both(in_float16, losses)
    np.testing.assert_allclose(found, expected, rtol=5e-4)


def with_layers_without_weights_at_the_end() -> keras.Model:
    rest = [keras.layers.Softmax() for _ in range(8)]
    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(4), *rest])


def test_the_loss_scale_changes_on_a_rank_without_weights() -> None:
    x, y = batches(mlp, 64)
    held: list[int] = []

    def told(model: Any) -> list[float]:
        optimizer = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0, dynamic_growth_steps=2)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        held.append(len(model.weights))
        return [*history["loss"], float(optimizer.dynamic_scale), int(optimizer.iterations)]

    expected, found = both(with_layers_without_weights_at_the_end, told)
    if hvpipe.size() > 1 and hvpipe.rank() == hvpipe.size() - 1:
        assert held == [0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("build", [small, with_layers_without_weights_at_the_end])
def test_a_loss_scale_that_is_too_large_is_halved_and_the_step_skipped(build: Any) -> None:
    """All ranks skip it, including one without weights. Nothing but the scale changes."""
    x, y = batches(mlp, 24)

    def told(model: Any) -> list[float]:
        compile_as_all(model, keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**40))
        weights = model.get_weights()
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        for before, after in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_array_equal(before, after)
        assert float(model.optimizer.dynamic_scale) == 2.0**37
        return [*history["loss"], int(model.optimizer.iterations)]

    expected, found = both(functools.partial(in_float16, build), told)
    np.testing.assert_allclose(found, expected, rtol=5e-4)


class Idle(keras.layers.Layer):
    """Has a weight of the same shape as the next Dense layer's, and no gradient reaches it."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), initializer="ones")

    def call(self, x: Any) -> Any:
        return x


def with_idle_weights() -> keras.Model:
    rows = [layer for _ in range(4) for layer in (Idle(), keras.layers.Dense(12, activation="tanh"))]
    return keras.Sequential([keras.Input((12,)), *rows])


def without_weights_at_the_end() -> keras.Model:
    rest = [keras.layers.Activation("tanh") for _ in range(8)]
    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(12), *rest])


def with_idle_weights_alone_at_the_end() -> keras.Model:
    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(12), *(Idle() for _ in range(8))])


def averaging() -> Any:
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)


def accumulating() -> Any:
    return keras.optimizers.Nadam(0.01, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2)


@pytest.mark.parametrize(
    ("build", "optimizer"),
    [
        (without_weights_at_the_end, accumulating),
        (with_idle_weights, averaging),
        (with_idle_weights_alone_at_the_end, accumulating),
        (with_idle_weights_alone_at_the_end, averaging),
    ],
)
def test_weights_without_a_gradient_are_averaged_as_in_keras(build: Any, optimizer: Any) -> None:
    """At the end of fit, averages replace weights by their position. Every rank must count its steps."""
    x, y = batches(mlp, 40)

    def told(model: Any) -> list[float]:
        compile_as_all(model, optimizer())
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        outputs = model.predict(x, verbose=0).ravel()
        for layer in model.layers:
            if isinstance(layer, Idle):
                np.testing.assert_allclose(layer.kernel, 1, rtol=1e-6)
        return [*history["loss"], *outputs, int(model.optimizer.iterations)]

    expected, found = both(build, told)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def behind_a_stop() -> keras.Model:
    """Build layers that receive no gradient, because of a later layer or an output without a loss."""
    inputs = keras.Input((12,))
    x = inputs
    for _ in range(3):
        x = keras.layers.Dense(6, activation="tanh")(x)
    side = keras.layers.Dense(5, name="side")(x)
    for _ in range(3):
        x = keras.layers.Dense(6, activation="tanh")(keras.ops.stop_gradient(x))
    return keras.Model(inputs, {"main": keras.layers.Dense(4, name="main")(x), "side": side})


def decaying_weights() -> Any:
    return keras.optimizers.AdamW(0.01, weight_decay=0.9)


@pytest.mark.parametrize("options", [{}, {"stages": 1}, {"schedule": "zb-h1"}])
def test_weights_without_a_gradient_do_not_change_as_in_keras(options: dict[str, Any]) -> None:
    """This holds for any cut of the model. With a gradient of 0, the optimizer would decay the weights."""
    x, y = batches(mlp, 32)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def told(model: Any) -> list[float]:
        model.compile(decaying_weights(), {"main": loss})
        history = model.fit(x, {"main": y}, batch_size=8, shuffle=False, verbose=0).history
        outputs = model.predict(x, verbose=0)
        return [*history["loss"], *outputs["main"].ravel(), *outputs["side"].ravel()]

    expected, found = both(behind_a_stop, told, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_several_optimizers_are_refused() -> None:
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd()))
    with pytest.raises(HvpipeError, match=r"one optimizer for all layers.* optimizer=MultiOptimizer"):
        compile_as_all(hk.pipeline_parallel(small), several)


def is_last() -> bool:
    return hvpipe.rank() == hvpipe.size() - 1


def adam(rate: float = 0.001) -> Any:
    return keras.optimizers.Adam(rate)


def scaled_adam(rate: float = 0.001) -> Any:
    return keras.optimizers.LossScaleOptimizer(adam(rate))


def decaying(rate: float = 0.001) -> Any:
    return adam(keras.optimizers.schedules.ExponentialDecay(rate, 10, 0.5))


OTHERS_THAN_ADAM = {
    lambda: adam(0.5): r"learning_rate=0.001\d* on rank 0 and learning_rate=0.5",
    lambda: keras.optimizers.SGD(0.001): "optimizer=Adam on rank 0 and optimizer=SGD",
}


@pytest.mark.parametrize(
    ("optimizer", "others"),
    [
        (adam, OTHERS_THAN_ADAM),
        (scaled_adam, {lambda: scaled_adam(0.5): "'learning_rate': 0.5"}),
        (decaying, {lambda: decaying(0.5): "'initial_learning_rate': 0.5"}),
    ],
)
def test_optimizers_that_differ_by_rank_are_an_error(optimizer: Any, others: dict[Any, str]) -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank agrees with itself")
    x, y = batches(mlp, 8)
    if is_last():
        adam()  # advances Keras's numbering of optimizer names
    pipe = compile_as_all(hk.pipeline_parallel(small), optimizer())
    pipe.fit(x, y, batch_size=8, verbose=0)
    last = hvpipe.size() - 1
    for other, says in others.items():
        pipe = compile_as_all(hk.pipeline_parallel(small), (other if is_last() else optimizer)())
        with pytest.raises(MismatchError, match=rf"same optimizer on all ranks.* ({says}).* on rank {last}"):
            pipe.fit(x, y, batch_size=8, verbose=0)


def test_losses_that_differ_by_rank_are_an_error() -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank agrees with itself")
    x, y = batches(mlp, 8)
    pipe = hk.pipeline_parallel(small)
    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=odd) for odd in (True, False)]
    pipe.compile(sgd(), losses[is_last()])
    last = hvpipe.size() - 1
    with pytest.raises(MismatchError, match=rf"loss from_logits: True on rank 0 and False on rank {last}"):
        pipe.fit(x, y, batch_size=8, verbose=0)


def test_a_learning_rate_changed_on_one_rank_is_an_error() -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank agrees with itself")
    x, y = batches(mlp, 8)
    pipe = compile_as_all(hk.pipeline_parallel(small), sgd())
    lowers = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    last = hvpipe.size() - 1
    with pytest.raises(MismatchError, match=rf"Received: 0.1 on rank 0 and 0.05 on rank {last}"):
        pipe.fit(x, y, batch_size=8, verbose=0, callbacks=[lowers] if is_last() else [])
    assert hvpipe.allgather_object(hvpipe.rank()) == list(range(hvpipe.size()))


def test_clipping_over_all_stages_with_accumulation_is_refused() -> None:
    x, y = batches(mlp, 16)
    optimizer = keras.optimizers.SGD(0.1, global_clipnorm=1.0, gradient_accumulation_steps=2)
    pipe = compile_as_all(hk.pipeline_parallel(small), optimizer)
    with pytest.raises(HvpipeError, match="gradient_accumulation_steps=2"):
        pipe.fit(x, y, batch_size=8, verbose=0)


def without_loss_scaling(policy: str) -> Any:
    return hk.pipeline_parallel(small, microbatches=2, nonfinite=policy)


def test_steps_with_nan_are_skipped_on_all_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """Weights and step count are as if the batch had never been there."""
    x, y = batches(mlp, 32)
    spoilt = x.copy()
    spoilt[9, 3] = np.nan

    def trained(policy: str, x: Any, y: Any) -> Any:
        keras.utils.set_random_seed(5)
        pipe = compile_as_all(without_loss_scaling(policy), keras.optimizers.Adam(0.01))
        pipe.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        return pipe

    kept = np.r_[0:8, 16:32]
    found, ignoring = trained("skip", spoilt, y), trained("ignore", x[kept], y[kept])
    assert int(found.optimizer.iterations) == 3
    for mine, other in zip(found.get_weights(), ignoring.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    told = [r.getMessage() for r in caplog.records if "skipped step 2 on all ranks" in r.getMessage()]
    assert len(told) == (hvpipe.rank() == 0)
    first = r"gradients of sequential\S*/dense\S*/kernel and 7 other variables.* at step 2"
    with pytest.raises(HvpipeError, match=first):
        trained("raise", spoilt, y)
    ignoring.fit(spoilt, y, batch_size=8, shuffle=False, verbose=0)
    assert np.isnan(np.concatenate([w.ravel() for w in ignoring.get_weights()])).all()


def test_a_skipped_step_is_left_out_of_accumulated_gradients() -> None:
    """Regression: if it was the last of a round, the next update had the sums of two rounds."""
    x, y = batches(mlp, 32)
    spoilt = x.copy()
    spoilt[9, 3] = np.nan

    def trained(policy: str, x: Any, y: Any) -> Any:
        keras.utils.set_random_seed(5)
        pipe = compile_as_all(
            without_loss_scaling(policy), keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        )
        pipe.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        return pipe.get_weights()

    kept = np.r_[0:8, 16:32]
    for mine, other in zip(trained("skip", spoilt, y), trained("ignore", x[kept], y[kept]), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_policies_that_do_not_fit_are_refused() -> None:
    with pytest.raises(HvpipeError, match="Received: nonfinite='stop'"):
        without_loss_scaling("stop")
    with pytest.raises(HvpipeError, match="skips steps with NaN or Inf itself"):
        compile_as_all(without_loss_scaling("skip"), keras.optimizers.LossScaleOptimizer(sgd()))
