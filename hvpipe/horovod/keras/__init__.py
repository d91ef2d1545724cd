"""The names of `horovod.keras`: those of `hvpipe.horovod.tensorflow.keras`, with its order of arguments."""

from __future__ import annotations

from typing import Any

from hvpipe.horovod.tensorflow import keras as _hvd
from hvpipe.horovod.tensorflow.keras import *  # noqa: F403
from hvpipe.horovod.tensorflow.keras import Average, Compression, ProcessSet, global_process_set
from hvpipe.horovod.tensorflow.keras import __all__ as _names

# isort: split
# After the star, which has others of these names; `from ... import` would find those.
import hvpipe.horovod.keras.callbacks as callbacks  # type: ignore[no-redef]
import hvpipe.horovod.keras.elastic as elastic  # type: ignore[no-redef]

__all__ = [*_names, "callbacks", "elastic"]


def DistributedOptimizer(  # type: ignore[no-redef]
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras optimizer reduce gradients over ranks: hvpipe.horovod.tensorflow.DistributedOptimizer."""
    return _hvd.DistributedOptimizer(
        *(optimizer, name, device_dense, device_sparse, compression, sparse_as_dense),
        *(gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients),
        *(num_groups, groups, process_set, scale_local_gradients),
    )


def PartialDistributedOptimizer(  # type: ignore[no-redef]
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Make an optimizer that leaves the gradients of some layers on their rank.

    See hvpipe.horovod.tensorflow.keras.PartialDistributedOptimizer.
    """
    return _hvd.PartialDistributedOptimizer(
        *(optimizer, name, device_dense, device_sparse, compression, sparse_as_dense),
        *(gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients),
        *(groups, process_set, local_layers, scale_local_gradients),
    )
