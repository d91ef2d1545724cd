"""Measured profiles: names, sizes worked out by hand, times, and what a measurement leaves unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe.keras as hk
import hvpipe.keras.profiling.timed_spans
from hvpipe.errors import HvpipeError
from hvpipe.keras.graph.layer_graph import layer_graph
from hvpipe.keras.profiling.estimate import estimate
from hvpipe.keras.profiling.layer_timer import LayerTimer
from hvpipe.keras.profiling.noise import RankNoise, noise_of
from hvpipe.keras.profiling.stopwatch import Stopwatch, TimedCall
from hvpipe.keras.profiling.timed_stage import TimedStage
from hvpipe.plan.greedy import partition
from hvpipe.specs.cluster import equal_cluster
from hvpipe.specs.layer_cost import LayerCost, OutputTensor
from hvpipe.specs.profile import Profile


def sizes(layer: LayerCost) -> tuple[int, int, int, int]:
    return layer.weight_bytes, layer.slot_bytes, layer.output_bytes, layer.saved_bytes


def perceptron() -> keras.Model:
    """Build 6 numbers -> 8, relu -> 4, with a skip connection around the second Dense."""
    x = keras.Input((6,), name="numbers")
    h = keras.layers.Dense(8, name="up")(x)
    h = keras.layers.ReLU(name="relu")(h)
    y = keras.layers.Dense(8, name="across")(h)
    y = keras.layers.Add(name="add")([y, h])
    return keras.Model(x, keras.layers.Dense(4, use_bias=False, name="down")(y), name="perceptron")


def heavy() -> keras.Model:
    x = keras.Input((64, 64, 3))
    h = keras.layers.Conv2D(32, 5, activation="relu", name="conv")(x)
    return keras.Model(x, keras.layers.Conv2D(8, 5, name="conv_again")(h), name="heavy")


def noisy() -> keras.Model:
    """Build a model whose forward in training mode changes statistics and a seed's state."""
    x = keras.Input((5,))
    h = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(5, name="dense")(x))
    return keras.Model(x, keras.layers.Dropout(0.5, name="drop")(h))


