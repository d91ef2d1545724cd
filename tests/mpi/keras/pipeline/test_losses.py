"""Losses and metrics of a pipeline equal those of the undivided model."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest

import hvpipe
import hvpipe.keras as hk
import hvpipe.keras.graph.activity_losses
from hvpipe.errors import HvpipeError
from pipelines import batches, both, mlp, sgd

layers = keras.layers
History = dict[str, list[float]]


def one_output() -> keras.Model:
    return keras.Sequential(
        [keras.Input((12,)), *(layers.Dense(4, activation="tanh") for _ in range(3)), layers.Dense(1)]
    )


def two_outputs() -> keras.Model:
    """Build two outputs whose names do not sort in the order of the outputs."""
    inputs = keras.Input((12,))
    x = layers.Dense(4)(layers.Dense(4, activation="tanh")(inputs))
    return keras.Model(inputs, [layers.Dense(1, name="z")(x), layers.Dense(1, name="a")(x)])


def told(
    build: Any, fit: Any, layout: dict[str, Any] | None = None, **compiled: Any
) -> tuple[History, History]:
    """Return the histories of the undivided model and of its pipeline."""

    def history(model: Any) -> Any:
        model.compile(keras.optimizers.SGD(0.01), **compiled)
        return fit(model)

    return both(build, history, **(layout or {}))


def check_equal(found: tuple[History, History]) -> None:
    assert found[0].keys() == found[1].keys()
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-5, atol=1e-6, err_msg=name)


class Hidden(layers.Layer):
    """Embeds tokens. Its output has a mask, of which Keras hears only when the layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Embedding(20, 6, mask_zero=True)

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        return self.inner(x)


def masked_when_run(kind: str) -> keras.Model:
    """Build a model whose second half reads a mask that its description does not have."""
    tokens = keras.Input((7,), dtype="int32")
    if kind == "nested model":
        inner = keras.Input((7, 6))
        nested = keras.Model(inner, layers.Dense(6)(layers.GRU(6, return_sequences=True)(inner)))
        x = nested(layers.Embedding(20, 6, mask_zero=True)(tokens))
    else:
        x = layers.Dense(6)(Hidden()(tokens))
    x = layers.LSTM(6, return_sequences=True)(x)
    return keras.Model(tokens, layers.Dense(4)(layers.Dense(6, activation="tanh")(x)))


@pytest.mark.filterwarnings("ignore:Layer .* does not support masking")  # its inner layers do
@pytest.mark.parametrize("kind", ["nested model", "own layer"])
def test_masks_that_layers_make_when_they_run(kind: str) -> None:
    numbers = np.random.default_rng(5)
    x = numbers.integers(1, 20, (24, 7)) * (np.arange(7) < numbers.integers(1, 8, 24)[:, None])
    y = numbers.integers(0, 4, (24, 7))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def fit(model: Any) -> Any:
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
        return history | {"outputs": model.predict(x, batch_size=8, verbose=0).ravel().tolist()}

    check_equal(told(functools.partial(masked_when_run, kind), fit, {"microbatches": 4}, loss=loss))


def early_masked_output() -> keras.Model:
    """Build a model whose first output, which has a mask, is made by an early layer."""
    tokens = keras.Input((7,), dtype="int32")
    early = layers.Dense(4, name="early")(layers.Embedding(20, 6, mask_zero=True)(tokens))
    x = layers.Dense(6, activation="tanh")(layers.Dense(6)(layers.LSTM(6)(early)))
    return keras.Model(tokens, [early, layers.Dense(4, name="late")(x)])


def test_an_early_output_with_a_mask() -> None:
    """Regression: only the last stage looked for its mask, among tensors that it makes itself."""
    numbers = np.random.default_rng(5)
    x = numbers.integers(1, 20, (24, 7)) * (np.arange(7) < numbers.integers(1, 8, 24)[:, None])
    y = [numbers.integers(0, 4, (24, 7)), numbers.integers(0, 4, 24)]
    loss = [keras.losses.SparseCategoricalCrossentropy(from_logits=True) for _ in y]

    def fit(model: Any) -> Any:
        return model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history

    check_equal(told(early_masked_output, fit, {"microbatches": 4}, loss=loss))


