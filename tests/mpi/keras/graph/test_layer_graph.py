"""A model's graph of layer calls: nested models are opened, and each call of a shared layer counts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
from hvpipe.errors import HvpipeError
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


def run(graph: LayerGraph, x: Any) -> Any:
    """Run the graph call by call and return its first output."""
    known: dict[int, Any] = {graph.inputs[0]: keras.ops.convert_to_tensor(x)}
    for call in graph.calls:
        for (number, _), value in zip(call.writes, call(known, training=False), strict=True):
            assert value.dtype.name == graph.tensors[number].dtype
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


@pytest.mark.filterwarnings("ignore:Layer 'inner'.* does not support masking:UserWarning")
def test_an_error_names_a_nested_model_that_cannot_be_opened() -> None:
    tokens = keras.Input((4,), dtype="int32")
    inputs = keras.Input((4, 3))
    inner = keras.Model(inputs, layers.Dense(3)(layers.Dense(3)(inputs)), name="inner")
    graph = layer_graph(keras.Model(tokens, inner(layers.Embedding(5, 3, mask_zero=True)(tokens))))
    assert graph.whole_models() == ["inner"]
    options = PipelineOptions(1, (hvpipe.size(),), schedule="interleaved", chunks=9)
    with pytest.raises(HvpipeError, match=r"3 \('inner' is a nested model that cannot be opened"):
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
