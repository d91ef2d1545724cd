"""The check that a checkpoint is of this model, before anything changes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.checkpoints.manifest import Manifest
from hvpipe.errors import HvpipeError


def described(named: Mapping[str, Any]) -> list[list[Any]]:
    """Return name, path, shape and dtype of each variable, as JSON."""
    return [
        [name, str(getattr(v, "path", v.name)), [int(n) for n in v.shape], dtype_of(v)]
        for name, v in named.items()
    ]


def dtype_of(variable: Any) -> str:
    """Return the name of a variable's type."""
    return str(keras.backend.standardize_dtype(variable.dtype))


def check_kind(manifest: Manifest, kind: str) -> None:
    """Raise HvpipeError if the model was trained in another way."""
    if manifest.kind != kind:
        raise HvpipeError(
            f"This model can resume only a checkpoint of {kind} training. "
            f"Received: a checkpoint of {manifest.kind} training"
        )


def check_optimizer(manifest: Manifest, optimizer: Any) -> None:
    """Raise HvpipeError if the model was trained with an optimizer of another class."""
    saved, own = manifest.model["optimizer"], type(optimizer).__name__
    if saved != own:
        raise HvpipeError(
            "A checkpoint should be of the same model and optimizer; for another optimizer use another "
            f"folder. Received: {own} here and {saved} in the checkpoint"
        )


def check_variables(ours: Iterable[list[Any]], theirs: Iterable[list[Any]]) -> None:
    """Raise HvpipeError unless both are the same variables.

    The numbers that Keras appends to names do not count. Of an optimizer's variables only the last part of
    the path does: the rest depends on whether `fit` or hvpipe has built the optimizer.
    """
    mine, saved = {row[0]: row for row in ours}, {row[0]: row for row in theirs}
    for name in [*mine, *(name for name in saved if name not in mine)]:
        one, other = mine.get(name), saved.get(name)
        if one is None or other is None or _compared(one) != _compared(other):
            raise HvpipeError(
                "A checkpoint should be of this model and optimizer; use another folder for another model. "
                f"Received: {name} is {_words(one)} here and {_words(other)} in the checkpoint"
            )


def as_variable(value: Any, variable: Any) -> Any:
    """Return a saved array in the variable's type: bfloat16 and the like are saved as integers."""
    return of_type(value, variable.dtype)


def of_type(value: Any, dtype: Any) -> Any:
    """Return a saved array in the type that it had."""
    numpy_type = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    return value if numpy_type.kind in "biufc" else value.view(numpy_type)


def _compared(row: list[Any]) -> tuple[Any, ...]:
    name, path, shape, dtype = row
    if "optimizer/" in name:
        path = path.rpartition("/")[2]
    return re.sub(r"_\d+(?=[/_]|$)", "", path), tuple(shape), dtype


def _words(row: list[Any] | None) -> str:
    return "missing" if row is None else f"{row[1]} {row[3]}{row[2]}"
