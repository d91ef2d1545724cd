"""A model's graph of layer calls: nested models are opened, and each call of a shared layer counts."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
from hvpipe.errors import HvpipeError
from hvpipe.keras import compat
from hvpipe.keras.graph.layer_graph import LayerGraph, layer_graph
from hvpipe.keras.graph.stage import StageFunctions
from hvpipe.keras.graph.stage_cuts import cut_stages
from hvpipe.keras.pipeline.plan_choice import PipelineOptions, balanced, plan_for
from hvpipe.keras.pipeline.tensor_channel import TensorChannel
from hvpipe.plan.pipelining import DEFAULT_PIPELINING
from hvpipe.session import current
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile

pytestmark = pytest.mark.older_tensorflow
layers = keras.layers


def nested() -> keras.Model:
    """Build an inner model that is called twice, a shared layer, an operator, and a Sequential."""
    inner_inputs = keras.Input((8,))
    inner = keras.Model(inner_inputs, layers.Dense(8)(layers.Dropout(0.5)(inner_inputs)), name="inner")
    inputs = keras.Input((8,))
    shared = layers.Dense(8, name="shared")
    x = shared(inner(inner(shared(inputs)))) + inputs
    return keras.Model(inputs, keras.Sequential([keras.Input((8,)), layers.Dense(3)], name="head")(x))


def run(graph: LayerGraph, *inputs: Any) -> Any:
    """Run the graph call by call as a stage does, and return its first output."""
    known: dict[int, Any] = dict(zip(graph.inputs, map(keras.ops.convert_to_tensor, inputs), strict=True))
    mask_ends = graph.mask_ends()
    for index, call in enumerate(graph.calls):
        for number, _ in call.reads:
            if index > mask_ends.get(number, index):
                compat.set_keras_mask(known[number], None)
        for (number, _), value in zip(call.writes, call(known, training=False), strict=True):
            assert value.dtype.name == graph.tensors[number].dtype
            assert (compat.get_keras_mask(value) is None) == (graph.tensors[number].mask_shape is None), call
            known[number] = value
    return known[graph.outputs[0]]


def test_nested_models_are_opened_and_calls_counted() -> None:
    graph = layer_graph(nested())
    assert [call.name for call in graph.calls] == [
        "shared",
        "inner/dropout",
        "inner/dense",
        "inner/dropout#2",
        "inner/dense#2",
        "shared#2",
        "add",
        "head/dense",
    ]
    assert graph.edges() == [(i, i + 1) for i in range(7)]
    assert len(graph.layers(range(8))) == 4  # shared, dropout, dense, and the dense layer of the head


def test_names_do_not_depend_on_earlier_models() -> None:
    first = [call.name for call in layer_graph(nested()).calls]
    layers.Dense(3), layers.Dropout(0.1)
    assert [call.name for call in layer_graph(nested()).calls] == first


def test_running_the_calls_one_by_one_equals_the_model() -> None:
    model = nested()
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    np.testing.assert_allclose(run(layer_graph(model), x), model(x, training=False), atol=1e-6)


def of_bytes() -> keras.Model:
    """Build a model whose inputs are integers, with a nested model that takes floats."""
    image = keras.Input((6, 6, 1))
    base = keras.Model(image, layers.Conv2D(2, 3)(layers.ZeroPadding2D()(image)), name="base")
    inputs = keras.Input((6, 6, 1), dtype="uint8")
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(base(inputs)))


def in_half() -> keras.Model:
    """Build layers that compute in float16, with a nested model that adds to its input in float32."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        middle = keras.Input((4,))
        base = keras.Model(middle, middle + layers.Dense(4, dtype="float32")(middle), name="base")
        inputs = keras.Input((4,))
        return keras.Model(inputs, base(layers.Dense(4)(inputs)))
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("build", [of_bytes, in_half])
def test_inputs_of_a_nested_model_are_cast_as_in_keras(build: Any) -> None:
    model = build()
    graph = layer_graph(model)
    assert "base/cast" in [call.name for call in graph.calls]
    x = np.random.default_rng(0).integers(0, 9, (2, *model.input_shape[1:])).astype(model.inputs[0].dtype)
    found, expected = run(graph, x), model(x, training=False)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, atol=1e-6)


