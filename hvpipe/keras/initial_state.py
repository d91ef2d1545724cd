"""The initial state: gives all ranks the same state before the first step and before every `fit`."""

from __future__ import annotations

import functools
import logging
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import (
    build_from_batch,
    compiled_loss,
    compiled_metrics,
    compute_loss,
    compute_output_spec,
    has_keras_moments,
    layers_in,
    outputs_structure,
    unlisted_variables,
)
from hvpipe.keras.graph.layer_graph import functional_of
from hvpipe.keras.same_model import check_same_model
from hvpipe.keras.variables import broadcast_variables, check_same_variables
from hvpipe.session import Session

logger = logging.getLogger("hvpipe")

# A model with one of these methods may compare something other than its outputs with its targets.
_COMPARING = ("train_step", "compute_loss", "compute_metrics")


def without_xla(session: Session, model: Any) -> None:
    """Switch `jit_compile` off, before the model's train function is made: XLA cannot compile communication.

    Keras switches it on by default if TensorFlow sees a GPU.
    """
    if session.world.size == 1 or not model.jit_compile:
        return
    if session.world.rank == 0:
        logger.warning(
            "hvpipe: jit_compile is switched off for model %s: XLA cannot compile the communication "
            "that runs inside the step. docs/pitfalls.md says how to compile what is around it.",
            model.name,
        )
    model.jit_compile = False


def start_equal(session: Session, model: Any, batch: Any) -> None:
    """Build the model for `batch` (or its spec) if needed, and give all ranks rank 0's state; collective."""
    if model.optimizer is None or not hasattr(model.optimizer, "apply"):
        raise HvpipeError(
            "data_parallel needs a model that is compiled with one optimizer; if train_step uses several, "
            "wrap each in hvpipe.keras.DistributedOptimizer instead. "
            f"Received: model {model.name} with optimizer={model.optimizer!r}"
        )
    build_state(model, batch)
    check_same_variables(session, model.trainable_variables)
    if session.world.size > 1:
        check_same_model(session, model)
    broadcast_model(model, model.optimizer.variables)


def build_state(model: Any, batch: Any) -> None:
    """Let model, optimizer, loss and metrics create their variables for `batch` (or its spec) if needed."""
    _build(model, batch)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    _build_loss_and_metrics(model, batch)


def is_built(model: Any) -> bool:
    """Return whether all of a model's variables exist."""
    return all(layer.built for layer in layers_in(model))


def broadcast_model(model: Any, more: Sequence[Any] = (), root_rank: int = 0) -> None:
    """Set the model's variables, and these, to the root's values on every rank; collective."""
    broadcast_variables([*model.variables, *more], root_rank)
    settle(model)


def settle(model: Any) -> None:
    """After variables were assigned, let layers recompute the constants that they derive from them."""
    found = normalizing(model)
    for layer in found:
        layer.finalize_state()
    if found:
        # Their graphs hold the old constants.
        model.test_function = model.predict_function = None


def normalizing(model: Any) -> list[Any]:
    """Return the layers of a model, or inside a layer, that derive constants from variables."""
    return [layer for layer in layers_in(model) if isinstance(layer, keras.layers.Normalization)]


def warn_of_own_batches(session: Session, model: Any) -> None:
    """Warn of layers that ask for the statistics of all ranks' batches, and do not get them."""
    asking = [
        layer.name
        for layer in layers_in(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and layer.synchronized
        and has_keras_moments(layer)
    ]
    if asking and session.world.rank == 0 and session.world.size > 1:
        logger.warning(
            "hvpipe: BatchNormalization(synchronized=True) is not synchronized: each rank normalises by its "
            "own batch, and the moving statistics become the mean over ranks at the end of an epoch. Pass "
            "sync_batch_norm=True to data_parallel to normalise over all ranks. Received: layer %s",
            ", ".join(asking[:3]) + (" ..." if len(asking) > 3 else ""),
        )


def checksums(model: Any, statistics: Sequence[Any], slots: Sequence[Any]) -> tuple[float, float]:
    """Return checksums of the state that all ranks share (weights, `slots`), and of `statistics`."""
    kept = {id(v) for v in statistics}
    weights = [v for v in model.weights if id(v) not in kept]
    floating = [v for v in statistics if keras.backend.is_float_dtype(v.dtype)]
    return _checksum([*weights, *slots]), _checksum(floating)


def take_rank_0s(session: Session, model: Any, sums: Sequence[float], when: str) -> bool:
    """If the ranks' checksums differ, give all ranks rank 0's state, and warn on rank 0; collective."""
    others = [str(rank) for rank, found in enumerate(sums) if found != sums[0]]
    if not others:
        return False
    if session.world.rank == 0:
        logger.warning(
            "hvpipe: weights or optimizer state of model %s on rank %s differed from rank 0 %s: "
            "all ranks continue with rank 0's.",
            model.name,
            ", ".join(others[:3]) + (" ..." if len(others) > 3 else ""),
            when,
        )
    broadcast_model(model, shared_slots(model.optimizer))
    return True


def shared_slots(optimizer: Any) -> list[Any]:
    """Return the optimizer's variables that are equal on all ranks: without accumulated gradients."""
    listed = [v for v in optimizer.variables if not v.name.endswith("gradient_accumulator")]
    return [*listed, *unlisted_variables(optimizer).values()]


def other_optimizers(model: Any) -> dict[str, Any]:
    """Return the built optimizers that a model and its layers hold beside the compiled one, by name.

    A `train_step` with several optimizers has them there. Models inside were compiled for a training of their
    own: their `optimizer` does not count.
    """
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    compiled = {id(each) for each in (model.optimizer, inner, *getattr(inner, "optimizers", ()))}
    return {
        f"{place}.{name}": value
        for place, layer in enumerate(layers_in(model))
        for name, value in sorted(vars(layer).items(), key=lambda item: item[0])
        if isinstance(value, keras.optimizers.Optimizer)
        and name != "optimizer"
        and id(value) not in compiled
        and value.built
    }


def _checksum(variables: Sequence[Any]) -> float:
    found = 0
    for variable in variables:
        value = np.ascontiguousarray(variable.numpy())
        found = zlib.crc32(value.reshape(-1).view(np.uint8).data, found)
    return float(found)


def _build(model: Any, batch: Any) -> None:
    if is_built(model):
        return
    try:
        build_from_batch(model, batch)
    except (NotImplementedError, RuntimeError, ValueError):
        # A model with a train_step but no call(): its layers have been built one by one.
        if not all(layer.built for layer in layers_in(model, include_self=False)):
            raise


def _build_loss_and_metrics(model: Any, batch: Any) -> None:
    """Let loss and metrics create their variables, if the model's graph describes its outputs.

    Otherwise they create them inside the step, and TensorFlow traces it twice.
    """
    functional = None if model.run_eagerly else functional_of(model)
    parts = (compiled_loss(model), compiled_metrics(model))
    if functional is None or all(part is None or part.built for part in parts):
        return
    if any(getattr(type(model), name) is not getattr(keras.Model, name) for name in _COMPARING):
        return
    specs = keras.tree.flatten(batch)
    if not all(isinstance(s, (tf.Tensor, tf.TensorSpec)) and s.shape.rank is not None for s in specs):
        return
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(keras.tree.map_structure(_symbol_of, batch))
    y_pred = outputs_structure(functional)
    compute_output_spec(model.compute_metrics, x, y, y_pred, sample_weight=sample_weight)
    compute = functools.partial(compute_loss, model)
    compute_output_spec(compute, x, y, y_pred, sample_weight=sample_weight, training=False)


def _symbol_of(leaf: Any) -> Any:
    return keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype))
