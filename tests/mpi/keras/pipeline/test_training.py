"""A pipeline trains like the undivided model, for any kind of model, schedule and number of ranks."""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError, PlanError
from hvpipe.keras.graph.deferred_build import variables_of
from hvpipe.keras.graph.layer_graph import LayerGraph, layer_graph
from hvpipe.keras.pipeline.layout import layout_of
from hvpipe.keras.profiling.estimate import estimate
from hvpipe.plan.greedy import partition
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import equal_cluster
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile
from pipelines import (
    BATCH,
    MODELS,
    batches,
    both,
    check_same,
    compile_as_all,
    mlp,
    pipelined,
    plain,
    sgd,
    spread,
    weights_here,
)
from training import by_rank_0

WITHIN = 1e-5
SCHEDULES = ("1f1b", "interleaved", "gpipe", "zb-h1")


@pytest.mark.every_size
@pytest.mark.quick
def test_trains_as_the_undivided_model() -> None:
    """The schedule is 1F1B. The next case covers the other models and schedules."""
    check_same(spread("mlp"), plain("mlp"), WITHIN)


@pytest.mark.every_size
@pytest.mark.older_tensorflow
@pytest.mark.parametrize(("number", "name"), list(enumerate(["mlp", "resnet", "unet", "transformer"])))
def test_models_and_schedules_in_turn(number: int, name: str) -> None:
    """Cover all pairs of model, schedule and number of ranks.

    Each of 1 to 4 ranks runs four of the triples.
    """
    schedule = SCHEDULES[(number + hvpipe.size()) % len(SCHEDULES)]
    check_same(spread(name, schedule), plain(name), WITHIN)


@pytest.mark.quick
def test_schedules_and_recompute_give_the_same_bits() -> None:
    """Schedules differ only in order and memory."""
    first = spread("mlp")
    x, y = batches(mlp)
    for options in ({"schedule": "gpipe"}, {"schedule": "zb-h1"}, {"recompute": True}, {"recompute": [0]}):
        keras.utils.set_random_seed(5)
        pipe = compile_as_all(hk.pipeline_parallel(mlp, microbatches=4, **options))
        history = pipe.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history
        assert history == first.history
        weights = weights_here(pipe, pipe.stages.graph)
        for number, value in first.weights.items():
            np.testing.assert_array_equal(weights[number], value, err_msg=f"{options} {number}")


def test_a_schedule_is_verified_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PlanError("a schedule that would hang")

    monkeypatch.setattr("hvpipe.keras.pipeline.layout.verify", refuse)
    pipe = compile_as_all(hk.pipeline_parallel(mlp, microbatches=4))
    with pytest.raises(PlanError, match="would hang"):
        pipe.train_on_batch(*batches(mlp, 8))
    assert int(pipe.optimizer.iterations) == 0


def test_ranks_compare_which_rank_has_which_stage() -> None:
    """Regression: the check did not notice the same stages on the ranks in another order."""
    graph = layer_graph(mlp())
    plan = partition(estimate(graph, samples=1), equal_cluster(2), 2)
    one, other = (layout_of(graph, plan, ranks).summary for ranks in ((0, 1), (1, 0)))
    assert one != other


def test_only_named_stages_recompute() -> None:
    """A stage without recomputation keeps more than its input for the backward."""
    x = keras.Input((6,))
    h = x
    for _ in range(2 * hvpipe.size()):
        h = keras.layers.Dense(6, "tanh")(h)
    pipe = hk.pipeline_parallel(
        keras.Model(x, h), stages=hvpipe.size(), microbatches=hvpipe.size(), recompute=[0]
    )
    pipe.compile("sgd", "mse")
    data = np.random.default_rng(0).normal(size=(4 * hvpipe.size(), 6)).astype(np.float32)
    pipe.fit(data, data, batch_size=len(data), verbose=0)
    (driver,) = pipe._drivers
    for stage, functions in driver.functions.items():
        wires = [tf.zeros((4, 6))] * len(functions.wires_in or [0])
        targets = [tf.zeros((4, 6))] * functions.has_loss
        _, kept = functions.training.forward([*wires, *targets])
        activations = [tensor for tensor in kept if tensor.shape == (4, 6)]
        assert (len(activations) <= len(wires) + len(targets)) is (stage == 0)