def on_any_image() -> keras.Model:
    """Build a nested model that leaves image sizes open, like those of keras.applications."""
    image = keras.Input((None, None, 3))
    base = keras.Model(image, layers.Conv2D(2, 3, name="conv")(layers.ZeroPadding2D()(image)), name="base")
    inputs = keras.Input((8, 6, 3))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(base(inputs))))


def test_a_nested_model_with_open_sizes_is_opened() -> None:
    model = on_any_image()
    graph = layer_graph(model)
    assert [call.name for call in graph.calls][:2] == ["base/zero_padding2d", "base/conv"]
    assert [spec.shape for spec in graph.tensors][:3] == [(None, 8, 6, 3), (None, 10, 8, 3), (None, 8, 6, 2)]
    x = np.random.default_rng(0).normal(size=(2, 8, 6, 3)).astype(np.float32)
    np.testing.assert_allclose(run(graph, x), model(x, training=False), atol=1e-6)


def embedded(*, masked: bool = True) -> tuple[Any, Any]:
    tokens = keras.Input((4,), dtype="int32")
    return tokens, layers.Embedding(5, 3, mask_zero=masked)(tokens)


def of_two(kind: str) -> keras.Model:
    """Build a nested model of two inputs, which tell them apart, called as `kind` says."""
    a, z = keras.Input((4, 3), name="a"), keras.Input((4, 3), name="z")
    structure = {"z": z, "a": a} if kind == "dict" else (z, a) if kind == "tuple" else [z, a]
    inner = keras.Model(structure, layers.LSTM(2)(layers.Dense(3)(z) - a), name="inner")
    (one, x), (two, y) = embedded(masked="masked" in kind), embedded(masked="masked" in kind)
    given = {"a": y, "z": x} if kind in ("dict", "list by names") else (x, y) if kind == "tuple" else [x, y]
    return keras.Model([one, two], inner(inputs=given) if kind == "by keyword" else inner(given))


