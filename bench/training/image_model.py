"""The models of the step benchmarks: keras.applications on synthetic images; and setting up TensorFlow."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hvpipe.comm.rank_gpu import assign_gpu

MODELS = {
    "resnet50": "ResNet50",
    "vgg16": "VGG16",
    "inceptionv3": "InceptionV3",
    "mobilenetv2": "MobileNetV2",
}


@dataclass(frozen=True)
class ImageWorkload:
    """A model by name, its images, the batch of each rank, and the threads of a TensorFlow operation."""

    model: str = "resnet50"
    pixels: int = 64
    classes: int = 100
    batch: int = 8
    threads: int = 1

    def __post_init__(self) -> None:
        if self.model not in (*MODELS, "transformer"):
            raise ValueError(f"The model must be one of {', '.join(MODELS)}. Received: model={self.model!r}")
        if min(self.pixels, self.classes, self.batch, self.threads) < 1:
            raise ValueError(f"Pixels, classes, batch and threads must be at least 1. Received: {self}")

    def describe(self) -> str:
        """Describe the workload in one line."""
        return (
            f"{self.model}, {self.pixels} px, {self.classes} classes, batch {self.batch} a rank, "
            f"SGD momentum, {self.threads} thread{'s' if self.threads > 1 else ''} an operation"
        )


def prepare_tensorflow(threads: int) -> Any:
    """Import Keras on TensorFlow with quiet logs and `threads` threads per operation. Call it once, first."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    import keras

    return keras


def own_gpu(local_rank: int, local_size: int) -> int | None:
    """Return which GPU of its host a rank uses, by hvpipe's rule. None without GPUs, HvpipeError with too
    few.
    """
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    return assign_gpu(local_rank, local_size, len(gpus)) if gpus else None


def claim_gpu(local_rank: int, local_size: int) -> None:
    """Let TensorFlow see only that GPU and allocate memory as needed. Call it before the first operation."""
    import tensorflow as tf

    mine = own_gpu(local_rank, local_size)
    if mine is not None:
        gpu = tf.config.list_physical_devices("GPU")[mine]
        tf.config.set_visible_devices([gpu], "GPU")
        tf.config.experimental.set_memory_growth(gpu, True)


def compiled_model(keras: Any, workload: ImageWorkload) -> Any:
    """Return the model, built and compiled, with the same weights each time."""
    keras.utils.set_random_seed(20)
    shape = (workload.pixels, workload.pixels, 3)
    model = getattr(keras.applications, MODELS[workload.model])(
        weights=None, input_shape=shape, classes=workload.classes
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.01, momentum=0.9),
        loss="sparse_categorical_crossentropy",
        jit_compile=False,
    )
    return model


def gradient_bytes(model: Any, *, tables: bool = True) -> int:
    """Return the bytes of all gradients in float32, which one all-reduce carries.

    Without `tables`, Embeddings do not count, because only the rows of a batch need travel.
    """
    import keras

    from hvpipe.keras.compat import layers_in

    embeddings = [layer for layer in layers_in(model) if isinstance(layer, keras.layers.Embedding)]
    left_out = [] if tables else [id(variable) for layer in embeddings for variable in layer.weights]
    count = 0
    for variable in model.trainable_variables:
        if id(variable) in left_out:
            continue
        size = 4
        for length in variable.shape:
            size *= int(length)
        count += size
    return count


def images(workload: ImageWorkload, rank: int) -> Any:
    """Return an endless dataset of one batch, a different one on each rank. Reading it takes no time."""
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(100 + rank)
    x = random.standard_normal((workload.batch, workload.pixels, workload.pixels, 3), dtype=np.float32)
    y = random.integers(0, workload.classes, workload.batch)
    options = tf.data.Options()
    options.autotune.enabled = False  # its thread delays the end of `fit` by up to 10 s
    return tf.data.Dataset.from_tensors((x, y)).repeat().prefetch(2).with_options(options)


def step_timer(keras: Any) -> Any:
    """Return a callback that keeps the clock at the first start and at the end of each step."""

    class StepTimer(keras.callbacks.Callback):  # type: ignore[misc]
        # For hvpipe: it need not finish a step first, nor ask all ranks after each step whether to stop.
        reads_weights = False
        stops_training = False

        def __init__(self) -> None:
            super().__init__()
            self.marks_s: list[float] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not self.marks_s:
                self.marks_s.append(time.perf_counter())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.marks_s.append(time.perf_counter())

    return StepTimer()


def timed_fit(
    keras: Any, model: Any, data: Any, steps: int, within: Sequence[Any] = ()
) -> tuple[list[float], float]:
    """Train some steps. Return the seconds of each, and of draining: from the last step until `fit` returns.

    What the callbacks `within` do at the end of a batch is part of the step.
    """
    timer = step_timer(keras)
    callbacks = [*within, timer]
    model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0, shuffle=False, callbacks=callbacks)
    end_s = time.perf_counter()
    marks_s = timer.marks_s
    return [after - before for before, after in pairwise(marks_s)], end_s - marks_s[-1]
