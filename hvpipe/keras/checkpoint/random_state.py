"""The states of this process's random generators: of Python, NumPy, TensorFlow and Keras, the global ones."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvpipe.keras.compat import global_seed_generator, has_global_seed_generator
from hvpipe.keras.variables import native

_PYTHON, _NUMPY, _TENSORFLOW, _KERAS = "random/python", "random/numpy", "random/tensorflow", "random/keras"


AT_EPOCH = "at_epoch/"
"""What the names of Python's state at the beginning of the epoch begin with."""


def python_state() -> dict[str, Any]:
    """Return the state of Python's generator as arrays, by name."""
    version, words, gauss = random.getstate()
    return {
        f"{_PYTHON}/words": np.array([version, *words], np.uint64),
        f"{_PYTHON}/gauss": np.array([] if gauss is None else [gauss], np.float64),
    }


def set_python_state(values: Mapping[str, Any]) -> None:
    """Continue with a state that `python_state` returned, if it is there."""
    if f"{_PYTHON}/words" not in values:
        return
    version, *words = (int(word) for word in values[f"{_PYTHON}/words"])
    gauss = values[f"{_PYTHON}/gauss"]
    random.setstate((version, tuple(words), float(gauss[0]) if len(gauss) else None))


def random_state() -> dict[str, Any]:
    """Return the states as arrays, by name."""
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    of_keras = {_KERAS: native(global_seed_generator().state).numpy()} if has_global_seed_generator() else {}
    return {
        **of_keras,
        **python_state(),
        f"{_NUMPY}/keys": np.array(keys, np.uint32),
        f"{_NUMPY}/place": np.array([place, has_gauss], np.int64),
        f"{_NUMPY}/gauss": np.array([cached], np.float64),
        _TENSORFLOW: tf.random.get_global_generator().state.numpy(),
    }


def set_random_state(values: Mapping[str, Any]) -> None:
    """Continue with states that `random_state` returned, if they are there."""
    if f"{_PYTHON}/words" not in values:
        return
    set_python_state(values)
    place, has_gauss = (int(number) for number in values[f"{_NUMPY}/place"])
    cached = float(values[f"{_NUMPY}/gauss"][0])
    np.random.set_state(("MT19937", values[f"{_NUMPY}/keys"], place, has_gauss, cached))
    state = tf.random.get_global_generator().state
    if state.shape == values[_TENSORFLOW].shape:
        state.assign(values[_TENSORFLOW])
    if _KERAS in values:
        native(global_seed_generator().state).assign(values[_KERAS])
