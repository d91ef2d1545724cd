"""Checks the optimizers of a pipeline's ranks: their classes, and that all have the same settings."""

from __future__ import annotations

import contextlib
from typing import Any

import keras

from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras import compat
from hvpipe.session import Session


def compiled_with(model: Any) -> dict[str, Any]:
    """Return the arguments with which a model was compiled; none if it was not.

    An optimizer that has trained the model has slots for all of its weights, so the result has a new one with
    the same settings.
    """
    if not model.compiled:
        return {}
    optimizer = model.optimizer
    if optimizer is not None and optimizer.built:
        optimizer = type(optimizer).from_config(optimizer.get_config())
    return {**compat.compile_config(model), "optimizer": optimizer}


def check_optimizer(optimizer: Any) -> None:
    """Raise HvpipeError for a MultiOptimizer.

    Its inner optimizers would clip, scale and count independently of the other ranks.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    several = getattr(keras.optimizers, "MultiOptimizer", ())
    if isinstance(inner, several):
        raise HvpipeError(
            "A pipeline needs one optimizer for all layers. "
            f"Received: optimizer={type(inner).__name__}, which has one for each group of layers"
        )


def check_same_optimizer(session: Session, optimizer: Any) -> None:
    """Raise MismatchError unless the optimizers of all ranks have the same settings; collective."""
    everyone = session.engine.allgather_object(_settings(optimizer), "the optimizer of a pipeline")
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        odd = [name for name in {**first, **theirs} if first.get(name) != theirs.get(name)]
        if odd:  # the class comes first
            here, there = (f"{odd[0]}={of_rank.get(odd[0], 'not a setting')}" for of_rank in (first, theirs))
            raise MismatchError(
                "A pipeline needs the same optimizer on all ranks, or its stages would update differently. "
                f"Received: {here} on rank 0 and {there} on rank {rank}"
            )


def learning_rate_of(optimizer: Any) -> float:
    """Return the learning rate that callbacks may have changed; 0 if it is a function of the step."""
    rate = compat.learning_rate_variable(clipping_optimizer(optimizer))
    return float(rate) if isinstance(rate, keras.Variable) else 0.0


def clipping_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that clips: with dynamic loss scaling the inner one."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if scaled else optimizer


def _settings(optimizer: Any) -> dict[str, str]:
    """Return an optimizer's class and config, if it has one, without names: each process numbers them."""
    found = {"optimizer": type(optimizer).__name__}
    with contextlib.suppress(NotImplementedError, TypeError, ValueError):
        found |= {
            name: repr(_comparable(value)) for name, value in _comparable(optimizer.get_config()).items()
        }
    return found


def _comparable(value: Any) -> Any:
    """Return plain values without names; for other objects the class, as their repr may hold an address."""
    if isinstance(value, dict):
        return {key: _comparable(of_key) for key, of_key in sorted(value.items()) if key != "name"}
    if isinstance(value, (list, tuple)):
        return [_comparable(one) for one in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