def test_a_sum_loss_covers_the_whole_batch() -> None:
    x, _ = batches(mlp, 21)
    y = x[:, :1]

    def fit(model: Any) -> Any:
        options = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(x, y, sample_weight=np.linspace(0, 1, 21), validation_data=(x, y), **options).history

    check_equal(told(one_output, fit, loss=keras.losses.MeanSquaredError(reduction="sum")))


class Folded(keras.losses.Loss):
    """Compares outputs whose first axis has samples and time with targets of samples."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean((keras.ops.reshape(y_true, (-1, 1)) - y_pred) ** 2, axis=-1)


def folded() -> keras.Model:
    dense = [layers.Dense(4, activation="tanh") for _ in range(3)]
    return keras.Sequential([keras.Input((12,)), *dense, FoldsTime()])


class FoldsTime(layers.Layer):
    def call(self, x: Any) -> Any:
        return keras.ops.reshape(x, (-1, 1))


def test_a_sum_over_outputs_with_time_in_their_first_axis() -> None:
    """Regression: the loss was divided by the length of time."""
    x, _ = batches(mlp, 21)

    def fit(model: Any) -> Any:
        return model.fit(x, x[:, :4], batch_size=7, epochs=2, shuffle=False, verbose=0).history

    check_equal(told(folded, fit, loss=Folded(reduction="sum")))


@pytest.mark.parametrize("reduction", [None, "mean_with_sample_weight"])
def test_a_reduction_that_micro_batches_cannot_compute_is_refused(reduction: str | None) -> None:
    pipe = hk.pipeline_parallel(one_output)
    with pytest.raises(HvpipeError, match=f"mean_squared_error with reduction={reduction!r}"):
        pipe.compile(sgd(), keras.losses.MeanSquaredError(reduction=reduction))


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (keras.losses.Dice(), r"pass axis=\(1, 2, 3\).* Received: dice with axis=None"),
        (keras.losses.Tversky(axis=(0, 1)), r"Received: tversky with axis=\(0, 1\)"),
        (keras.losses.Circle(), r"with each other. Received: circle"),
        ("dice", r"Received: dice with axis=None"),
        ([keras.losses.tversky], r"Received: tversky with axis=None"),
    ],
)
def test_a_loss_other_than_a_mean_over_samples_is_refused(loss: Any, says: str) -> None:
    pipe = hk.pipeline_parallel(one_output)
    with pytest.raises(HvpipeError, match=f"should be a mean over samples. .*{says}"):
        pipe.compile(sgd(), loss)


def test_a_ratio_for_each_sample_is_a_mean_over_samples() -> None:
    x, _ = batches(mlp, 21)

    def fit(model: Any) -> Any:
        return model.fit(x, x[:, :1] ** 2, batch_size=7, epochs=2, shuffle=False, verbose=0).history

    check_equal(told(one_output, fit, loss=keras.losses.Dice(axis=-1)))


def test_targets_are_needed_for_a_loss() -> None:
    x, _ = batches(mlp, 8)
    pipe = hk.pipeline_parallel(one_output)
    pipe.compile(sgd(), "mse")
    with pytest.raises(HvpipeError, match="compiled with a loss, so it needs targets"):
        pipe.fit(x, batch_size=8, verbose=0)


class Penalty(layers.Layer):
    """Returns its input. In training, it adds a loss if `weight` is not 0."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def call(self, x: Any, training: bool = False) -> Any:
        if training and self.weight:
            self.add_loss(self.weight * keras.ops.mean(x**2))
        return x


def with_penalty(weight: float, **options: Any) -> keras.Model:
    dense = [layers.Dense(4, activation="tanh", **options) for _ in range(3)]
    return keras.Sequential([keras.Input((12,)), dense[0], Penalty(weight), *dense[1:], layers.Dense(1)])


