"""The names of `horovod.tensorflow.keras`, on hvpipe and with Keras 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvpipe.horovod import tensorflow as _hvd
from hvpipe.horovod.tensorflow import broadcast_global_variables
from hvpipe.horovod.tensorflow.keras import callbacks, elastic
from hvpipe.horovod.world import (
    Adasum,
    Average,
    ProcessSet,
    Sum,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hvpipe.keras.horovod_callbacks import load_model as _load_model
from hvpipe.keras.named.compression import Compression
from hvpipe.keras.named.gradients import wrap_optimizer

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras optimizer reduce gradients over ranks: hvpipe.horovod.tensorflow.DistributedOptimizer."""
    return _hvd.DistributedOptimizer(
        optimizer,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer as `DistributedOptimizer` does, but leave the gradients of some layers on their rank.

    Args:
        optimizer: A Keras optimizer.
        name: Changes nothing.
        device_dense: Changes nothing.
        device_sparse: Changes nothing.
        compression: As for `DistributedOptimizer`.
        sparse_as_dense: As for `DistributedOptimizer`.
        gradient_predivide_factor: As for `DistributedOptimizer`.
        op: As for `DistributedOptimizer`.
        backward_passes_per_step: As for `DistributedOptimizer`.
        average_aggregated_gradients: As for `DistributedOptimizer`.
        groups: As for `DistributedOptimizer`.
        process_set: The ranks that take part.
        local_layers: A built Keras layer or several.
        scale_local_gradients: Whether their gradients are divided by the number of ranks.

    Returns:
        The same optimizer.

    Raises:
        ValueError: If `local_layers` are not Keras layers.
    """
    options = _hvd.gradient_options(
        *(op, compression, gradient_predivide_factor, 0, groups, sparse_as_dense, process_set),
        scale_local_gradients,
    )
    local = [v for layer in _hvd.layers_given(local_layers) for v in layer.trainable_weights]
    return wrap_optimizer(optimizer, options, backward_passes_per_step, average_aggregated_gradients, local)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a value over ranks; return a tensor."""
    return _hvd.allreduce(
        value,
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the values of all ranks along the first axis; return a tensor."""
    return _hvd.allgather(value, name, process_set=process_set)


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the value of one rank as a tensor."""
    return _hvd.broadcast(value, root_rank, name, process_set=process_set)


def reducescatter(
    value: Any, name: str | None = None, op: int = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Reduce a value and return this rank's part of the first axis as a tensor."""
    return _hvd.reducescatter(value, op=op, name=name, process_set=process_set)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a compiled model, and let its optimizer reduce gradients over ranks.

    Args:
        filepath: A file that `model.save` wrote.
        custom_optimizers: Optimizer classes that Keras does not know.
        custom_objects: Other classes and functions that Keras does not know, by name.
        compression: Compression.none, fp16 or bf16.
        legacy_opts: False: Keras 3 has no optimizers of `keras.optimizers.legacy`.

    Returns:
        The model.

    Raises:
        ValueError: For `legacy_opts=True`.
    """
    if legacy_opts:
        raise ValueError(
            "legacy_opts should be False: Keras 3 has no keras.optimizers.legacy. Load the model with "
            "compile=False, and compile it with an optimizer of keras.optimizers. Received: legacy_opts=True"
        )
    known = {kind.__name__: kind for kind in custom_optimizers or []}
    model = _load_model(filepath, {**known, **(custom_objects or {})})
    DistributedOptimizer(model.optimizer, compression=compression)
    return model
