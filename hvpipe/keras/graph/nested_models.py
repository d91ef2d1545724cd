"""How tensors enter a nested model: the input that each becomes, its cast and its mask, as in Keras."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvpipe.keras import compat


class Entering(keras.Operation):
    """What a nested model does to a tensor that it is called on: casts it, and gives it a mask.

    Called with `(x)`, the result keeps the mask of `x` if `keeps_mask`. Called with `(x, mask)`, it has that
    mask.
    """

    def __init__(self, dtype: str, keeps_mask: bool = True) -> None:
        super().__init__()
        self._to = dtype
        self._keeps_mask = keeps_mask

    def call(self, x: Any, mask: Any = None) -> Any:
        if mask is None and self._keeps_mask:
            mask = compat.get_keras_mask(x)
        made = tf.identity(tf.cast(x, self._to))  # a copy, or the mask would attach to x as well
        if mask is not None:
            compat.set_keras_mask(made, mask)
        return made

    def compute_output_spec(self, x: Any, mask: Any = None) -> Any:
        return keras.KerasTensor(x.shape, self._to)


def given_to(node: Any, inner: Any) -> list[Any]:
    """Return the values that a call gives to a nested model's inputs, in the order of these.

    Args:
        node: The call.
        inner: The functional model that is called.
    """
    args, kwargs = node.arguments.args, node.arguments.kwargs
    given = args[0] if args else kwargs.get("inputs")
    wanted = compat.inputs_structure(inner)
    if isinstance(given, dict) and not isinstance(wanted, dict):
        names = [x.name for x in keras.tree.flatten(wanted)]
        given = [given[name] for name in names] if set(names) <= given.keys() else []
    return list(keras.tree.flatten(given))


def masks_given(node: Any, inner: Any) -> list[Any] | None:
    """Return the mask that a call gives with each input, or None for it.

    None instead of a list means that the model takes the masks that its inputs have when it runs.
    """
    mask = node.arguments.kwargs.get("mask")
    if mask is None:
        return None
    masks = list(keras.tree.flatten(mask))
    return [*masks, *[None] * (len(inner.inputs) - len(masks))]


def why_whole(node: Any, inner: Any) -> str:
    """Return why a call of a nested model stays one layer call; "" if its layers can be cut apart."""
    given = given_to(node, inner)
    if len(node.arguments.args) > 1:
        return "it is called with more than one positional argument"
    kwargs = {
        name: value
        for name, value in node.arguments.kwargs.items()
        if name not in ("inputs", "mask", "training") and value is not None
    }
    if kwargs:
        return f"it is called with {', '.join(kwargs)}="
    if len(given) != len(inner.inputs) or not all(isinstance(x, keras.KerasTensor) for x in given):
        return "it is called on other inputs than it was made with"
    for x, wanted in zip(given, inner.inputs, strict=True):
        if not _fits(x, wanted):
            return f"its input {wanted.name!r} of shape {tuple(wanted.shape)} gets shape {tuple(x.shape)}"
    masks = masks_given(node, inner) or []
    if len(masks) > len(given) or not all(x is None or isinstance(x, keras.KerasTensor) for x in masks):
        return "it is called with a mask that is not a tensor of the model for each input"
    return ""


def _fits(given: Any, wanted: Any) -> bool:
    """Return whether a tensor has the sizes that an input fixes."""
    sizes = list(zip(given.shape, wanted.shape, strict=False))
    return len(given.shape) == len(wanted.shape) and all(want in (None, size) for size, want in sizes)
