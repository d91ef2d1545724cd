"""Run these cases on every rank in step. Without a launcher there is one rank."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

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
    if os.environ.get("WITHOUT_GRAPH_OPTIMIZER"):
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    hvpipe.init()
    # Freeze what TensorFlow and Keras made on import. Otherwise garbage collection takes a fifth of tracing
    # time.
    gc.collect()
    gc.freeze()
    yield
    hvpipe.shutdown()


@pytest.fixture(autouse=True)
def one_seed(world: None) -> None:
    """Start every case on every rank with the same random numbers."""
    import keras

    keras.utils.set_random_seed(17)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return one folder for all ranks."""
    return Path(hvpipe.broadcast_object(str(tmp_path)))