class Switched(keras.layers.Layer):
    """Takes one of two branches, depending on a weight."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x: Any) -> Any:
        return tf.cond(
            self.kernel[0, 0] > 0,
            lambda: tf.tanh(x @ self.kernel),
            lambda: x * tf.nn.sigmoid(x @ self.kernel),
        )


def loops_and_branches() -> keras.Model:
    layers = keras.layers
    inputs = keras.Input((4, 3))
    x = layers.SimpleRNN(4, return_sequences=True)(layers.Dense(4)(inputs))
    return keras.Model(inputs, layers.Dense(4)(Switched()(layers.SimpleRNN(4)(x))))


@pytest.mark.older_tensorflow
def test_loops_and_branches_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """graph/test_split_gradient.py tests recomputation and split backward one by one."""
    monkeypatch.setitem(MODELS, "loops_and_branches", loops_and_branches)
    found = pipelined("loops_and_branches", schedule="zb-h1", recompute=True)
    check_same(found, plain("loops_and_branches"), WITHIN)


def steps_as_samples() -> keras.Model:
    """Build a model in which any cut sends a tensor with more rows than samples."""
    layers, ops = keras.layers, keras.ops
    inputs = keras.Input((6, 3))
    x = ops.reshape(inputs, (-1, 3))
    for _ in range(4):
        x = layers.Dense(6, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(4)(layers.Flatten()(ops.reshape(x, (-1, 6, 6)))))


def test_steps_folded_into_samples_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "steps_as_samples", steps_as_samples)
    check_same(pipelined("steps_as_samples"), plain("steps_as_samples"), WITHIN)


def two_inputs() -> keras.Model:
    """Build a model that reads numbers in the first stage and a word in one of the last."""
    layers = keras.layers
    numbers, word = keras.Input((12,), name="numbers"), keras.Input((1,), dtype="int32", name="word")
    x = numbers
    for _ in range(6):
        x = layers.Dense(10, activation="tanh")(x)
    x = layers.Add()([x, layers.Flatten()(layers.Embedding(11, 10)(word))])
    return keras.Model({"word": word, "numbers": numbers}, layers.Dense(4)(x))


@pytest.mark.older_tensorflow
def test_named_inputs_reach_the_stages_that_read_them() -> None:
    x, y = batches(mlp)
    words = np.random.default_rng(4).integers(0, 11, (len(x), 1))

    def losses(model: Any) -> list[float]:
        compile_as_all(model)
        data = {"numbers": x, "word": words}  # the model lists the word first
        return list(model.fit(data, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"])

    expected, found = both(two_inputs, losses)
    np.testing.assert_allclose(found, expected, rtol=WITHIN)
    cuts = hk.pipeline_parallel(two_inputs).stages.cuts
    assert [len(cut.inputs) for cut in cuts if cut.inputs] == ([1, 1] if hvpipe.size() > 1 else [2])


@pytest.mark.every_size
def test_replicas_of_stages_train_alike() -> None:
    """Half as many stages as ranks, and one stage on all ranks but one."""
    size = hvpipe.size()
    if size == 1:
        pytest.skip("replicas are several ranks")
    replicas = (size - 1, 1) if size > 2 else (2,)
    check_same(pipelined("resnet", replicas=replicas), plain("resnet"), WITHIN)
    if size == 4:
        check_same(pipelined("mlp", stages=2), plain("mlp"), WITHIN)


@pytest.mark.parametrize("options", [{}, {"stages": 1}])
def test_double_precision_is_kept(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes weights that ranks share: a stage's replicas, or one layer in several stages."""
    monkeypatch.setitem(MODELS, "tied_in_doubles", tied)
    try:
        for set_dtype in (keras.config.set_floatx, keras.config.set_dtype_policy):
            set_dtype("float64")
        found = pipelined("tied_in_doubles", **options)
        check_same(found, plain("tied_in_doubles"), 1e-12)
    finally:
        for set_dtype in (keras.config.set_floatx, keras.config.set_dtype_policy):
            set_dtype("float32")


