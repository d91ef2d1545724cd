"""The states of this process's random generators: Python's, NumPy's, and TensorFlow's global one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

_PYTHON, _NUMPY, _TENSORFLOW = "random/python", "random/numpy", "random/tensorflow"


def random_state() -> dict[str, Any]:
    """Return the states as arrays, by name."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        f"{_PYTHON}/words": np.array([version, *words], np.uint64),
        f"{_PYTHON}/gauss": np.array([] if gauss is None else [gauss], np.float64),
        f"{_NUMPY}/keys": np.array(keys, np.uint32),
        f"{_NUMPY}/place": np.array([place, has_gauss], np.int64),
        f"{_NUMPY}/gauss": np.array([cached], np.float64),
        _TENSORFLOW: tf.random.get_global_generator().state.numpy(),
    }


def set_random_state(values: Mapping[str, Any]) -> None:
    """Continue with states that `random_state` returned, if they are there."""
    if f"{_PYTHON}/words" not in values:
        return
    version, *words = (int(word) for word in values[f"{_PYTHON}/words"])
    gauss = values[f"{_PYTHON}/gauss"]
    random.setstate((version, tuple(words), float(gauss[0]) if len(gauss) else None))
    place, has_gauss = (int(number) for number in values[f"{_NUMPY}/place"])
    cached = float(values[f"{_NUMPY}/gauss"][0])
    np.random.set_state(("MT19937", values[f"{_NUMPY}/keys"], place, has_gauss, cached))
    state = tf.random.get_global_generator().state
    if state.shape == values[_TENSORFLOW].shape:
        state.assign(values[_TENSORFLOW])