class Penalties(layers.Layer):
    """Adds a loss for each sample, one for each entry, one for each channel, and one for all."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.05 * keras.ops.reshape(x, (-1,)) ** 2)
        self.add_loss(0.1 * keras.ops.mean(x**2, axis=-1))
        self.add_loss(0.2 * keras.ops.mean(x**2, axis=0))
        self.add_loss(0.3 * keras.ops.mean(x**2))
        return x


def with_penalties() -> keras.Model:
    dense = [layers.Dense(4, activation="tanh") for _ in range(3)]
    return keras.Sequential([keras.Input((12,)), dense[0], Penalties(), *dense[1:], layers.Dense(1)])


@pytest.mark.older_tensorflow
def test_losses_added_by_layers_are_summed_as_in_keras() -> None:
    """Batches of 7 samples in 4 micro-batches. Losses of samples are summed, the others averaged."""
    x, _ = batches(mlp, 21)

    def fit(model: Any) -> Any:
        options = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(x, x[:, :1], validation_data=(x[:7], x[:7, :1]), **options).history

    check_equal(told(with_penalties, fit, loss="mse"))


class SumOverSamples(keras.regularizers.Regularizer):
    """Mimics a Keras version that does not divide an activity regularizer by the number of samples."""

    def __call__(self, x: Any) -> Any:
        return 0.01 * keras.ops.sum(x**2) * keras.ops.cast(keras.ops.shape(x)[0], "float32")


def test_activity_losses_if_keras_sums_over_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = batches(mlp, 21)
    monkeypatch.setattr(hvpipe.keras.graph.activity_losses, "_keras_divides_activities", lambda: False)
    build = functools.partial(with_penalty, 0.0, activity_regularizer=SumOverSamples())

    def fit(model: Any) -> Any:
        options = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(x, x[:, :1], validation_data=(x[:7], x[:7, :1]), **options).history

    check_equal(told(build, fit, loss="mse"))


def test_training_without_any_loss_is_refused() -> None:
    """Without the error, training would silently change nothing.

    The second model's layer may add a loss, but does not.
    """
    x, _ = batches(mlp, 8)
    for build in (one_output, functools.partial(with_penalty, 0.0)):
        pipe = hk.pipeline_parallel(build)
        pipe.compile(sgd(), metrics=["mae"])
        with pytest.raises(HvpipeError, match=r"compile\(loss=\.\.\.\).* Received: loss=None, and no layer"):
            pipe.fit(x, x[:, :1], batch_size=8, verbose=0)


@pytest.mark.parametrize(
    "build",
    [
        functools.partial(with_penalty, 0.0, activity_regularizer="l2"),
        functools.partial(with_penalty, 0.0, kernel_regularizer="l2"),
    ],
)
def test_a_loss_of_the_layers_is_enough(build: Any) -> None:
    x, _ = batches(mlp, 16)

    def fit(model: Any) -> Any:
        history = model.fit(x, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        return {**history, "outputs": model.predict(x, verbose=0)}

    check_equal(told(build, fit))


def test_a_metric_may_have_a_value_for_each_class() -> None:
    x, y = batches(mlp, 16)

    def evaluate(model: Any) -> Any:
        return model.evaluate(x, keras.utils.to_categorical(y, 4), verbose=0, return_dict=True)

    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    check_equal(told(mlp, evaluate, loss=loss, metrics=[keras.metrics.F1Score(), "accuracy"]))


def test_targets_may_have_another_structure_in_validation() -> None:
    x, _ = batches(mlp, 16)
    z, a = x[:, :1], 3 * x[:, 1:2]

    def fit(model: Any) -> Any:
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        return model.fit(x, {"z": z, "a": a}, validation_data=(x, [z, a]), **options).history

    check_equal(told(two_outputs, fit, loss="mse"))


class Moments(keras.metrics.Metric):
    """Returns two numbers. Their names sort before and after those of other metrics."""

    def __init__(self) -> None:
        super().__init__(name="moments")
        self.count, self.total, self.squares = (
            self.add_weight(name=name, initializer="zeros") for name in "cts"
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        ops = keras.ops
        self.count.assign_add(ops.cast(ops.size(y_pred), "float32"))
        self.total.assign_add(ops.sum(y_pred))
        self.squares.assign_add(ops.sum(y_pred**2))

    def result(self) -> dict[str, Any]:
        return {"square": self.squares / self.count, "a_mean": self.total / self.count}


def test_a_metric_may_give_several_numbers() -> None:
    x, _ = batches(mlp, 16)
    y = x[:, :1]

    def fit(model: Any) -> Any:
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, validation_data=(x[:8], y[:8]), **options).history
        assert {"a_mean", "square", "val_a_mean", "val_square"} <= history.keys()
        return {**history, "evaluation": model.evaluate(x, y, verbose=0)}

    metrics = [keras.metrics.MeanSquaredError("zeta"), Moments(), "mae"]
    check_equal(told(one_output, fit, loss="mse", metrics=metrics))


def test_the_losses_of_several_outputs_are_reported_as_in_keras() -> None:
    """Batches of 10 samples in 4 micro-batches."""
    x, _ = batches(mlp, 20)

    def fit(model: Any) -> Any:
        options = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(x, [x[:, :1], 3 * x[:, 1:2]], **options).history

    losses = ["mse", keras.losses.MeanSquaredError(reduction="sum")]
    check_equal(told(two_outputs, fit, loss=losses, loss_weights=[0.5, 0.1]))


# Masks ------------------------------------------------------------------------------------------------------


def tagger() -> keras.Model:
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True)(tokens)
    return keras.Model(tokens, layers.Dense(4)(layers.Dense(4, activation="tanh")(x)))


def masked_floats() -> keras.Model:
    """Build two outputs, only one of which has a mask. A loop in another stage reads that mask, too."""
    inputs = keras.Input((6, 3))
    x = layers.LSTM(4, return_sequences=True)(layers.Masking()(inputs))
    pooled = layers.Dense(6, name="pooled")(layers.GlobalAveragePooling1D()(layers.Dense(4)(x)))
    return keras.Model(inputs, [pooled, layers.Dense(4, name="steps")(x)])


def unmasked() -> keras.Model:
    inputs = keras.Input((6, 1))
    return keras.Model(inputs, layers.Dense(4)(layers.Dense(4, activation="tanh")(layers.Dense(4)(inputs))))


def tokens() -> tuple[Any, Any]:
    """Return sequences of unequal length, shorter ones first, and labels."""
    rng = np.random.default_rng(1)
    x, y = rng.integers(1, 9, (20, 6)), rng.integers(0, 4, (20, 6))
    x[:8, 2:] = 0
    x[8, 1:] = 0
    return x, y


CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def trained(x: Any, y: Any, **options: Any) -> Any:
    """Return a function that fits a model on this data and returns its losses and outputs."""

    def fit(model: Any) -> Any:
        history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0, **options).history
        outputs = keras.tree.flatten(model.predict(x, verbose=0))
        return {**history, **{f"output {i}": value for i, value in enumerate(outputs)}}

    return fit


@pytest.mark.older_tensorflow
def test_a_masked_loss_covers_the_whole_batch() -> None:
    x, y = tokens()
    weights = np.linspace(0, 1, 120).reshape(20, 6)
    fit = trained(x, y, validation_data=(x[:10], y[:10]), sample_weight=weights)
    check_equal(told(tagger, fit, loss=CROSSENTROPY, metrics=["accuracy"]))


@pytest.mark.parametrize("merge", [layers.Add, layers.Multiply])
def test_attention_deletes_the_masks_that_it_reads(merge: Any) -> None:
    """Regression: the mask was missing where a stage sent it, or was there again in a later stage."""

    def attention() -> keras.Model:
        inputs = keras.Input((6,), dtype="int32")
        x = layers.Embedding(9, 16, mask_zero=True)(inputs)
        y = layers.Dense(16)(merge()([x, layers.MultiHeadAttention(2, 8)(x, x)]))
        return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(layers.Dense(16)(y))))

    x, y = tokens()
    check_equal(told(attention, trained(x, y[:, 0]), loss=CROSSENTROPY))


class Decoder(layers.Layer):
    """Attends to a memory, and so deletes the memory's mask for all that read it later."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.out = layers.MultiHeadAttention(2, 8), layers.Dense(16)

    def build(self, shapes: Any) -> None:
        self.cross.build(*shapes)
        self.out.build(shapes[0])

    def call(self, inputs: Any) -> Any:
        x, memory = inputs
        return self.out(x + self.cross(x, memory))