def batch_of(shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def too_short(stopwatch: Stopwatch, several: list[TimedCall]) -> list[float]:
    """Replace in_turn_s: timed spans take 0 s, so they do not correct the layers' own times."""
    return [0.0] * len(several)


def test_names_edges_and_sizes() -> None:
    """Floats have 4 bytes, there are 3 samples, and Adam has two slots.

    Layers save little beyond their outputs.
    """
    profile = hk.measure(perceptron(), batch_of((3, 6)), repeats=1)
    assert (profile.model, profile.batch_size) == ("perceptron", 3)
    assert [layer.name for layer in profile.layers] == ["up", "relu", "across", "add", "down"]
    assert profile.edges == ((0, 1), (1, 2), (1, 3), (2, 3), (3, 4))
    up, across, down = 4 * (6 * 8 + 8), 4 * (8 * 8 + 8), 4 * 8 * 4
    wide, narrow = 4 * 3 * 8, 4 * 3 * 4
    assert [sizes(layer)[:3] for layer in profile.layers] == [
        (up, 2 * up, wide),
        (0, 0, wide),
        (across, 2 * across, wide),
        (0, 0, wide),
        (down, 2 * down, narrow),
    ]
    for layer in profile.layers:
        # Besides its output, a layer keeps only a few integers for its shape.
        assert layer.output_bytes <= layer.saved_bytes <= layer.output_bytes + 64


def test_saved_bytes_are_counted_once_and_without_the_input() -> None:
    """softmax keeps its output, and gelu an intermediate result of the same size.

    A reshape keeps nothing new.
    """
    x = keras.Input((32,))
    h = keras.layers.Dense(1000, activation="gelu", name="gelu")(x)
    h = keras.layers.Reshape((10, 100), name="reshape")(h)
    model = keras.Model(x, keras.layers.Softmax(name="softmax")(h))
    gelu, reshape, softmax = hk.measure(model, batch_of((8, 32)), repeats=1).layers
    wide = 4 * 8 * 1000
    assert gelu.output_bytes == reshape.output_bytes == softmax.output_bytes == wide
    assert gelu.saved_bytes >= 2 * wide
    assert reshape.saved_bytes < 100
    assert wide <= softmax.saved_bytes < wide + 100


def test_a_loop_keeps_the_states_of_its_steps() -> None:
    """The loop keeps at least the new state of each of its 50 steps: 8 samples of 16 floats."""
    x = keras.Input((50, 4))
    model = keras.Model(x, keras.layers.LSTM(16, name="lstm")(x))
    (lstm,) = hk.measure(model, batch_of((8, 50, 4)), repeats=1).layers
    assert lstm.output_bytes == 4 * 8 * 16
    assert lstm.saved_bytes > 50 * lstm.output_bytes


def test_times_of_large_layers() -> None:
    layers = hk.measure(heavy(), batch_of((8, 64, 64, 3)), repeats=3).layers
    for layer in layers:
        assert 1e-5 < layer.forward_s < 10
        assert 1e-5 < layer.backward_s < 10
    # The second layer, with its backward, has some 7 times the multiplications of the first layer's forward.
    assert layers[1].compute_s > layers[0].forward_s


def test_the_fixed_time_follows_from_a_quarter_of_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def times_s(self: Any, timed: TimedStage) -> tuple[float, float]:
        samples, *_, channels = timed.inputs[0].shape
        return (samples**2, 0.0) if channels == 3 else (1.0 + samples, 2.0 + 3.0 * samples)

    monkeypatch.setattr(LayerTimer, "_times_s", times_s)
    monkeypatch.setattr(Stopwatch, "in_turn_s", too_short)
    first, second = hk.measure(heavy(), batch_of((8, 64, 64, 3))).layers
    assert (second.forward_s, second.backward_s) == (9, 26)
    assert (second.fixed_forward_s, second.fixed_backward_s) == pytest.approx((1, 2))
    # The line through 2 and 8 samples would fall below 0 at 0 samples.
    assert (first.fixed_forward_s, first.fixed_backward_s) == (0, 0)
    (alone, _) = hk.measure(heavy(), batch_of((1, 64, 64, 3))).layers
    assert (alone.forward_s, alone.fixed_forward_s) == (1, 0)


@pytest.mark.parametrize(
    ("limit_bytes", "runs"),
    [
        (1 << 30, [["up", "relu"], ["across", "add"], ["down"]]),
        (1, [["up"], ["relu"], ["across"], ["add"], ["down"]]),
    ],
    ids=["by time", "by memory"],
)
def test_layers_add_up_to_their_runs(
    limit_bytes: int, runs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timed alone, each layer takes 1 s forward and 2 s backward.

    The timed spans, all forwards first, take 10, 20, ... s in turn. Two updates are timed before them.
    """
    counts = []

    def in_turn_s(stopwatch: Stopwatch, several: list[TimedCall]) -> list[float]:
        counts.append(len(several))
        return [10.0 * (i + 1) for i in range(len(several))]

    monkeypatch.setattr(LayerTimer, "_times_s", lambda self, work: (1.0, 2.0))
    monkeypatch.setattr(Stopwatch, "in_turn_s", in_turn_s)
    monkeypatch.setattr(hvpipe.keras.profiling.timed_spans, "_SPANS", 3)
    monkeypatch.setattr(hvpipe.keras.profiling.timed_spans, "_AT_A_TIME_BYTES", limit_bytes)
    profile = hk.measure(perceptron, batch_of((3, 6)))
    assert [layer.name for layer in profile.layers] == [name for names in runs for name in names]
    forwards = [sum(profile.layers[profile.place(name)].forward_s for name in names) for names in runs]
    backwards = [sum(profile.layers[profile.place(name)].backward_s for name in names) for names in runs]
    if limit_bytes == 1:
        # The spans are timed one by one, each with its backward.
        assert counts[2:] == [2] * 5
        assert (forwards, backwards) == (pytest.approx([10] * 5), pytest.approx([20] * 5))
    else:
        assert counts[2:] == [6]
        assert forwards == pytest.approx([10, 20, 30])
        assert backwards == pytest.approx([60, 50, 40])


def test_the_share_of_a_backward_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's backward is only for weights, and a layer without weights has no such part.

    For other layers it is the rest.
    """
    x = keras.Input((8,))
    h = keras.layers.ReLU(name="relu")(keras.layers.Dense(8, name="first")(x))
    model = keras.Model(x, keras.layers.Dense(8, name="second")(h))
    monkeypatch.setattr(LayerTimer, "_times_s", lambda self, work: (1.0, 4.0))
    monkeypatch.setattr(Stopwatch, "time_s", lambda *_: 3.0)
    monkeypatch.setattr(Stopwatch, "in_turn_s", too_short)
    layers = hk.measure(model, batch_of((4, 8)), repeats=1).layers
    assert [layer.weight_share for layer in layers] == [1, 0, 0.25]


def test_update_times_are_linear_in_variables_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is 2 s for each variable and 1 s for each byte.

    16 small variables take 32 s, and one of 1 KiB takes 1026 s.
    """
    times = iter([32.0, 1026.0])

    def in_turn_s(stopwatch: Stopwatch, several: list[TimedCall]) -> list[float]:
        return [next(times, 0.0) for _ in several]

    monkeypatch.setattr(Stopwatch, "in_turn_s", in_turn_s)
    x = keras.Input((20,))
    model = keras.Model(x, keras.layers.Dense(12, name="dense")(keras.layers.ReLU(name="relu")(x)))
    relu, dense = hk.measure(model, batch_of((2, 20)), repeats=1).layers
    assert relu.update_s == 0
    assert dense.weight_bytes == 4 * (20 * 12 + 12)
    assert dense.update_s == pytest.approx(2 * 2 + dense.weight_bytes)


def test_updates_of_a_real_optimizer_take_time() -> None:
    x = keras.Input((200,))
    model = keras.Model(x, keras.layers.Dense(2000)(x))
    layers = hk.measure(model, batch_of((2, 200)), repeats=2, optimizer="sgd").layers
    assert 1e-6 < layers[0].update_s < 10


def test_a_layer_without_a_gradient_has_no_backward() -> None:
    x = keras.Input((5,), dtype="int32")
    model = keras.Model(x, keras.layers.Embedding(7, 3, name="embed")(x + 1))
    profile = hk.measure(model, np.full((4, 5), 2), repeats=2)
    adding, embed = profile.layers
    assert adding.backward_s == 0
    assert embed.weight_bytes == 4 * 7 * 3
    assert embed.output_bytes == 4 * 4 * 5 * 3


def test_tensors_for_different_users_and_without_gradients() -> None:
    """The sequence has 3 samples x 5 steps x 4 units, the state 3 x 4 and the token 3 x 5, 4 bytes each."""
    tokens = keras.Input((5,), dtype="int32", name="tokens")
    again = keras.layers.Reshape((5,), dtype="int32", name="again")(tokens)
    h = keras.layers.Embedding(9, 2, name="embed")(again)
    sequence, state, _ = keras.layers.LSTM(4, return_sequences=True, return_state=True, name="lstm")(h)
    y = keras.layers.Dense(1, name="of_sequence")(sequence), keras.layers.Dense(1, name="of_state")(state)
    batch = np.zeros((3, 5), np.int32)
    model = keras.Model(tokens, y)
    for profile in (hk.measure(model, batch, repeats=1), estimate(layer_graph(model), 3)):
        layers = {layer.name: layer for layer in profile.layers}
        assert (layers["again"].output_bytes, layers["again"].gradient_bytes) == (60, 0)
        assert layers["embed"].gradient_bytes is None
    measured = hk.measure(model, batch, repeats=1)
    (lstm,) = (layer for layer in measured.layers if layer.name == "lstm")
    assert lstm.tensors == (OutputTensor(240, ("of_sequence",)), OutputTensor(48, ("of_state",)))


def test_an_estimate_counts_what_frozen_layers_compute() -> None:
    """Regression: a plan gave nearly all frozen layers to one rank, as if they cost nothing."""
    first, middle, last = (keras.layers.Dense(64, name=name) for name in ("first", "middle", "last"))
    x = keras.Input((64,))
    model = keras.Model(x, last(middle(first(x))))
    first.trainable = middle.trainable = last.trainable = False
    middle.kernel.trainable = True  # Keras asks each variable
    layers = estimate(layer_graph(model), 8).layers
    assert [(layer.weight_bytes, layer.slot_bytes) for layer in layers][1] == (
        4 * 64 * 64,
        4 * (2 * 64 * 64 + 64),
    )
    assert len({layer.forward_s for layer in layers}) == 1
    assert [layer.backward_s / layer.forward_s for layer in layers] == [0, 2, 1]


def test_masks_are_part_of_the_output() -> None:
    x = keras.Input((5,), dtype="int32")
    h = keras.layers.Embedding(7, 3, mask_zero=True, name="embed")(x)
    model = keras.Model(x, keras.layers.LSTM(2, name="lstm")(h))
    profile = hk.measure(model, np.ones((4, 5)), repeats=1)
    assert profile.layers[profile.place("embed")].output_bytes == 4 * 4 * 5 * 3 + 4 * 5


class Halving(keras.layers.Layer):
    """Changes its trainable weight in every call."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x: Any) -> Any:
        self.scale.assign(self.scale / 2)
        return x * self.scale


def normalised_weights() -> keras.Model:
    x = keras.Input((5,))
    dense = keras.layers.SpectralNormalization(keras.layers.Dense(5))
    return keras.Model(x, Halving()(dense(x)))


@pytest.mark.parametrize("build", [noisy, normalised_weights])
def test_the_model_is_left_as_it_was(build: Callable[[], keras.Model]) -> None:
    model = build()
    model.compile("adam", "mse")
    before = [np.array(v.value) for v in model.variables]
    hk.measure(model, (batch_of((6, 5)), None), repeats=2)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.value, value, err_msg=variable.path)
    model.fit(batch_of((6, 5)), batch_of((6, 5)), verbose=0)


def test_weights_of_a_functions_model_take_no_memory() -> None:
    made = []

    def build() -> keras.Model:
        made.append(noisy())
        return made[-1]

    profile = hk.measure(build, batch_of((6, 5)), repeats=1)
    (model,) = made
    assert model.variables
    assert all(variable._value is None for variable in model.variables)
    assert [layer.name for layer in profile.layers] == ["dense", "norm", "drop"]
    # After a second measurement, the variables can still get their initial values.
    assert hk.measure(lambda: model, batch_of((6, 5)), repeats=1).fingerprint == profile.fingerprint
    for variable in model.variables:
        variable._deferred_initialize()
    assert np.ptp(np.asarray(model.layers[1].kernel)) > 0


def test_equal_layers_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count(1)
    monkeypatch.setattr(Stopwatch, "time_s", lambda *_: float(next(count)))
    monkeypatch.setattr(Stopwatch, "in_turn_s", too_short)
    x = keras.Input((8,))
    h = keras.layers.Dense(8, name="a")(x)  # its input has no gradient
    for name in "bc":
        h = keras.layers.Dense(8, name=name)(h)
    h = keras.layers.Dense(8, activation="tanh", name="d")(h)
    layers = hk.measure(keras.Model(x, h), batch_of((4, 8)), repeats=1).layers
    times = [(layer.forward_s, layer.backward_s) for layer in layers]
    assert times[1] == times[2]
    assert len(set(times)) == 3


@pytest.mark.older_tensorflow
def test_slots_depend_on_the_optimizer() -> None:
    """Without one, Adam's two count: see test_names_edges_and_sizes."""
    momentum = keras.optimizers.SGD(momentum=0.9)
    for layer in hk.measure(perceptron(), batch_of((2, 6)), repeats=1, optimizer=momentum).layers:
        assert layer.slot_bytes == layer.weight_bytes


def compiled() -> keras.Model:
    model = perceptron()
    model.compile(keras.optimizers.RMSprop(momentum=0.9, centered=True), "mse")
    return model


def test_slots_of_a_compiled_models_optimizer_which_stays_unbuilt() -> None:
    """Regression guard: a function that compiles its model was refused."""
    model = compiled()
    for given in (model, compiled):
        profile = hk.measure(given, batch_of((2, 6)), repeats=1)
        assert profile.layers[0].slot_bytes == 3 * profile.layers[0].weight_bytes
    assert not model.optimizer.built


def test_a_measurement_says_how_steady_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression guard: times on a busy machine were off by seven times, and nothing said so."""
    times_s = iter([9.0, 9.0, 9.0, 9.0, 1.0, 1.0, 1.5, 1.5, 2.0, 3.0, 0.0, 0.0, *[0.01] * 5])
    monkeypatch.setattr(Stopwatch, "_once_s", lambda self, call: next(times_s))
    monkeypatch.setattr(Stopwatch, "_time_empty_s", lambda self, timed: 0.0)
    stopwatch, call = Stopwatch(3), TimedCall(lambda: None, 0, 0)
    assert stopwatch.in_turn_s([call, call]) == [1.5, pytest.approx(5.5 / 3)]
    assert stopwatch.spread == 1.0  # turns of 2, 3 and 5 seconds
    stopwatch.in_turn_s([call])
    assert stopwatch.spread == 1.0  # a short call says less
    quiet = [
        RankNoise("a", 4, 0.1, 1.0, 0.5),
        RankNoise("a", 4, 0.05, 0.8, 0.5),
        RankNoise("b", 2, 0.0, 1.0, None),
    ]
    noise = noise_of(quiet)
    assert noise.to_line() == "  equal runs differ by 10%; other processes took 5% of the cores of a"
    assert noise.warning() is None
    busy = noise_of([*quiet, RankNoise("c", 2, 0.0, 1.0, 0.9)]).warning()
    assert "40% of the cores of c" in str(busy)
    unsteady = noise_of([RankNoise("a", 4, 0.3, None, None)]).warning()
    assert "differ by 30%" in str(unsteady)


def test_frozen_weights_take_memory_without_gradients_and_slots() -> None:
    model = perceptron()
    model.get_layer("across").trainable = False
    across = hk.measure(model, batch_of((2, 6)), repeats=1).layers[2]
    assert (across.weight_bytes, across.slot_bytes) == (0, 4 * (8 * 8 + 8))
    assert across.state_bytes == across.slot_bytes


def test_frozen_weights_of_several_calls_count_once() -> None:
    """Regression: each call had its own, so a stage with several of them needed too much memory."""
    dense = keras.layers.Dense(8, trainable=False)
    x = keras.Input((8,))
    profile = hk.measure(keras.Model(x, dense(dense(x))), batch_of((2, 8)), repeats=1)
    assert [layer.weights_of for layer in profile.layers] == [None, profile.layers[0].name]
    assert sum(layer.state_bytes for layer in profile.once([0, 1])) == 4 * (8 * 8 + 8)


def test_a_profile_can_be_saved_read_and_planned(tmp_path: Path) -> None:
    profile = hk.measure(perceptron, batch_of((3, 6)), repeats=1)
    profile.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == profile
    plan = partition(profile, equal_cluster(2), stages=2)
    names = [name for stage in plan.stages for name in stage.layers]
    assert names == [call.name for call in layer_graph(perceptron()).calls]
    # An estimate and a measurement describe the same model, so the plan fits both.
    plan.check(profile=estimate(layer_graph(perceptron()), samples=3))


def test_several_inputs_by_name() -> None:
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b", dtype="int32")
    model = keras.Model([a, b], keras.layers.Add()([a, keras.layers.Embedding(5, 1)(b)[:, :, 0]]))
    given = {"b": np.ones((2, 3), np.int32), "a": np.ones((2, 3), np.float32)}
    assert hk.measure(model, given, repeats=1).batch_size == 2
    assert hk.measure(model, ([given["a"], given["b"]], None), repeats=1).batch_size == 2


class Subclassed(keras.Model):
    def call(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("model", "batch", "options", "says"),
    [
        (perceptron, np.ones((2, 7)), {}, r"float32\[None, 6\].*Received: ndarray of shapes \[\(2, 7\)\]"),
        (perceptron, [np.ones((2, 6)), np.ones((2, 6))], {}, "batch should be inputs for the model"),
        (perceptron, {"other": np.ones((2, 6))}, {}, "batch should be inputs.*Received: dict of shapes"),
        (perceptron, np.ones((0, 6)), {}, "at least 1"),
        (perceptron, None, {}, "batch should be inputs"),
        (perceptron, np.ones((2, 6)), {"repeats": 0}, "Received: repeats=0"),
        (perceptron, np.ones((2, 6)), {"optimizer": "nothing"}, "Received: optimizer='nothing'"),
        ("perceptron", np.ones((2, 6)), {}, "needs a Keras model, or a function.*Received: str"),
        (lambda: 3, np.ones((2, 6)), {}, "should return a Keras model. Received: int"),
        (lambda: Subclassed(), np.ones((2, 6)), {}, "Turn a subclassed model into a function"),
    ],
    ids=["shape", "count", "names", "empty", "none", "repeats", "optimizer", "text", "number", "subclass"],
)
def test_bad_input(model: Callable[[], Any], batch: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(HvpipeError, match=says):
        hk.measure(model, batch, **options)


def test_a_progress_bar_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hk.measure(perceptron, batch_of((2, 6)), repeats=1)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    hk.measure(perceptron, batch_of((2, 6)), repeats=1, progress=False)
    assert capsys.readouterr().out == ""
    hk.measure(perceptron, batch_of((2, 6)), repeats=1)
    assert "5/5" in capsys.readouterr().out


def test_many_layers_are_measured_without_tensorflows_warnings(caplog: pytest.LogCaptureFixture) -> None:
    tf.get_logger().propagate = True
    x = keras.Input((4,))
    h = x
    for units in range(4, 16):
        h = keras.layers.Dense(units)(h)
    try:
        hk.measure(keras.Model(x, h), batch_of((2, 4)), repeats=1)
    finally:
        tf.get_logger().propagate = False
    assert "retracing" not in caplog.text
