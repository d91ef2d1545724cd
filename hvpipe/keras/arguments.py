"""Binds a call's arguments to their names, so that some can be replaced before the call."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

# Data that arrives in an order of its own: of TensorFlow and Python, and by name of PyTorch and Grain.
_ORDERED = (tf.data.Dataset, tf.distribute.DistributedDataset, types.GeneratorType)
_ORDERED_ELSEWHERE = {"DataLoader", "IterDataset", "MapDataset"}


def by_name(
    method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], handed_to: Callable[..., Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, ready to pass to `method` as keywords.

    If `method` takes *args and passes them on to `handed_to`, they get the names that they have there.
    Raises TypeError if the call would.
    """
    signature = inspect.signature(method)
    found: dict[str, Any] = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found.update(found.pop(name, {}))
        elif parameter.kind is parameter.VAR_POSITIONAL:
            rest = len(found.pop(name, ()))
            named = list(inspect.signature(handed_to).bind_partial(*args).arguments.items()) if rest else []
            found.update(named[len(args) - rest :])
    return found


def takes(method: Callable[..., Any], name: str) -> bool:
    """Return whether a method takes an argument of this name."""
    parameters = inspect.signature(method).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def keep_order(method: Callable[..., Any], given: dict[str, Any]) -> None:
    """Do not ask Keras to shuffle data that has an order of its own, unless the user does.

    `fit` does by default, and Keras 3.15 warns that it cannot.

    Args:
        method: The `fit` to call.
        given: Its arguments by name; may get `shuffle`.
    """
    x = given.get("x")
    if isinstance(x, keras.utils.PyDataset):
        ordered = x.num_batches is None
    else:
        ordered = isinstance(x, _ORDERED) or any(k.__name__ in _ORDERED_ELSEWHERE for k in type(x).__mro__)
    if ordered and "shuffle" not in given and takes(method, "shuffle"):
        given["shuffle"] = False
