"""What other callbacks remember over epochs, which decides how training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvpipe.keras.checkpoint.model_check import as_variable
from hvpipe.keras.compat import SWAPPED

# What Keras's own callbacks keep, None, a flag or a number each.
_NUMBERS = {
    "EarlyStopping": ("best", "best_epoch", "stopped_epoch", "wait"),
    "ModelCheckpoint": ("best",),
    "ReduceLROnPlateau": ("best", "cooldown_counter", "wait"),
    "SwapEMAWeights": (SWAPPED,),
}
_WEIGHTS = "own/callbacks/{}/best_weights/"


def callback_notes(callbacks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return class and numbers of each callback that remembers something, as JSON."""
    return [
        {"class": type(callback).__name__, **{name: _number(callback, name) for name in _names(callback)}}
        for callback in _remembering(callbacks)
    ]


def callback_arrays(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the weights that EarlyStopping(restore_best_weights=True) keeps, by name."""
    return {
        f"{_WEIGHTS.format(place)}{i}": array
        for place, callback in enumerate(_remembering(callbacks))
        if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights
        for i, array in enumerate(callback.best_weights or [])
    }


def set_callbacks(
    callbacks: Sequence[Any], notes: Sequence[Mapping[str, Any]], arrays: Mapping[str, Any]
) -> None:
    """Let callbacks continue from what those of the same class remembered, the first from the first.

    Ranks may have other callbacks than the rank that wrote the notes: only one has a ModelCheckpoint.
    """
    left: dict[Any, list[tuple[int, Mapping[str, Any]]]] = {}
    for place, note in enumerate(notes):
        left.setdefault(note.get("class"), []).append((place, note))
    for callback in _remembering(callbacks):
        of_class = left.get(type(callback).__name__)
        if not of_class:
            continue
        place, note = of_class.pop(0)
        for name in _names(callback):
            if name in note:
                setattr(callback, name, note[name])
        prefix = _WEIGHTS.format(place)
        count = sum(name.startswith(prefix) for name in arrays)
        if count:
            values = [arrays[f"{prefix}{i}"] for i in range(count)]
            weights = callback.model.weights if callback.model is not None else []
            if len(weights) == count:
                values = [as_variable(value, v) for value, v in zip(values, weights, strict=True)]
            callback.best_weights = values


def _remembering(callbacks: Sequence[Any]) -> list[Any]:
    return [callback for callback in callbacks if _names(callback)]


def _names(callback: Any) -> tuple[str, ...]:
    kinds = (kind for kind in _NUMBERS if isinstance(callback, getattr(keras.callbacks, kind)))
    return next((_NUMBERS[kind] for kind in kinds), ())


def _number(callback: Any, name: str) -> float | int | None:
    value = getattr(callback, name, None)
    return value if value is None or isinstance(value, int) else float(value)
