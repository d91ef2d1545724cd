"""Models of several kinds, their data, and reference runs for the pipeline cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import keras
import numpy as np

import hvpipe
import hvpipe.keras as hk
from hvpipe.keras.graph.layer_graph import LayerGraph, layer_graph
from hvpipe.keras.profiling.estimate import estimate
from hvpipe.specs.profile import Profile
from training import by_rank_0

layers = keras.layers

STEPS, BATCH = 5, 8
# How far losses and weights of a pipeline may be from those of the undivided model, relatively.
WITHIN = 1e-5


def mlp() -> keras.Model:
    """Build dense layers, one of them regularized."""
    hidden = [layers.Dense(10, activation="tanh", kernel_regularizer="l2") for _ in range(4)]
    return keras.Sequential([keras.Input((12,)), *hidden, layers.Dense(4)])


def small() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12,)),
            *(keras.layers.Dense(8, activation="relu") for _ in range(3)),
            keras.layers.Dense(4),
        ]
    )


def resnet() -> keras.Model:
    """Build residual blocks with frozen BatchNormalization."""
    inputs = keras.Input((6, 6, 3))
    x = layers.Conv2D(6, 3, padding="same")(inputs)
    for _ in range(2):
        y = layers.ReLU()(layers.BatchNormalization(trainable=False)(x))
        x = layers.Add()([x, layers.Conv2D(6, 3, padding="same")(y)])
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def transformer() -> keras.Model:
    """Build a block of causal attention over embedded tokens, in double precision.

    In float32, rounding changes one of its biases (norm 0.04) by 1e-5 if the order of any sum changes.
    """
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    try:
        inputs = keras.Input((7,), dtype="int32")
        x = layers.Embedding(11, 8)(inputs)
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(y, y, use_causal_mask=True)])
        y = layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(8)(y)])
        return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))
    finally:
        keras.config.set_dtype_policy(policy)


def unet() -> keras.Model:
    """Build a network with skip connections over all stages."""
    inputs = keras.Input((8, 8, 1))
    a = layers.Conv2D(3, 3, padding="same", activation="relu")(inputs)
    b = layers.Conv2D(5, 3, padding="same", activation="relu")(layers.MaxPool2D()(a))
    c = layers.Conv2D(5, 3, padding="same", activation="relu")(layers.MaxPool2D()(b))
    d = layers.Concatenate()([layers.UpSampling2D()(c), b])
    d = layers.Conv2D(3, 3, padding="same", activation="relu")(d)
    e = layers.Concatenate()([layers.UpSampling2D()(d), a])
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(layers.Conv2D(4, 1)(e))))


Build = Callable[[], keras.Model]
MODELS: dict[str, Build] = {"mlp": mlp, "resnet": resnet, "transformer": transformer, "unet": unet}


@cache
def input_shape(build: Build) -> tuple[int, ...]:
    shape: tuple[int, ...] = build().input_shape[1:]
    return shape


def batches(build: Build, count: int = STEPS * BATCH) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs for the model, and labels."""
    rng = np.random.default_rng(3)
    shape = (count, *input_shape(build))
    whole_numbers = build is transformer
    x = rng.integers(0, 11, shape) if whole_numbers else rng.normal(size=shape).astype(np.float32)
    return x, rng.integers(0, 4, count)


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def compile_as_all(model: keras.Model, optimizer: Any = None) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or sgd(), loss=loss, metrics=["accuracy"])
    return model


@dataclass(frozen=True)
class Run:
    """Results of a training: history, evaluation, prediction, and weights by layer call order."""

    history: dict[str, list[float]]
    evaluation: list[float]
    prediction: np.ndarray
    weights: dict[int, np.ndarray]


def train(model: keras.Model, graph: LayerGraph, data: tuple[np.ndarray, np.ndarray]) -> Run:
    x, y = data
    history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history
    evaluation = model.evaluate(x[:20], y[:20], batch_size=BATCH, verbose=0)
    prediction = model.predict(x[:20], batch_size=BATCH, verbose=0)
    return Run(history, evaluation, prediction, weights_here(model, graph))


def weights_here(model: keras.Model, graph: LayerGraph) -> dict[int, np.ndarray]:
    """Return the weights that this rank holds, by their number in the whole model."""
    every = [v for layer in graph.layers(range(len(graph.calls))) for v in layer.variables]
    mine = {id(v) for v in model.variables}
    return {number: np.asarray(v.numpy()) for number, v in enumerate(every) if id(v) in mine}


@cache
def plain(name: str) -> Run:
    """Train the undivided model with Keras, on rank 0 for all ranks."""
    build = MODELS[name]

    def trained() -> Run:
        keras.utils.set_random_seed(5)
        model = compile_as_all(build())
        return train(model, layer_graph(model), batches(build))

    found: Run = by_rank_0(trained)
    return found


def pipelined(name: str, optimizer: Any = None, **options: Any) -> Run:
    """Train the same model as a pipeline over the ranks."""
    build = MODELS[name]
    data = batches(build)
    keras.utils.set_random_seed(5)
    pipe = hk.pipeline_parallel(build, **{"microbatches": 4, **options})
    compile_as_all(pipe, optimizer)
    return train(pipe, pipe.stages.graph, data)


def spread(name: str, schedule: str = "1f1b") -> Run:
    """Train the model as a pipeline with this schedule, once for all cases of a job."""
    return _spread(name, schedule)


@cache
def _spread(name: str, schedule: str) -> Run:
    options = {"chunks": 2} if schedule == "interleaved" else {}
    return pipelined(name, schedule=schedule, **options)


def both(build: Build, told: Callable[[Any], Any], **options: Any) -> tuple[Any, Any]:
    """Apply `told` to the undivided model on rank 0 and to its pipeline, both from the same seed."""

    def from_seed(make: Build) -> Any:
        keras.utils.set_random_seed(5)
        return told(make())

    plain_told = by_rank_0(lambda: from_seed(build))
    return plain_told, from_seed(lambda: hk.pipeline_parallel(build, **{"microbatches": 4, **options}))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the norm of the difference, relative to the larger norm of the two.

    A tenth of a step of 0.1 counts as the least norm: the bias of attention's keys has no effect and so no
    gradient but rounding.
    """
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(a), np.linalg.norm(b), 1e-2))


def check_same(run: Run, reference: Run, within: float) -> None:
    """Check losses, metrics, outputs and the weights held here against a reference run."""
    assert run.history.keys() == reference.history.keys()
    for name, values in reference.history.items():
        np.testing.assert_allclose(run.history[name], values, rtol=within, err_msg=name)
    np.testing.assert_allclose(run.evaluation, reference.evaluation, rtol=within)
    assert distance(run.prediction, reference.prediction) <= within
    far = {n: distance(w, reference.weights[n]) for n, w in run.weights.items()}
    assert max(far.values(), default=0.0) <= within, far
    # A stage may have no weights; together they have all.
    everyone = hvpipe.allgather_object(sorted(run.weights))
    assert {n for numbers in everyone for n in numbers} == set(reference.weights)


def unit_profile(graph: LayerGraph, cost_s: float = 1e-3) -> Profile:
    """Return a profile whose layers take equally long."""
    profile = estimate(graph, samples=1)
    layers = (dataclasses.replace(la, forward_s=cost_s, backward_s=2 * cost_s) for la in profile.layers)
    return dataclasses.replace(profile, layers=tuple(layers))
