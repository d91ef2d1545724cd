"""Sets TensorFlow up alike for every benchmark: threads and GPUs; and the size of a model's gradients."""

from __future__ import annotations

import math
import os
from typing import Any

from hvpipe.engine.rank_gpu import assign_gpu


def prepare_tensorflow(threads: int) -> Any:
    """Import Keras on TensorFlow with quiet logs and `threads` threads per operation. Call it once, first.

    TensorFlow computes with oneDNN, as PyTorch does. On CPUs without AVX-512 it would not by itself.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
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


def gradient_bytes(model: Any, samples: int) -> int:
    """Return the bytes of an all-reduce that takes as long as exchanging all gradients in float32.

    Of an Embedding only the rows of a step's `samples`, those of all ranks, need travel. They are gathered,
    which sends half the bytes of an all-reduce.
    """
    import keras

    from hvpipe.keras.compat import layers_in

    sizes = {id(each): math.prod(each.shape) for each in model.trainable_variables}
    for layer in layers_in(model):
        if isinstance(layer, keras.layers.Embedding):
            rows = samples * math.prod(layer.input.shape[1:])
            for variable in layer.trainable_variables:
                sizes[id(variable)] = min(sizes[id(variable)], rows * layer.output_dim // 2)
    return 4 * sum(sizes.values())
