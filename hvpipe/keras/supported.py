"""The Keras that hvpipe works with: Keras 3, from a version on, and on TensorFlow."""

from __future__ import annotations

import re
from typing import Any

from hvpipe.errors import InitError

OLDEST = (3, 12)
_WANTED = f"hvpipe.keras wants Keras {OLDEST[0]}.{OLDEST[1]} or later on TensorFlow"


def check_installed() -> None:
    """Raise InitError, with what to do, unless the Keras that is imported here is one that hvpipe knows."""
    try:
        import keras
    except ImportError as error:
        raise InitError(
            f"{_WANTED}: pip install 'keras>={OLDEST[0]}.{OLDEST[1]}', with KERAS_BACKEND (or the backend "
            f"in ~/.keras/keras.json) unset or tensorflow. Received: {error}"
        ) from error
    check_keras(keras.__version__, keras.backend.backend())


def check_keras(version: str, backend: str) -> None:
    """Raise InitError unless hvpipe works with this version of Keras on this backend."""
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if found < OLDEST:
        raise InitError(f"{_WANTED}: pip install 'keras>={OLDEST[0]}.{OLDEST[1]}'. Received: keras {version}")
    if backend != "tensorflow":
        raise InitError(
            f"{_WANTED}: export KERAS_BACKEND=tensorflow before Python starts, or set the backend in "
            f"~/.keras/keras.json. Received: the backend {backend!r}"
        )


def told(thing: Any) -> str:
    """The kind of an object, for an error; with what to do where it comes from the Keras before Keras 3."""
    kind = type(thing)
    if kind.__module__.partition(".")[0] != "tf_keras":
        return kind.__name__
    return (
        f"{kind.__name__} of tf_keras, which is Keras 2: leave TF_USE_LEGACY_KERAS unset, and `import keras`"
    )
