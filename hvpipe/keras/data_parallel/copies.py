"""Copies of a `data_parallel` model: `copy.deepcopy` and `keras.models.clone_model` keep its hooks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import replace_clone_model
from hvpipe.keras.training_alone import is_alone
from hvpipe.session import is_initialized

_AGAIN = "_hvpipe_again"
_COPY = "__deepcopy__"  # `copy.deepcopy` looks for it on the instance


def keep_in_copies(model: Any, again: Callable[[Any], Any]) -> None:
    """Let copies of a model pass through `again`, which hooks them, unless they are made inside `alone`.

    A pickle keeps Keras' form, which loads without hvpipe: its models have no hooks.
    """
    vars(model)[_AGAIN] = again
    vars(model)[_COPY] = functools.partial(_deepcopy, model)


def forget_copies(model: Any) -> None:
    """Let copies be plain models again."""
    vars(model).pop(_AGAIN, None)
    vars(model).pop(_COPY, None)


def _deepcopy(model: Any, memo: dict[int, Any]) -> Any:
    ours = vars(model).pop(_COPY)
    try:
        return _hooked(model, copy.deepcopy(model, memo))
    finally:
        vars(model)[_COPY] = ours


def _hooked(model: Any, copied: Any) -> Any:
    again = vars(model).get(_AGAIN)
    return copied if again is None or is_alone() or not is_initialized() else _telling(again(copied))


def _telling(copied: Any) -> Any:
    """Let errors of a copy that only some ranks use say what it is."""
    for name in ("fit", "evaluate", "train_on_batch"):
        if name in vars(copied):
            setattr(copied, name, _told(copied.name, getattr(copied, name)))
    return copied


def _told(model: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except HvpipeError as error:
            if "should make the same calls" in str(error):  # the others are elsewhere, or have left
                error.args = (
                    f"{error} Model {model} is a copy of a data_parallel model: its {method.__name__} needs "
                    "all ranks. If one rank uses it alone, make the copy inside `with hk.alone():`.",
                )
            raise

    return call


def _keeping_hooks(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def clone_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        return _hooked(model, own(model, *args, **kwargs))

    return clone_model


def keep_in_clones() -> None:
    """Let `keras.models.clone_model`, and the scikit-learn wrappers that call it, keep hooks.

    Not where a script has imported the function by name before hvpipe.keras: such a clone is a plain model.
    """
    replace_clone_model(_keeping_hooks)
