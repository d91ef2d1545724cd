"""Run these cases on every rank in step. Without a launcher there is one rank."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hvpipe
from distributed import rank_in_environment
from in_step import InStep


def pytest_configure(config: pytest.Config) -> None:
    # Keras calls TensorFlow in a way that NumPy 2 warns about.
    config.addinivalue_line("filterwarnings", "ignore:__array__ implementation:DeprecationWarning")
    # Plain Keras, which runs on one rank, warns about unused variables.
    config.addinivalue_line("filterwarnings", "ignore:Gradients do not exist for variables:UserWarning")
    if rank_in_environment() is not None:
        config.pluginmanager.register(InStep(), "in-step")


@pytest.fixture(scope="session", autouse=True)
def world() -> Iterator[None]:
    """Open one hvpipe session for all cases, with few threads, as the ranks share one machine's cores."""
    with warnings.catch_warnings():
        # The tests do not test TensorFlow's own imports.
        warnings.simplefilter("ignore")
        import tensorflow as tf
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # Two, because one thread would fix the order of independent operations.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    # The end of an iterator waits for its autotuning thread, now and then for a minute.
    iterate, untuned = tf.data.Dataset.__iter__, tf.data.Options()
    untuned.autotune.enabled = False
    tf.data.Dataset.__iter__ = lambda dataset: iterate(dataset.with_options(untuned))
    slice_arrays_without_tracing()
    if os.environ.get("WITHOUT_GRAPH_OPTIMIZER"):
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    hvpipe.init()
    # Freeze what TensorFlow and Keras made on import. Otherwise garbage collection takes a fifth of tracing
    # time.
    gc.collect()
    gc.freeze()
    yield
    hvpipe.shutdown()


def slice_arrays_without_tracing() -> None:
    """Let `fit`, `evaluate` and `predict` cut arrays that stay in order into the same batches with less work.

    Keras traces four functions for each call, which took a seventh of the time of pipelines.
    """
    import keras
    import numpy as np
    import tensorflow as tf
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable

    usual = ArrayDataAdapter.get_tf_dataset

    def sliced(adapter: Any) -> Any:
        inputs = keras.tree.lists_to_tuples(convert_to_sliceable(adapter._inputs, "tensorflow"))
        dense = all(isinstance(x, (np.ndarray, tf.Tensor)) for x in keras.tree.flatten(inputs))
        if adapter._shuffle or not dense:
            return usual(adapter)
        whole = not adapter._partial_batch_size
        return tf.data.Dataset.from_tensor_slices(inputs).batch(adapter._batch_size, drop_remainder=whole)

    ArrayDataAdapter.get_tf_dataset = sliced


@pytest.fixture(autouse=True)
def one_seed(world: None) -> None:
    """Start every case on every rank with the same random numbers."""
    import keras

    keras.utils.set_random_seed(17)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return one folder for all ranks."""
    return Path(hvpipe.broadcast_object(str(tmp_path)))