@pytest.mark.filterwarnings("ignore:Layer .* does not support masking")  # it reads a mask
def test_attention_inside_a_layer_deletes_masks_too() -> None:
    """Regression: a layer in a later stage still got the mask."""

    def decoders() -> keras.Model:
        tokens = keras.Input((6,), dtype="int32")
        memory = layers.Embedding(9, 16, mask_zero=True)(tokens)
        x = layers.Embedding(9, 16)(tokens)
        for _ in range(4):
            x = Decoder()([x, memory])
        return keras.Model(tokens, layers.Dense(4)(layers.Flatten()(x)))

    x, y = tokens()
    check_equal(told(decoders, trained(x, y[:, 0]), loss=CROSSENTROPY))


def test_attention_deletes_the_mask_of_an_output() -> None:
    """Regression: the rank that counts the entries of masked losses ended with a ValueError."""

    def build() -> keras.Model:
        inputs = keras.Input((6,), dtype="int32")
        x = layers.Dense(16, name="early")(layers.Embedding(9, 16, mask_zero=True)(inputs))
        return keras.Model(inputs, [x, layers.Dense(4, name="late")(layers.MultiHeadAttention(2, 8)(x, x))])

    x, y = tokens()
    check_equal(told(build, trained(x, [y, y]), loss=[CROSSENTROPY, CROSSENTROPY]))


