"""`backward` and `step` give the same bits as `none`: weights, optimizer slots, moving averages, seeds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from devices import needs_others, open_in_session
from hvpipe.keras import ops
from hvpipe.keras.data_parallel import bucket_reduce
from training import (
    CLASSES,
    FEATURES,
    assert_same_bits,
    assert_same_on_all_ranks,
    compiled,
    fit,
    mlp,
    my_batches,
    parallel,
    state_of,
    table,
)

STEPS = 20
optimizers = keras.optimizers


@dataclass(frozen=True)
class Case:
    """An optimizer, and the model if it is not the common one. `options` are passed to compile."""

    optimizer: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    build: Callable[[], keras.Model] = mlp


def embedded() -> keras.Model:
    """Build an embedding that the signs of the inputs index. Its gradients are IndexedSlices."""
    inputs = keras.Input((FEATURES,))
    rows = keras.layers.Embedding(2, 3)(keras.ops.cast(inputs > 0, "int32"))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.Flatten()(rows)))


class TiedEmbedding(keras.layers.Embedding):
    """A table that is also a kernel, so that all of its rows have gradients, and a scalar weight."""

    def build(self, input_shape: Any = None) -> None:
        super().build(input_shape)
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs: Any) -> Any:
        found = keras.ops.mean(super().call(inputs), axis=1)
        return keras.ops.matmul(self.scale * found, keras.ops.transpose(self.embeddings))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (input_shape[0], self.input_dim)


def tied() -> keras.Model:
    inputs = keras.Input((FEATURES,))
    known = TiedEmbedding(4100, 64)(keras.ops.cast(keras.ops.abs(inputs) * 20.0, "int32"))
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(known))


def decaying() -> Any:
    return optimizers.schedules.ExponentialDecay(0.1, 3, 0.8)


# test_bucket_update.py compares every optimizer and option in one process. Here is one for each way through
# the code: by bucket or all at once, dense gradients or rows of a table, graph or eager.
CASES = {
    "momentum": Case(lambda: optimizers.SGD(0.1, momentum=0.9)),
    "table_loss_scale": Case(
        lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), dynamic_growth_steps=3), build=table
    ),
    "embedding": Case(lambda: optimizers.Adam(0.01), build=embedded),
    "table": Case(lambda: optimizers.Adam(0.01), build=table),
    # These have long products and sums with constants, which TensorFlow's graph optimizer would reorder.
    "decaying_sgd_steps_per_execution": Case(
        lambda: optimizers.SGD(decaying(), momentum=0.9, nesterov=True, weight_decay=0.01, clipnorm=0.1),
        {"steps_per_execution": 4},
    ),
    "accumulation_ema_clipnorm": Case(
        lambda: optimizers.Adam(
            0.01, gradient_accumulation_steps=4, use_ema=True, ema_overwrite_frequency=3, clipnorm=0.5
        )
    ),
    "accumulation_inside_loss_scale": Case(
        lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01, gradient_accumulation_steps=2))
    ),
    "accumulation_loss_scale_steps_per_execution": Case(
        lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2, loss_scale_factor=8.0),
        {"steps_per_execution": 5},
    ),
    "eager": Case(lambda: optimizers.Adam(0.01), {"run_eagerly": True}, steps=6),
    "table_accumulation_global_clipnorm": Case(
        lambda: optimizers.AdamW(0.01, global_clipnorm=0.5, gradient_accumulation_steps=3), build=table
    ),
    # It asks for the shapes of gradients.
    "table_nadam": Case(lambda: optimizers.Nadam(0.01), build=table, steps=6),
    "tied_table": Case(lambda: optimizers.Adam(0.01), build=tied, steps=6),
}

# These run on every number of ranks: a dense gradient, one of table rows, and sums over several steps.
EVERY_SIZE = ("momentum", "table", "accumulation_ema_clipnorm")
OLDER_TENSORFLOW = ("momentum", "table", "embedding", "table_loss_scale", "eager")
QUICK = ("momentum", "table")
# "backward" sends as "step" does. So few of its cases run elsewhere, too.
ELSEWHERE_BACKWARD = ("momentum",)


def marked(names: Iterable[str], every_size: Iterable[str], older: Iterable[str]) -> list[Any]:
    """Return the names with the marks that select their other runs."""

    def marks(name: str) -> Iterator[pytest.MarkDecorator]:
        if name in every_size:
            yield pytest.mark.every_size
        if name in older:
            yield pytest.mark.older_tensorflow
        if name in QUICK:
            yield pytest.mark.quick

    return [pytest.param(name, marks=list(marks(name))) for name in names]


@pytest.mark.parametrize("name", marked(CASES, EVERY_SIZE, OLDER_TENSORFLOW))
def test_step_gives_the_bits_of_none(name: str) -> None:
    assert_same_bits(trained(name, "step"), trained_linearly(name))


# "backward" updates by bucket, like "step", but in the same step. One case per kind of gradient and step is
# enough.
WITH_BACKWARD = (
    "momentum",
    "table",
    "accumulation_ema_clipnorm",
    "table_loss_scale",
    "decaying_sgd_steps_per_execution",
    "embedding",
    "eager",
)


@pytest.mark.parametrize("name", marked(WITH_BACKWARD, ELSEWHERE_BACKWARD, ELSEWHERE_BACKWARD))
def test_backward_gives_the_bits_of_none(name: str) -> None:
    assert_same_bits(trained(name, "backward"), trained_linearly(name))


@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        *(("momentum", "none"), ("momentum", "step"), ("table", "backward")),
        *(("table_nadam", "step"), ("tied_table", "step")),
        *(("accumulation_ema_clipnorm", "step"), ("table_accumulation_global_clipnorm", "backward")),
    ],
)
def test_gradients_in_device_memory_give_the_bits_of_none(
    name: str, overlap: str, in_device_memory: list[str]
) -> None:
    """The kernels for GPUs, on a fake device that runs its streams as late as CUDA allows."""
    found = trained(name, overlap)
    # Rows go through the host, but not tables with dense gradients.
    assert ("hvpipe_submit_rows" in in_device_memory) == (name in ("table", "table_nadam"))
    assert "hvpipe_collect" in in_device_memory
    assert_same_on_all_ranks(found)
    assert_same_bits(found, trained_linearly(name))


@pytest.fixture
def in_device_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let gradients go to the engine as on GPUs; gives the names of the ops that were called."""
    needs_others()
    open_in_session()
    used: list[str] = []

    class Kernels:
        """The ops with the kernels that TensorFlow would choose on a GPU."""

        def __getattr__(self, op: str) -> Any:
            def call(**inputs: Any) -> Any:
                label = AttrValue(s=b"device_memory")
                with tf.compat.v1.get_default_graph()._attr_scope({"_kernel": label}), tf.device("CPU:0"):
                    return getattr(ops.library(), op)(**inputs)

            used.append(op)
            if op not in ("hvpipe_submit", "hvpipe_collect"):
                return getattr(ops.library(), op)
            return tf.function(call) if tf.executing_eagerly() else call  # only graphs have labels

    monkeypatch.setattr(bucket_reduce, "library", Kernels)
    monkeypatch.setattr(bucket_reduce, "reduces_on_gpu", lambda _: True)
    monkeypatch.setattr(bucket_reduce, "_table_bytes", lambda session, on_device: 1 << 20)
    return used


@functools.cache
def trained_linearly(name: str) -> dict[str, Any]:
    linear = trained(name, "none")
    assert_same_on_all_ranks(linear)
    return linear


def trained(name: str, overlap: str) -> dict[str, Any]:
    case = CASES[name]
    model = parallel(compiled(case.build, case.optimizer(), **case.options), overlap)
    fit(model, my_batches(case.steps // 2), epochs=2)
    return state_of(model)