class Drops(keras.layers.Layer):
    """Dropout that records which entries of the last micro-batch's first sample remain."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)

    def build(self, shape: Any) -> None:
        self.left = self.add_weight(shape=shape[1:], trainable=False, initializer="zeros")
        super().build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        y = self.dropout(x, training=training)
        if training:
            self.left.assign(keras.ops.cast(y[0] != 0, "float32"))
        return y


def dropping() -> keras.Model:
    return keras.Sequential([keras.Input((64,)), Drops(), keras.layers.Dense(4)])


def left_by_replicas() -> list[list[float]]:
    """Return what every rank's Drops records after one step.

    One stage runs on all ranks, with a micro-batch each.
    """
    size = hvpipe.size()
    keras.utils.set_random_seed(5)
    pipe = compile_as_all(hk.pipeline_parallel(dropping, stages=1, microbatches=size))
    pipe.train_on_batch(np.ones((size, 64), np.float32), np.zeros(size, np.int32))
    (mine,) = (layer.left.numpy().tolist() for layer in pipe.layers if isinstance(layer, Drops))
    return hvpipe.allgather_object(mine)


def test_replicas_draw_their_own_random_numbers() -> None:
    """Every run draws the same numbers. The first replica draws those of the undivided model."""
    left = left_by_replicas()
    assert left == left_by_replicas()
    assert len({tuple(mask) for mask in left}) == hvpipe.size()
    keras.utils.set_random_seed(5)
    model = compile_as_all(dropping())
    model.train_on_batch(np.ones((1, 64), np.float32), np.zeros(1, np.int32))
    assert left[0] == model.layers[0].left.numpy().tolist()


class Scaled(keras.layers.Layer):
    """Has a scalar weight and a scalar statistic."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.largest.assign(tf.maximum(self.largest, tf.reduce_max(x)))
        return self.scale * x


def scaled() -> keras.Model:
    return keras.Sequential([keras.Input((12,)), Scaled(), keras.layers.Dense(4)])


def test_replicas_may_share_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "scaled", scaled)
    found, expected = pipelined("scaled", stages=1), plain("scaled")
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], rtol=WITHIN)
    np.testing.assert_allclose(found.prediction, expected.prediction, rtol=1e-4, atol=1e-6)


def normalised() -> keras.Model:
    return keras.Sequential([keras.Input((12,)), keras.layers.BatchNormalization(), keras.layers.Dense(4)])


def test_replicas_predict_the_same_after_training() -> None:
    """Each replica has taken statistics from its own micro-batches."""
    x, y = batches(mlp, 16)
    pipe = compile_as_all(hk.pipeline_parallel(normalised, stages=1, microbatches=4))
    pipe.train_on_batch(x * np.arange(16)[:, None], y)
    found = pipe.predict(np.repeat(x[:1], 8, axis=0), batch_size=8, verbose=0)
    np.testing.assert_allclose(found, np.repeat(found[:1], 8, axis=0), rtol=1e-6)


@pytest.mark.every_size
def test_batches_smaller_than_the_replicas_are_evaluated() -> None:
    """The last batch has a single sample."""
    x, y = batches(mlp, 9)

    def told(model: Any) -> tuple[np.ndarray, list[list[float]]]:
        compile_as_all(model)
        parts = (slice(0, 9), slice(8, 9))
        evaluated = [model.evaluate(x[part], y[part], batch_size=8, verbose=0) for part in parts]
        return model.predict(x, batch_size=8, verbose=0), evaluated

    expected, found = both(mlp, told, stages=1)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)


