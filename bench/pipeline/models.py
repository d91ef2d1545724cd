"""The models and batches of the pipeline benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.training.image_model import MODELS, ImageWorkload, images
from bench.training.workloads import transformer_trunk


def model_function(keras: Any, workload: ImageWorkload) -> Callable[[], Any]:
    """Return a function that builds the workload's model, not compiled."""
    shape = (workload.pixels, workload.pixels, 3)

    def build() -> Any:
        if workload.model == "transformer":
            return _transformer(keras, workload.pixels, workload.classes)
        application = getattr(keras.applications, MODELS[workload.model])
        return application(weights=None, input_shape=shape, classes=workload.classes)

    return build


def _transformer(keras: Any, length: int, tokens: int) -> Any:
    """Build a model that predicts one class for each sequence of `length` tokens."""
    inputs, x = transformer_trunk(keras, length, tokens, width=256, blocks=6)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(tokens, activation="softmax")(x))


def endless_batch(workload: ImageWorkload) -> Any:
    """Return an endless dataset of one batch, the same on every rank."""
    if workload.model != "transformer":
        return images(workload, 0)
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(100)
    x = random.integers(0, workload.classes, (workload.batch, workload.pixels))
    options = tf.data.Options()
    options.autotune.enabled = False
    data = (x.astype(np.int32), random.integers(0, workload.classes, workload.batch))
    return tf.data.Dataset.from_tensors(data).repeat().prefetch(2).with_options(options)


def describe(workload: ImageWorkload) -> str:
    """Describe the workload in one line, for a batch that all stages share."""
    return workload.describe().replace("a rank", "in all").replace("SGD momentum", "SGD")
