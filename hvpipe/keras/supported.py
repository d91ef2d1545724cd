"""Checks that hvpipe works with the installed Keras: Keras 3 on TensorFlow, from `OLDEST_KERAS` on."""

from __future__ import annotations

from typing import Any

from hvpipe.errors import InitError
from hvpipe.world.versions import NEWEST_KERAS, OLDEST_KERAS, is_older

_FROM = OLDEST_KERAS.removesuffix(".0")
_WANTED = f"hvpipe.keras needs Keras {_FROM} or later on TensorFlow"


def check_installed() -> None:
    """Raise InitError, with what to do, unless hvpipe works with the Keras that is installed."""
    try:
        import keras
    except ImportError as error:
        raise InitError(
            f"{_WANTED}: pip install 'keras>={_FROM}', with KERAS_BACKEND (or the backend in "
            f"~/.keras/keras.json) unset or tensorflow. Received: {error}"
        ) from error
    check_keras(keras.__version__, keras.backend.backend())
    try:
        from hvpipe.keras import compat
    except (ImportError, AttributeError) as error:
        raise _lacks(keras.__version__, str(error)) from None
    if missing := compat.missing_members():
        raise _lacks(keras.__version__, "no " + ", ".join(missing))


def _lacks(version: str, what: str) -> InitError:
    return InitError(
        f"hvpipe.keras needs private names of Keras that Keras {version} lacks. hvpipe was tried with Keras "
        f"{OLDEST_KERAS} to {NEWEST_KERAS}: pip install 'keras>={_FROM},<={NEWEST_KERAS}'. Received: {what}"
    )


def check_keras(version: str, backend: str) -> None:
    """Raise InitError unless hvpipe works with this version of Keras on this backend."""
    if is_older(version, OLDEST_KERAS):
        raise InitError(f"{_WANTED}: pip install 'keras>={_FROM}'. Received: keras {version}")
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
