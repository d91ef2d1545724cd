"""Checks that the installed Keras is supported: Keras 3 on TensorFlow, `OLDEST` or later."""

from __future__ import annotations

import re
from typing import Any

from hvpipe.errors import InitError

OLDEST = (3, 12)
_WANTED = f"hvpipe.keras needs Keras {OLDEST[0]}.{OLDEST[1]} or later on TensorFlow"


def check_installed() -> None:
    """Raise InitError, with what to do, unless hvpipe works with the Keras that is installed."""
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
    """Return whether an object is of Keras 2, as `tf.keras` is under TF_USE_LEGACY_KERAS."""
    return type(thing).__module__.partition(".")[0] == "tf_keras"


def described_type(thing: Any) -> str:
    """Return the type of an object for an error message; for one of Keras 2, also what to do."""
    kind = type(thing).__name__
    if not of_keras_2(thing):
        return kind
    return f"{kind} of tf_keras, which is Keras 2: leave TF_USE_LEGACY_KERAS unset, and `import keras`"