@pytest.mark.parametrize("shares", [pytest.param((), marks=pytest.mark.every_size), (0.7, 0.1)])
def test_batches_smaller_than_the_replicas_are_trained_on(shares: tuple[float, ...]) -> None:
    """In the last batches, one replica may get all samples.

    The others add nothing and get the same weights.
    """
    size = hvpipe.size()
    if size == 1:
        pytest.skip("replicas are several ranks")
    found = trained_on_few_samples(of_replicas(shares or (1.0,) * size))
    np.testing.assert_allclose(found, plain_on_few_samples(), rtol=1e-4, atol=1e-6)


def trained_on_few_samples(model: Any) -> list[float]:
    """Return losses, metrics and outputs. The last batches have 2 samples and 1."""
    compile_as_all(model, keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0))
    history = [
        model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0).history
        for x, y in (batches(mlp, 26), batches(mlp, 25))
    ]
    prediction = model.predict(batches(mlp, 8)[0], verbose=0).ravel()
    return [*(value for of in history for name in sorted(of) for value in of[name]), *prediction]


@functools.cache
def plain_on_few_samples() -> list[float]:
    def trained() -> list[float]:
        keras.utils.set_random_seed(5)
        return trained_on_few_samples(mlp())

    found: list[float] = by_rank_0(trained)
    return found


def of_replicas(shares: Sequence[float]) -> Any:
    """Build one stage on all ranks.

    It deals 24 micro-batches by `shares`; further ranks get the last share.
    """
    size = hvpipe.size()
    keras.utils.set_random_seed(5)
    profile = estimate(layer_graph(mlp()), samples=1)
    every = (*shares, *[shares[-1]] * (size - len(shares)))
    names = tuple(f"rank{rank}" for rank in range(size))
    plan = partition(profile, equal_cluster(1), 1, Pipelining("1f1b", 24))
    stages = (dataclasses.replace(plan.stages[0], devices=names, shares=every),)
    keras.utils.set_random_seed(5)
    return hk.pipeline_parallel(mlp, dataclasses.replace(plan, stages=stages))


def test_gradients_are_clipped_by_the_norm_over_all_stages() -> None:
    def plain_weights() -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        model = compile_as_all(mlp(), keras.optimizers.SGD(0.5, global_clipnorm=0.05))
        x, y = batches(mlp)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        weights: list[np.ndarray] = model.get_weights()
        return weights

    reference = by_rank_0(plain_weights)
    run = pipelined("mlp", keras.optimizers.SGD(0.5, global_clipnorm=0.05))
    for number, value in run.weights.items():
        np.testing.assert_allclose(value, reference[number], rtol=1e-4, atol=1e-6)


def tied() -> keras.Model:
    """Build a model with one layer in both the first and the last stage."""
    inputs = keras.Input((12,))
    shared = keras.layers.Dense(12, activation="tanh")
    x = shared(inputs)
    for _ in range(3):
        x = keras.layers.Dense(12, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(4)(shared(x)))


@pytest.mark.every_size
@pytest.mark.older_tensorflow
def test_a_layer_shared_by_stages_stays_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tied", tied)
    check_same(pipelined("tied"), plain("tied"), WITHIN)


