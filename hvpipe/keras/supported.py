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


def of_keras_2(thing: Any) -> bool:
    """Whether an object comes from the Keras before Keras 3, as `tf.keras` is under TF_USE_LEGACY_KERAS."""
    return type(thing).__module__.partition(".")[0] == "tf_keras"


def told(thing: Any) -> str:
    """The kind of an object, for an error; with what to do where it is of Keras 2."""
    kind = type(thing).__name__
    if not of_keras_2(thing):
        return kind
    return f"{kind} of tf_keras, which is Keras 2: leave TF_USE_LEGACY_KERAS unset, and `import keras`"
