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
BEST = "own/best/"
"""What the names of best weights begin with in a pipeline: own/best/0/weights/12 is variable 12 of the model.

The 0 is the callback's number among those that restore weights, which all ranks have.
"""


def callback_notes(callbacks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return class and numbers of each callback that remembers something, as JSON."""
    return [
        {"class": type(callback).__name__, **{name: _number(callback, name) for name in _names(callback)}}
        for callback in _remembering(callbacks)
    ]


def callback_arrays(callbacks: Sequence[Any], names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the weights that EarlyStopping(restore_best_weights=True) keeps, by name.

    Args:
        callbacks: The callbacks.
        names: The names of the model's weights, if ranks hold different ones. Otherwise they are numbered.
    """
    if names is not None:
        return {
            f"{BEST}{number}/{name}": array
            for number, callback in enumerate(filter(_restores, callbacks))
            if callback.best_weights is not None
            for name, array in zip(names, callback.best_weights, strict=True)
        }
    return {
        f"{_WEIGHTS.format(place)}{i}": array
        for place, callback in enumerate(_remembering(callbacks))
        if _restores(callback)
        for i, array in enumerate(callback.best_weights or [])
    }


def set_callbacks(
    callbacks: Sequence[Any],
    notes: Sequence[Mapping[str, Any]],
    arrays: Mapping[str, Any],
    names: Sequence[str] | None = None,
) -> bool:
    """Let callbacks continue from what those of the same class remembered, the first from the first.

    Ranks may have other callbacks than the rank that wrote the notes: only one has a ModelCheckpoint.

    Args:
        callbacks: The callbacks.
        notes: What `callback_notes` returned.
        arrays: What `callback_arrays` returned.
        names: As for `callback_arrays`.

    Returns:
        Whether the best weights of some callback are missing. It begins anew, because it would take the
        weights of now for the best ones.
    """
    missing = False
    restoring = [id(callback) for callback in callbacks if _restores(callback)]
    left: dict[Any, list[tuple[int, Mapping[str, Any]]]] = {}
    for place, note in enumerate(notes):
        left.setdefault(note.get("class"), []).append((place, note))
    for callback in _remembering(callbacks):
        of_class = left.get(type(callback).__name__)
        if not of_class:
            continue
        place, note = of_class.pop(0)
        if _restores(callback):
            if names is None:
                prefix = _WEIGHTS.format(place)
                count = sum(name.startswith(prefix) for name in arrays)
                wanted = [f"{prefix}{i}" for i in range(max(1, count))]
            else:
                wanted = [f"{BEST}{restoring.index(id(callback))}/{name}" for name in names]
            callback.best_weights = _best_weights(callback, wanted, arrays)
            if callback.best_weights is None and note.get("best") is not None:
                missing = True
                continue
        for name in _names(callback):
            if name in note:
                setattr(callback, name, note[name])
    return missing


def _best_weights(callback: Any, names: Sequence[str], arrays: Mapping[str, Any]) -> list[Any] | None:
    """Return the weights of these names, like the model's if it is built; None if some are missing."""
    weights = callback.model.weights if callback.model is not None else []
    if any(name not in arrays for name in names):
        return None
    values = [arrays[name] for name in names]
    if len(weights) != len(values):
        return values
    return [as_variable(value, v) for value, v in zip(values, weights, strict=True)]


def _restores(callback: Any) -> bool:
    return isinstance(callback, keras.callbacks.EarlyStopping) and bool(callback.restore_best_weights)


def _remembering(callbacks: Sequence[Any]) -> list[Any]:
    return [callback for callback in callbacks if _names(callback)]


def _names(callback: Any) -> tuple[str, ...]:
    kinds = (kind for kind in _NUMBERS if isinstance(callback, getattr(keras.callbacks, kind)))
    return next((_NUMBERS[kind] for kind in kinds), ())


def _number(callback: Any, name: str) -> float | int | None:
    value = getattr(callback, name, None)
    return value if value is None or isinstance(value, int) else float(value)