def test_dropout_does_not_depend_on_the_cut() -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((12,))])
        for _ in range(4):
            model.add(keras.layers.Dense(10, activation="tanh"))
            model.add(keras.layers.Dropout(0.4))
        model.add(keras.layers.Dense(4))
        return model

    x, y = batches(mlp)

    def losses(**options: Any) -> list[float]:
        keras.utils.set_random_seed(5)
        pipe = compile_as_all(hk.pipeline_parallel(build, microbatches=4, **options))
        return list(pipe.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"])

    spread = losses()
    assert spread == losses(schedule="gpipe")
    # Other cuts round differently.
    assert losses(schedule="interleaved", chunks=2) == pytest.approx(spread, rel=1e-5)


def test_uneven_micro_batches_count_every_sample_once() -> None:
    """Batches of 10 samples in 4 micro-batches, and a last batch of 3."""
    x, y = batches(mlp, 33)

    def fit(model: Any) -> Any:
        return compile_as_all(model).fit(x, y, batch_size=10, shuffle=False, verbose=0).history

    whole, found = both(mlp, fit)
    np.testing.assert_allclose(found["loss"], whole["loss"], rtol=WITHIN)
    assert found["accuracy"] == pytest.approx(whole["accuracy"])


def test_no_rank_allocates_memory_for_other_stages() -> None:
    """Building a model of 720 MB grows peak memory only by this rank's share."""
    side = 1730  # 12 MB for each layer

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((side,))])
        for _ in range(60):
            model.add(keras.layers.Dense(side, use_bias=False))
        return model

    hk.pipeline_parallel(mlp)  # allocates what only the first pipeline needs
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before_mb = resident_mb("VmHWM")
    pipe = hk.pipeline_parallel(build)
    grown_mb = resident_mb("VmHWM") - before_mb
    layers = {id(layer) for stage in pipe.stage_numbers for layer in pipe.stages.layers(stage)}
    every = pipe.stages.graph.layers(range(len(pipe.stages.graph.calls)))
    for layer in every:
        here = [v._value is not None for v in variables_of([layer])]
        assert all(here) if id(layer) in layers else not any(here)
    # Initializers need more for a moment: up to 230 MB were seen.
    assert grown_mb > 0.9 * 12 * len(pipe.layers)
    if hvpipe.size() > 1:
        assert grown_mb < 0.9 * 720


def resident_mb(what: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{what}:\s+(\d+) kB", status)[1]) / 1e3  # type: ignore[index]


def unit_profile(graph: LayerGraph, cost_s: float = 1e-3) -> Profile:
    """Return a profile whose layers take equally long."""
    profile = estimate(graph, samples=1)
    layers = (dataclasses.replace(la, forward_s=cost_s, backward_s=2 * cost_s) for la in profile.layers)
    return dataclasses.replace(profile, layers=tuple(layers))


class Real(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return tf.math.real(x)


def with_complex_numbers() -> keras.Model:
    """Build a model with complex numbers between all layers but the first and the last."""
    inputs = keras.Input((12,))
    x = keras.ops.cast(keras.layers.Dense(12)(inputs), "complex64")
    for _ in range(8):
        x = x * x
    return keras.Model(inputs, keras.layers.Dense(4)(Real()(x)))


def test_complex_numbers_between_stages_are_refused() -> None:
    """No gradient would come back, so the layers before would silently stay unchanged."""
    profile = unit_profile(layer_graph(with_complex_numbers()))
    if hvpipe.size() == 1:
        hk.pipeline_parallel(with_complex_numbers, profile=profile)
        return
    with pytest.raises(
        HvpipeError, match=r"cannot send complex tensors to each other: .* Received: complex64 from multiply"
    ):
        hk.pipeline_parallel(with_complex_numbers, profile=profile)


@pytest.mark.every_size
def test_a_plan_decides_which_rank_runs_which_stage(tmp_path: Path) -> None:
    """The plan is made for this run's ranks, in its own order, and read from a file."""
    size = hvpipe.size()
    keras.utils.set_random_seed(5)
    profile = unit_profile(hk.pipeline_parallel(mlp).stages.graph)
    plan = partition(profile, equal_cluster(size), size, Pipelining("gpipe", 5))
    renamed = plan.to_json()
    for place, stage in enumerate(renamed["stages"]):
        stage["devices"] = [f"rank{size - 1 - place}"]
    file = tmp_path / "plan.json"
    type(plan).from_json(renamed).write(file)
    keras.utils.set_random_seed(5)
    pipe = compile_as_all(hk.pipeline_parallel(mlp, file))
    assert pipe.stage_numbers == (size - 1 - hvpipe.rank(),)
    x, y = batches(mlp)
    history = pipe.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], plain("mlp").history["loss"], rtol=WITHIN)