class Attends(layers.Layer):
    """Attention inside an own layer, which deletes the mask of what the layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True
        self.inner = layers.MultiHeadAttention(1, 2)

    def build(self, shape: Any) -> None:
        self.inner.build(shape, shape)
        super().build(shape)

    def call(self, x: Any) -> Any:
        return x + self.inner(x, x)


def decoder() -> keras.Model:
    """Build an encoder, and blocks inside blocks that read its masked output again and again."""
    (source, of_source), (target, x) = embedded(), embedded()
    inputs = keras.Input((4, 3))
    encoder = keras.Model(inputs, layers.LSTM(3, return_sequences=True)(inputs), name="encoder")
    memory, state = keras.Input((4, 3), name="memory"), keras.Input((4, 3), name="state")
    attention = layers.MultiHeadAttention(1, 2)(state, memory) + layers.Dense(3)(state)
    block = keras.Model({"memory": memory, "state": state}, attention, name="block")
    pair = [keras.Input((4, 3)), keras.Input((4, 3))]
    two = keras.Model(
        pair, block({"memory": pair[0], "state": block({"memory": pair[1], "state": pair[0]})}), name="two"
    )
    encoded = encoder(of_source)
    x = two([encoded, block({"memory": Attends()(encoded), "state": x})])
    return keras.Model([source, target], layers.Concatenate()([f(2)(y) for f, y in after(x, encoded)]))


def after(*tensors: Any) -> list[Any]:
    """Pair tensors with layers whose outputs show whether these have a mask."""
    return [(layers.GRU, x) for x in tensors]


def given_a_mask(dtype: str = "float32") -> keras.Model:
    """Build a nested model that is called with a mask, or casts what has one, inside another."""
    inputs, outer = keras.Input((4, 3), dtype=dtype), keras.Input((4, 3))
    inner = keras.Model(inputs, layers.LSTM(2, return_sequences=True, dtype=dtype)(inputs), name="inner")
    middle = keras.Model(outer, inner(outer), name="middle")
    if dtype != "float32":
        tokens, x = embedded()
        return keras.Model(tokens, layers.Concatenate()([f(2)(y) for f, y in after(middle(x), x)]))
    mask = keras.Input((4,), dtype="bool")
    return keras.Model(
        [outer, mask], layers.Concatenate()([f(2)(y) for f, y in after(middle(outer, mask=mask), outer)])
    )


KINDS = ("list", "tuple", "dict", "list by names", "by keyword", "masked list")


@pytest.mark.filterwarnings("ignore:Layer .* does not support masking:UserWarning")
@pytest.mark.parametrize(
    "build",
    [
        *(functools.partial(of_two, kind) for kind in KINDS),
        decoder,
        given_a_mask,
        functools.partial(given_a_mask, "float16"),
    ],
)
def test_nested_models_of_any_structure_and_mask_are_opened(build: Any) -> None:
    """Regression guard: a model of two inputs stayed whole, on one rank."""
    model = build()
    graph = layer_graph(model)
    assert not graph.whole
    assert not [call.name for call in graph.calls if isinstance(call.operation, keras.Model)]
    rng = np.random.default_rng(0)
    inputs = [
        rng.normal(size=(2, 4, 3))
        if "float" in x.dtype
        else np.sort(rng.integers(0, 2, (2, 4)))[:, ::-1].copy()
        for x in model.inputs
    ]
    inputs = [values.astype(x.dtype) for values, x in zip(inputs, model.inputs, strict=True)]
    expected = model(inputs if len(inputs) > 1 else inputs[0], training=False)
    np.testing.assert_allclose(run(graph, *inputs), expected, rtol=1e-5, atol=1e-6)


def test_an_error_names_a_nested_model_that_cannot_be_opened() -> None:
    inputs = keras.Input((4, 1))
    inner = keras.Model(inputs, layers.Dense(3)(layers.Dense(3)(inputs)), name="inner")
    outer = keras.Input((4,))
    graph = layer_graph(keras.Model(outer, inner(layers.Dense(4)(outer))))
    options = PipelineOptions(1, (hvpipe.size(),), schedule="interleaved", chunks=9)
    with pytest.raises(
        HvpipeError, match=r"2 \('inner' is a nested model that stays whole: its input .*\(None, 4\)"
    ):
        plan_for(current(), graph, options)


def test_a_tensor_whose_dtype_differs_from_keras_spec_is_refused() -> None:
    """Otherwise receivers would read its bytes as the dtype that Keras declares."""
    inputs = keras.Input((), dtype="int32")
    x = layers.RepeatVector(3, name="repeat")(layers.Reshape((1,), dtype="int32")(inputs))
    stages = cut_stages(layer_graph(keras.Model(inputs, layers.Embedding(5, 2)(x))), [[0, 1], [2]])
    with pytest.raises(
        HvpipeError, match=r"spec of repeat is float32: .*dtype='int32'.* Received: int32 from repeat"
    ):
        StageFunctions(stages, 0, targets=(), loss=None).prediction(tf.zeros(2, tf.int32))


def test_a_message_of_another_dtype_is_refused() -> None:
    with pytest.raises(HvpipeError, match=r"gives, float32. Received: the wire: dtype=float16"):
        TensorChannel(current()).send(0, tf.zeros(2, tf.float16), "float32", (2,), "the wire")


class Block(layers.Layer):
    """As usual in Keras 3, its `call` does not pass the training mode on.

    The layers inside find it themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.norm = layers.Dropout(0.5, seed=3), layers.BatchNormalization()

    def call(self, x: Any) -> Any:
        return self.norm(self.dropout(x))


@pytest.mark.parametrize("training", [False, True])
def test_the_training_mode_reaches_inner_layers(training: bool) -> None:
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    found = []
    for by_calls in (False, True):
        model = keras.Sequential([keras.Input((8,)), Block()])
        (call,), graph = layer_graph(model).calls, layer_graph(model)
        if by_calls:
            outputs = call({graph.inputs[0]: keras.ops.convert_to_tensor(x)}, training=training)[0]
        else:
            outputs = model(x, training=training)
        found.append((np.asarray(outputs), np.asarray(model.layers[0].norm.moving_variance)))
    np.testing.assert_allclose(found[1][0], found[0][0], atol=1e-6)
    np.testing.assert_allclose(found[1][1], found[0][1], atol=1e-6)
    assert (found[1][1][0] != 1) == training


