"""Variables on all ranks: their names, how they are compared and broadcast, and which ranks combine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras.compat import own_statistics
from hvpipe.plan.buckets import cut_buckets
from hvpipe.session import Session, current

_PIECE_BYTES = 32 << 20
# What BatchNormalization keeps of the batches that it has seen; the last three with renorm=True (Keras 3.14).
_STATISTICS = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")


def native(variable: Any) -> Any:
    """Return the tf.Variable inside a Keras variable; a tf.Variable stays as it is."""
    return variable.value if hasattr(variable, "overwrite_with_gradient") else variable


def identity(variable: Any) -> int:
    """Return a key that identifies the variable. Paths do not: two layers may have the same name."""
    return id(native(variable))


def name_of(variable: Any) -> str:
    """Return a name that is the same on all ranks: the path without the numbers that Keras appends.

    Those numbers differ if one rank has made more layers before, for example for another model.
    """
    return re.sub(r"_\d+(?=[/:]|$)", "", str(getattr(variable, "path", None) or variable.name))


def check_not_overwritten(variables: Sequence[Any], adds: str) -> None:
    """Raise HvpipeError if `adds` would add up gradients that are new values (`overwrite_with_gradient`)."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise HvpipeError(
                f"{adds} adds gradients up, but those of float8 layers are the new values of their scales: "
                f"use another dtype policy. Received: variable {name_of(variable)}"
            )


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Set variables on every rank to the root's values, bit for bit.

    Collective: all ranks call it, with variables of the same shapes and dtypes in the same order.

    Args:
        variables: Keras or TensorFlow variables of any shape and dtype, for example
            `[*model.variables, *optimizer.variables]`.
        root_rank: The rank whose values all ranks get.

    Raises:
        MismatchError: On every rank, if shapes or dtypes differ between ranks. The message names the first
            difference.
        HvpipeError: Before `hvpipe.init()`.

    Example:
        ```python
        optimizer.build(model.trainable_variables)
        hk.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
        ```
    """
    session = current()
    if session.world.size == 1 or not variables:
        return
    check_same_variables(session, variables)
    # In pieces, because the values of a large model may not fit into memory several times.
    sizes_bytes = [_nbytes(v) for v in variables]
    for members in cut_buckets(sizes_bytes, _PIECE_BYTES):
        values = [np.asarray(variables[place].numpy()) for place in members]
        parts = [value.reshape(-1).view(np.uint8) for value in values]
        packed = parts[0] if len(parts) == 1 and parts[0].flags.writeable else np.concatenate(parts)
        for start in range(0, len(packed), _PIECE_BYTES):
            piece = packed[start : start + _PIECE_BYTES]
            # A new optimizer's slots are zero on all ranks.
            if any(session.engine.agree("the values of variables", float(piece.any()))):
                piece[:] = session.engine.broadcast(piece, root_rank)
        start = 0
        for place, value in zip(members, values, strict=True):
            end = start + value.nbytes
            variables[place].assign(packed[start:end].view(value.dtype).reshape(value.shape))
            start = end


def _nbytes(variable: Any) -> int:
    if None in variable.shape:
        return int(np.asarray(variable.numpy()).nbytes)
    return int(np.prod(variable.shape)) * int(tf.as_dtype(variable.dtype).size)


def check_same_variables(session: Session, variables: Sequence[Any]) -> None:
    """Raise MismatchError, on every rank, unless all ranks have variables of the same shapes and dtypes."""
    mine = [(name_of(v), tuple(v.shape), str(getattr(v.dtype, "name", v.dtype))) for v in variables]
    what = "comparing the model's variables"
    everyone: list[list[tuple[Any, ...]]] = session.engine.allgather_object(mine, what)
    for rank, theirs in enumerate(everyone):
        if [row[1:] for row in theirs] == [row[1:] for row in everyone[0]]:
            continue
        raise MismatchError(
            "All ranks should train the same model. "
            f"Received: {_describe_difference(everyone[0], theirs, rank)}"
        )


def untrained_in(layers: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return the variables that layers made not to be trained, and how ranks combine the values of each.

    That is the variable's `aggregation` in Keras: "mean", "sum", "only_first_replica", or "none", which is
    also what a variable has that was made without one. BatchNormalization's statistics are means.
    """
    found: dict[int, tuple[Any, str]] = {}
    for layer in layers:
        statistics: list[Any] = []
        if isinstance(layer, keras.layers.BatchNormalization):
            statistics = [getattr(layer, name, None) for name in _STATISTICS]
        for variable in own_statistics(layer):
            declared = str(variable.aggregation)
            if declared == "none" and any(variable is each for each in statistics):
                declared = "mean"
            if found.get(id(variable), (None, "none"))[1] == "none":  # several layers may list it
                found[id(variable)] = variable, declared
    return list(found.values())


def _describe_difference(first: list[tuple[Any, ...]], other: list[tuple[Any, ...]], rank: int) -> str:
    for place, (ours, theirs) in enumerate(zip(first, other, strict=False)):
        if ours[1:] != theirs[1:]:
            return f"variable {place} is {_describe(ours)} on rank 0 and {_describe(theirs)} on rank {rank}"
    return f"{len(first)} variables on rank 0 and {len(other)} on rank {rank}"


def _describe(row: tuple[Any, ...]) -> str:
    name, shape, dtype = row
    return f"{name} {dtype}{list(shape)}"