def test_losses_of_several_outputs_on_replicas() -> None:
    """Regression: replicas counted by samples, and each batch counts as much as its micro-batches do."""
    x, _ = batches(mlp, 25)

    def two() -> keras.Model:
        inputs = keras.Input((12,))
        return keras.Model(inputs, {name: layers.Dense(1, name=name)(inputs) for name in "pq"})

    y = {"p": x[:, :1] ** 2, "q": x[:, 1:2]}
    found = []
    # In a graph: eagerly, Keras weighs the losses of batches by their sizes.
    for make in (two, lambda: hk.pipeline_parallel(two, stages=1, microbatches=hvpipe.size() + 2)):
        keras.utils.set_random_seed(5)
        model = make()
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics={"p": "mae"})
        found.append(trained(x, y, validation_data=(x, y))(model))
    check_equal((found[0], found[1]))


def test_each_output_has_its_own_mask() -> None:
    x, y = tokens()
    inputs = np.where(x[..., None] == 0, 0, np.stack([x, x - 3, 0.1 * y], -1)).astype("float32")
    fit = trained(inputs, {"pooled": x / 9, "steps": y})
    check_equal(told(masked_floats, fit, loss={"steps": CROSSENTROPY, "pooled": "mse"}))


@pytest.mark.parametrize("build", [tagger, unmasked])
def test_an_ignored_class_counts_for_nothing(build: Any) -> None:
    """The class is ignored alone and together with a mask. One micro-batch has only ignored entries."""
    x, y = tokens()
    y[10:13] = -1
    inputs = x if build is tagger else x[..., None].astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    check_equal(told(build, trained(inputs, y), loss=loss))


def test_a_mask_computed_from_weights_is_counted_in_each_micro_batch() -> None:
    """The mask is not known before the layers below it have run."""

    def build() -> keras.Model:
        inputs = keras.Input((6, 3))
        x = layers.Masking()(layers.ReLU()(layers.Dense(2)(inputs)))
        return keras.Model(inputs, layers.Dense(4)(layers.Dense(4, activation="tanh")(x)))

    inputs = np.random.default_rng(2).normal(size=(20, 6, 3)).astype("float32")
    plain, parts = told(build, trained(inputs, tokens()[1]), loss=CROSSENTROPY)
    np.testing.assert_allclose(parts["loss"], plain["loss"], rtol=0.1)
