"""The models of the pipeline benchmark, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.rounds.record import Task
from bench.training.workloads import WORKLOADS, endless, synthetic, transformer_trunk

MODELS = {"resnet50": 64, "vgg16": 64, "transformer": 128}
"""Pixels or tokens by model."""
_TOKENS = 100  # vocabulary of the transformer


def model_function(keras: Any, task: Task) -> Callable[[], Any]:
    """Return a function that builds the task's model, not compiled."""

    def build() -> Any:
        if task.workload == "transformer":
            return _transformer(keras, task.pixels)
        return WORKLOADS[task.workload].build(keras, task.pixels)

    return build


def _transformer(keras: Any, length: int) -> Any:
    """Build a model that predicts one class for each sequence of `length` tokens."""
    inputs, x = transformer_trunk(keras, length, _TOKENS, width=256, blocks=6)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(_TOKENS, activation="softmax")(x))


def endless_batch(task: Task) -> Any:
    """Return an endless dataset of one batch, the same on every rank."""
    import numpy as np
    import tensorflow as tf

    if task.workload != "transformer":
        return endless(tf.data.Dataset.from_tensors(synthetic(task, task.batch, 0)))
    random = np.random.default_rng(100)
    x = random.integers(0, _TOKENS, (task.batch, task.pixels)).astype(np.int32)
    return endless(tf.data.Dataset.from_tensors((x, random.integers(0, _TOKENS, task.batch))))


def describe(task: Task) -> str:
    return (
        f"{task.workload}, {task.pixels} px, batch {task.batch} in all, SGD, "
        f"{task.threads} thread{'s' if task.threads > 1 else ''} an operation"
    )
