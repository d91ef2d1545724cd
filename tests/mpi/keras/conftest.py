"""Runs these cases on every rank in step; without a launcher there is one rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

import hvpipe
from distributed import rank_in_environment
from in_step import InStep


def pytest_configure(config: pytest.Config) -> None:
    # Keras and TensorFlow among themselves, under NumPy 2.
    config.addinivalue_line("filterwarnings", "ignore:__array__ implementation:DeprecationWarning")
    # Plain Keras, which one rank runs, says so of variables that are not used.
    config.addinivalue_line("filterwarnings", "ignore:Gradients do not exist for variables:UserWarning")
    if rank_in_environment() is not None:
        config.pluginmanager.register(InStep(), "in-step")


@pytest.fixture(scope="session", autouse=True)
def world() -> Iterator[None]:
    """One hvpipe session for all cases, and few threads: the ranks share the cores of one machine."""
    with warnings.catch_warnings():
        # TensorFlow's own imports are not what is tested.
        warnings.simplefilter("ignore")
        import tensorflow as tf
    tf.config.threading.set_intra_op_parallelism_threads(1)
    # Two, so that the order of independent operations is not fixed by having one thread.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    hvpipe.init()
    yield
    hvpipe.shutdown()


@pytest.fixture(autouse=True)
def one_seed(world: None) -> None:
    """All ranks and all cases begin with the same random numbers."""
    import keras

    keras.utils.set_random_seed(17)