@pytest.mark.every_size
def test_a_placement_other_than_a_pipeline_runs_too() -> None:
    """The layers are dealt to all ranks in turn, as the baseline "round_robin" does."""
    size = hvpipe.size()
    keras.utils.set_random_seed(5)
    profile = unit_profile(hk.pipeline_parallel(mlp).stages.graph)
    places = [(f"rank{rank}", list(range(rank, len(profile.layers), size))) for rank in range(size)]
    cluster = equal_cluster(size)
    renamed = [(f"h{rank}", layers) for rank, (_, layers) in enumerate(places)]
    document = Plan.of(
        profile, cluster, [((d,), p) for d, p in renamed], Pipelining("gpipe", 1), "round_robin"
    ).to_json()
    for rank, stage in enumerate(document["stages"]):
        stage["devices"] = [f"rank{rank}"]
    keras.utils.set_random_seed(5)
    pipe = compile_as_all(hk.pipeline_parallel(mlp, Plan.from_json(document)))
    x, y = batches(mlp)
    history = pipe.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], plain("mlp").history["loss"], rtol=WITHIN)


class Subclassed(keras.Model):
    def call(self, inputs: Any) -> Any:
        return inputs


def of_a_fixed_batch() -> keras.Model:
    return keras.Sequential([keras.Input(batch_shape=(8, 12)), *(keras.layers.Dense(4) for _ in range(4))])


@pytest.mark.parametrize(
    ("build", "options", "says"),
    [
        (mlp, {"stages": 99}, r"stages should be .* Received: stages=99"),
        (mlp, {"stages": 0}, r"Received: stages=0"),
        (mlp, {"microbatches": 0}, r"microbatches"),
        (mlp, {"schedule": "2f2b"}, r"schedule should be one of"),
        (mlp, {"schedule": "interleaved", "chunks": 1}, r"chunks"),
        (
            mlp,
            {"schedule": "interleaved", "chunks": 50, "microbatches": 64},
            r"as many stages as layer calls",
        ),
        (mlp, {"replicas": (1, 98)}, r"replicas should be"),
        (mlp, {"replicas": ()}, r"replicas should be"),
        (Subclassed, {}, r"subclassed model into a function"),
        (lambda: None, {}, r"should return a Keras model"),
        (3, {}, r"needs a Keras model or a function"),
        (of_a_fixed_batch, {}, r"without batch_shape. Received: an input of shape \(8, 12\)"),
    ],
)
def test_bad_input_is_refused(build: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(HvpipeError, match=says):
        hk.pipeline_parallel(build, **options)


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "gpipe", "zb-h1"])
def test_one_micro_batch_on_every_rank_in_turn(schedule: str) -> None:
    """A model that needs the memory of several ranks may have room for one micro-batch only."""
    check_same(pipelined("mlp", schedule=schedule, microbatches=1), plain("mlp"), WITHIN)


def test_interleaved_stages_need_a_micro_batch_for_each_rank() -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank has a micro-batch")
    with pytest.raises(HvpipeError, match=rf"at most 2 for each micro-batch: {2 * (hvpipe.size() - 1)}\."):
        hk.pipeline_parallel(mlp, microbatches=hvpipe.size() - 1, schedule="interleaved")


def test_a_profile_or_plan_of_another_model_or_cluster_is_refused() -> None:
    other = Profile.of([LayerCost("a", 1, 2), LayerCost("b", 1, 2)], [("a", "b")], model="other")
    with pytest.raises(PlanError, match="profile should be of this model"):
        hk.pipeline_parallel(mlp, profile=other)
    plan = partition(other, equal_cluster(1), 1)
    if hvpipe.size() > 1:
        with pytest.raises(PlanError, match="should be the ranks of this run"):
            hk.pipeline_parallel(mlp, plan)
    document = plan.to_json()
    document["stages"][0]["devices"] = ["rank0"]
    with pytest.raises(PlanError, match="every rank a stage" if hvpipe.size() > 1 else "of this model"):
        hk.pipeline_parallel(mlp, type(plan).from_json(document))