def folding() -> keras.Model:
    """Build a model that folds the steps of a sequence into samples for one layer."""
    inputs = keras.Input((6, 3))
    steps = layers.Dense(4)(keras.ops.reshape(inputs, (-1, 3)))
    return keras.Model(inputs, keras.ops.reshape(steps, (-1, 6, 4)) + 1)


def test_tensors_without_a_sample_axis_are_marked() -> None:
    graph = layer_graph(folding())
    found = [(spec.shape, spec.of_samples) for spec in graph.tensors]
    sequence = (None, 6, 4)
    assert found[:3] == [((None, 6, 3), True), ((None, 3), False), ((None, 4), False)]
    assert found[3:] == [(sequence, True), (sequence, True)]


def skipping() -> keras.Model:
    """Build a model whose last layer uses the first layer's output."""
    inputs = keras.Input((4,))
    a = layers.Dense(4, name="a")(inputs)
    b = layers.Dense(4, name="b")(a)
    c = layers.Dense(4, name="c")(b)
    return keras.Model(inputs, {"sum": layers.Add(name="sum")([a, c]), "early": b})


def test_a_skip_connection_goes_straight_to_its_user() -> None:
    stages = cut_stages(layer_graph(skipping()), [[0], [1], [2], [3]])
    assert stages.dataflow.edges == ((0, 1), (0, 3), (1, 2), (1, 3), (2, 3))
    assert [cut.inputs for cut in stages.cuts] == [(0,), (), (), ()]
    assert stages.cuts[0].sends[1] == stages.cuts[0].sends[3] == stages.cuts[0].outputs


def test_stages_must_be_whole_and_in_order() -> None:
    graph = layer_graph(skipping())
    with pytest.raises(HvpipeError, match="each of 4 layer calls once"):
        cut_stages(graph, [[0], [1], [2]])
    with pytest.raises(HvpipeError, match="reads from b of stage 1"):
        cut_stages(graph, [[0, 2], [1], [3]])


def test_a_subclassed_model_is_told_how_to_become_functional() -> None:
    class Own(keras.Model):
        def call(self, inputs: Any) -> Any:
            return inputs

    with pytest.raises(HvpipeError, match=r"Turn a subclassed model into a function.*Received: Own"):
        layer_graph(Own())
    with pytest.raises(HvpipeError, match=r"begins with keras.Input"):
        layer_graph(keras.Sequential([layers.Dense(3)]))


class Doubling(keras.Sequential):
    def call(self, inputs: Any, **options: Any) -> Any:
        return 2 * super().call(inputs, **options)


def test_a_sequential_with_its_own_call_is_not_opened() -> None:
    inner = Doubling([keras.Input((4,)), layers.Dense(3)], name="doubling")
    with pytest.raises(HvpipeError, match=r"Turn a subclassed model into a function.*Received: Doubling"):
        layer_graph(inner)
    inputs = keras.Input((4,))
    graph = layer_graph(keras.Model(inputs, layers.Dense(2, name="last")(inner(inputs))))
    assert [call.name for call in graph.calls] == ["doubling", "last"]


@pytest.mark.parametrize(("replicas", "layers_of"), [((3, 1), (6, 2)), ((1, 3), (2, 6)), ((2, 2), (4, 4))])
def test_a_stage_on_more_ranks_gets_more_of_the_model(
    replicas: tuple[int, int], layers_of: tuple[int, int]
) -> None:
    equal = tuple(LayerCost(f"layer{n}", 1.0, 2.0, 0, 0, 0, 0) for n in range(8))
    plan = balanced(Profile(equal, tuple((n, n + 1) for n in range(7))), replicas, DEFAULT_PIPELINING)
    assert tuple(len(stage.layers) for stage in plan.stages) == layers_of
