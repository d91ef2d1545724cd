"""What comes before the first step: a model that is built, and the same state on all ranks."""

from __future__ import annotations

from typing import Any

from hvpipe.errors import HvpipeError
from hvpipe.keras.variables import broadcast_variables, check_same_variables
from hvpipe.session import Session


def start_equal(session: Session, model: Any, batch: Any) -> None:
    """Build what is not built for `batch` (or its spec), and give all ranks rank 0's state; collective."""
    if model.optimizer is None or not hasattr(model.optimizer, "apply"):
        raise HvpipeError(
            "data_parallel wants a model that is compiled with one optimizer; where train_step uses several, "
            "wrap each in hvpipe.keras.DistributedOptimizer instead. "
            f"Received: model {model.name} with optimizer={model.optimizer!r}"
        )
    _build(model, batch)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    check_same_variables(session, model.trainable_variables)
    broadcast_variables([*model.variables, *model.optimizer.variables])


def _build(model: Any, batch: Any) -> None:
    if all(layer.built for layer in model._flatten_layers()):
        return
    try:
        model._symbolic_build(data_batch=batch)
    except (NotImplementedError, RuntimeError, ValueError):
        # A model with a train_step but no call(): its layers have been built one by one.
        if not all(layer.built for layer in model._flatten_layers(include_self=False)):
            raise