def of_width(width: int, image: int = 6) -> keras.Model:
    layers = keras.layers
    inputs = keras.Input((image, image, 3))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(width, 3)(layers.Conv2D(width, 3)(inputs)))
    return keras.Model(inputs, layers.Dense(4)(x))


def test_a_profile_or_plan_of_other_sizes_is_refused() -> None:
    """Unnamed layers have the same names in both models."""
    own, other = (estimate(layer_graph(of_width(width)), samples=4) for width in (8, 16))
    size = hvpipe.size()
    pipe = hk.pipeline_parallel(functools.partial(of_width, 8), stages=1, profile=own)
    assert pipe.stage_numbers == (0,)
    with pytest.raises(PlanError, match=r"'conv2d' has 896 bytes of trained weights; .* it has 1792"):
        hk.pipeline_parallel(functools.partial(of_width, 8), stages=1, profile=other)
    with pytest.raises(PlanError, match=r"'conv2d' has 8192 bytes of output for 4 samples; .* has 2048"):
        hk.pipeline_parallel(functools.partial(of_width, 8, 10), stages=1, profile=own)
    scaled = own.at_batch(7)
    hk.pipeline_parallel(functools.partial(of_width, 8), stages=1, profile=scaled)
    plan = partition(other, equal_cluster(size), size)
    with pytest.raises(PlanError, match=r"plan should be of this model.* same names and other weights"):
        hk.pipeline_parallel(functools.partial(of_width, 8), plan)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"microbatches": 7}, "microbatches=7 and a plan with microbatches=5"),
        ({"schedule": "1f1b"}, "schedule='1f1b' and a plan with schedule='gpipe'"),
        ({"recompute": True}, "recompute=True and a plan with recompute=False"),
        ({"chunks": 3}, "chunks=3 and a plan with chunks=1"),
        ({"replicas": [9]}, r"replicas=\(9,\) and a plan with replicas=\("),
    ],
)
def test_options_that_contradict_a_plan_are_refused(options: dict[str, Any], says: str) -> None:
    size = hvpipe.size()
    profile = estimate(layer_graph(mlp()), samples=1)
    plan = partition(profile, equal_cluster(size), size, Pipelining("gpipe", 5))
    renamed = [dataclasses.replace(stage, devices=(f"rank{rank}",)) for rank, stage in enumerate(plan.stages)]
    plan = dataclasses.replace(plan, stages=tuple(renamed))
    with pytest.raises(HvpipeError, match=says):
        hk.pipeline_parallel(mlp, plan, **options)
    same = {"microbatches": 5, "schedule": "gpipe", "recompute": False, "replicas": (1,) * size}
    hk.pipeline_parallel(mlp, plan, **same, profile=profile, cluster=equal_cluster(size))
    with pytest.raises(PlanError, match="cluster should be the one that was planned for"):
        hk.pipeline_parallel(mlp, plan, cluster=equal_cluster(size, speeds=(0.5,)))


def test_a_call_of_the_whole_model_is_refused() -> None:
    pipe = hk.pipeline_parallel(mlp)
    with pytest.raises(HvpipeError, match="on all ranks together"):
        pipe(np.zeros((2, 12), np.float32))


def test_every_rank_has_its_own_optimizer_state() -> None:
    """Each rank has slots only for its own weights."""
    pipe = compile_as_all(hk.pipeline_parallel(mlp), sgd())
    x, y = batches(mlp)
    pipe.fit(x, y, batch_size=40, verbose=0)
    slots = [v for v in pipe.optimizer.variables if "momentum" in v.path]
    assert len(slots) == len(pipe.trainable_variables) < 10 // min(hvpipe.size(), 2) + 3
