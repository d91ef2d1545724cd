"""A pipeline trains like the undivided model, for any kind of model, schedule and number of ranks."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import PlanError
from hvpipe.keras.graph.deferred_build import variables_of
from hvpipe.keras.graph.layer_graph import layer_graph
from hvpipe.keras.pipeline.layout import layout_of
from hvpipe.keras.pipeline.same_pipeline import described
from hvpipe.keras.profiling.estimate import estimate
from hvpipe.plan.greedy import partition
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import equal_cluster
from pipelines import (
    BATCH,
    MODELS,
    WITHIN,
    batches,
    both,
    check_same,
    compile_as_all,
    mlp,
    pipelined,
    plain,
    sgd,
    spread,
    unit_profile,
    weights_here,
)

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
    one, other = (described(layout_of(graph, plan, ranks)) for ranks in ((0, 1), (1, 0)))
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
    """Build a nested model that reads numbers in the first stage and a word in one of the last."""
    layers = keras.layers

    def named() -> dict[str, Any]:
        return {
            "word": keras.Input((1,), dtype="int32", name="word"),
            "numbers": keras.Input((12,), name="numbers"),
        }

    inner, outer = named(), named()
    numbers, word = inner["numbers"], inner["word"]
    x = numbers
    for _ in range(6):
        x = layers.Dense(10, activation="tanh")(x)
    x = layers.Add()([x, layers.Flatten()(layers.Embedding(11, 10)(word))])
    return keras.Model(outer, layers.Dense(4)(keras.Model(inner, x)(outer)))


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


def tied() -> keras.Model:
    """Build a model with one layer in both the first and the last stage."""
    inputs = keras.Input((12,))
    shared = keras.layers.Dense(12, activation="tanh")
    x = shared(inputs)
    for _ in range(3):
        x = keras.layers.Dense(12, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(4)(shared(x)))


@pytest.mark.three_suffice
@pytest.mark.every_size
@pytest.mark.older_tensorflow
def test_a_layer_shared_by_stages_stays_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tied", tied)
    check_same(pipelined("tied"), plain("tied"), WITHIN)


def normalising_twice() -> keras.Model:
    """Build a model whose stages share a BatchNormalization, also inside a nested model."""
    inputs, inner = keras.Input((12,)), keras.Input((12,))
    shared = keras.layers.BatchNormalization(momentum=0.7, name="shared")
    nested = keras.Model(inner, shared(keras.layers.Dense(12)(shared(inner))))
    x = nested(inputs)
    for _ in range(3):
        x = shared(keras.layers.Dense(12, activation="relu")(x))
    return keras.Model(inputs, keras.layers.Dense(4)(x))


@pytest.mark.three_suffice
@pytest.mark.every_size
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_the_averages_of_a_shared_batch_normalization_move_as_in_keras(schedule: str) -> None:
    """Regression guard: each stage's copy saw its own calls only, and ended half way."""
    x, y = batches(mlp, 24)

    def moved(model: Any) -> list[float]:
        compile_as_all(model, keras.optimizers.SGD(0.0))
        if hasattr(model, "stages"):
            model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
        else:  # one micro-batch after the other
            for part in np.split(x, 6):
                model(part, training=True)
        layer = next((la for la in model.layers if la.name == "shared"), None)
        return [] if layer is None else np.ravel([layer.moving_mean, layer.moving_variance]).tolist()

    expected, found = both(normalising_twice, moved, microbatches=3, schedule=schedule)
    if found:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class Encoder(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (keras.layers.Dense(12, kernel_regularizer="l2") for _ in range(2))

    def build(self, shape: Any) -> None:
        self.body.build(shape)
        self.head.build(shape)

    def call(self, x: Any) -> Any:
        return self.head(keras.ops.tanh(self.body(x)))


def partly_frozen() -> keras.Model:
    """Build frozen layers, in each of which one layer is trained."""
    encoders = [Encoder() for _ in range(3)]
    model = keras.Sequential([keras.Input((12,)), *encoders, keras.layers.Dense(4)])
    for encoder in encoders:
        encoder.trainable = False
        encoder.head.trainable = True
    return model


def test_a_layer_inside_a_frozen_one_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a stage asked its layers, but Keras asks the model, which asks each variable."""
    monkeypatch.setitem(MODELS, "partly_frozen", partly_frozen)
    check_same(pipelined("partly_frozen"), plain("partly_frozen"), WITHIN)


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


@pytest.mark.three_suffice
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


@pytest.mark.three_suffice
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


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_one_micro_batch_on_every_rank_in_turn(schedule: str) -> None:
    """A model that needs the memory of several ranks may have room for one micro-batch only."""
    check_same(pipelined("mlp", schedule=schedule, microbatches=1), plain("mlp"), WITHIN)


def test_every_rank_has_its_own_optimizer_state() -> None:
    """Each rank has slots only for its own weights."""
    pipe = compile_as_all(hk.pipeline_parallel(mlp), sgd())
    x, y = batches(mlp)
    pipe.fit(x, y, batch_size=40, verbose=0)
    slots = [v for v in pipe.optimizer.variables if "momentum" in v.path]
    assert len(slots) == len(pipe.trainable_variables) < 10 // min(hvpipe.size(), 2) + 3
