"""The names of `horovod.tensorflow`, on hvpipe.

Ranks may call the collectives in any order; they meet by name. Errors are those of TensorFlow: see
hvpipe.keras.named.tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvpipe.horovod.tensorflow import elastic
from hvpipe.horovod.world import *  # noqa: F403
from hvpipe.horovod.world import OP_NAMES, Adasum, Average, ProcessSet, Sum, global_process_set, size
from hvpipe.horovod.world import __all__ as _names_of_world
from hvpipe.keras.data_parallel import custom_loops as _planned
from hvpipe.keras.gpu import has_gpu
from hvpipe.keras.named import functions as _functions
from hvpipe.keras.named import objects as _objects
from hvpipe.keras.named import tensors as _tensors
from hvpipe.keras.named.compression import Compression
from hvpipe.keras.named.gradients import GradientOptions, ReducingTape, wrap_optimizer
from hvpipe.keras.named.process_sets import number_of
from hvpipe.keras.named.sync_batch_norm import SyncBatchNormalization
from hvpipe.session import current

__all__ = [
    *_names_of_world,
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_num_rank_power_of_2",
    "elastic",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]


def _reduction(
    op: int | None,
    average: bool | None,
    compression: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> _tensors.Reduction:
    if average is not None:
        if op is not None:
            raise ValueError(f"Give op or average, not both. Received: op={op}, average={average}")
        op = Average if average else Sum
    chosen = Average if op is None else op
    if type(chosen) is not int or chosen not in range(len(OP_NAMES)):
        raise ValueError(f"op should be Average, Sum, Adasum, Min, Max or Product. Received: op={op!r}")
    name = OP_NAMES[chosen]
    # Horovod raises the same errors.
    if name == "adasum" and process_set.process_set_id != 0:
        number = process_set.process_set_id
        raise NotImplementedError(
            f"Adasum works on all ranks, not on a process set. Received: process set {number}"
        )
    if name == "adasum" and not check_num_rank_power_of_2(size()):
        raise NotImplementedError(f"Adasum needs 2, 4, 8, ... ranks. Received: {size()} ranks")
    return _tensors.Reduction(name, prescale_factor, postscale_factor, compression, process_set)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of 2."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow sees a GPU."""
    return has_gpu()


# --- Collectives ------------------------------------------------------------------------------------------


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor, a variable or IndexedSlices over the ranks of a process set.

    Args:
        tensor: Of the same shape and dtype on all ranks. IndexedSlices are gathered instead.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        device_dense: Changes nothing.
        device_sparse: Changes nothing.
        compression: A class such as Compression.fp16.
        op: Average (if None), Sum, Min, Max, Product or Adasum.
        prescale_factor: Factor before the reduction. Integers are scaled in float64 and cut off.
        postscale_factor: Factor after it.
        name: Ranks meet by this name; None to take it from the graph.
        process_set: The ranks that take part.
        ignore_name_scope: Changes nothing: name scopes are never part of a name that is given.

    Returns:
        A tensor of the same shape and dtype, or IndexedSlices.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, if shapes, dtypes, operations or factors differ.
        tf.errors.InvalidArgumentError: If this rank is not in the process set, or the name is in use.
    """
    how = _reduction(op, average, compression, prescale_factor, postscale_factor, process_set)
    return _tensors.allreduce(tensor, how, name)


def _listed(tensors: Any) -> list[Any]:
    if isinstance(tensors, (list, tuple)):
        return list(tensors)
    raise ValueError(f"tensors should be a list of tensors. Received: {type(tensors).__name__}")


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors together. Arguments and errors are those of `allreduce`."""
    if not (tensors := _listed(tensors)):
        return []
    how = _reduction(op, average, compression, prescale_factor, postscale_factor, process_set)
    return _tensors.grouped_allreduce(tensors, how, name)


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate the tensors of all ranks along the first axis, which may differ by rank."""
    return _tensors.allgather([tensor], process_set, name)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Concatenate each of several tensors of all ranks along its first axis."""
    return _tensors.allgather(tensors, process_set, name) if tensors else []


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of one rank, which is a rank of the world, on all ranks of the process set."""
    return _tensors.broadcast([tensor], root_rank, process_set, name)[0]


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Set variables to one rank's values; return the values."""
    return _objects.broadcast_variables(variables, root_rank, process_set, name)


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> list[Any]:
    """Set variables to one rank's values."""
    return _objects.broadcast_variables(list(variables), root_rank, process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise RuntimeError: TensorFlow 2 keeps no list of all variables."""
    raise RuntimeError(
        "broadcast_global_variables belongs to graphs of TensorFlow 1. Use broadcast_variables("
        "model.variables + optimizer.variables, root_rank), or callbacks.BroadcastGlobalVariablesCallback. "
        f"Received: root_rank={root_rank}"
    )


def __getattr__(name: str) -> Any:
    if name == "BroadcastGlobalVariablesHook":
        raise AttributeError(
            "BroadcastGlobalVariablesHook belongs to sessions of TensorFlow 1. Use broadcast_variables, or "
            "callbacks.BroadcastGlobalVariablesCallback of hvpipe.horovod.tensorflow.keras."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of one rank on all ranks (pickled)."""
    return _objects.broadcast_object(obj, root_rank, process_set, name)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function of one object that calls `broadcast_object`."""
    return lambda obj: broadcast_object(obj, root_rank, None, name or "broadcast_object_fn", process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, in rank order (pickled)."""
    return _objects.allgather_object(obj, process_set, name or "object")


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every rank, and receive rows from every rank.

    Args:
        tensor: Rows in the order of the ranks that get them.
        splits: Number of rows for each rank; None to share them out evenly.
        name: Ranks meet by this name; None to take it from the graph.
        ignore_name_scope: Changes nothing.
        process_set: The ranks that take part.

    Returns:
        The received rows; with `splits` also the number of rows from each rank.

    Raises:
        tf.errors.InvalidArgumentError: If the splits do not fit the tensor or the number of ranks.
    """
    received, counts = _tensors.alltoall(tensor, splits, process_set, name)
    return received if splits is None else (received, counts)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor and give each rank its part of the first axis. Arguments are those of `allreduce`."""
    how = _reduction(op, None, compression, prescale_factor, postscale_factor, process_set)
    return _tensors.grouped_reducescatter([tensor], how, name)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors, and give each rank its part of their first axes."""
    if not (tensors := _listed(tensors)):
        return []
    how = _reduction(op, None, compression, prescale_factor, postscale_factor, process_set)
    return _tensors.grouped_reducescatter(tensors, how, name)


def join() -> Any:
    """Wait until all ranks have called this, as hvpipe.keras.join; return the last one as an int32 tensor."""
    return _functions.join_as_tensor()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called this."""
    current().named_calls().barrier("barrier", number_of(process_set))


# --- Training ---------------------------------------------------------------------------------------------


def gradient_options(
    op: int,
    compression: Any,
    gradient_predivide_factor: float,
    num_groups: int,
    groups: Any,
    sparse_as_dense: bool,
    process_set: ProcessSet,
    scale_local_gradients: bool,
) -> GradientOptions:
    """Return Horovod's arguments about gradients as one object."""
    how = _reduction(op, None, compression, 1.0, 1.0, process_set)
    chosen = num_groups if num_groups and groups is None else groups
    return GradientOptions(how, gradient_predivide_factor, chosen, sparse_as_dense, scale_local_gradients)


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a Keras optimizer reduce gradients over ranks before it updates.

    An average over all ranks runs in hvpipe's planned buckets, which overlap with the rest of backward.
    `register_local_var(variable)` of the optimizer keeps the gradients of a variable on their rank.

    Args:
        optimizer: A Keras optimizer. Its `apply` is replaced on the instance.
        name: Changes nothing.
        use_locking: Changes nothing.
        device_dense: Changes nothing.
        device_sparse: Changes nothing.
        compression: Compression.none, fp16 or bf16.
        sparse_as_dense: Whether sparse gradients are made dense first.
        backward_passes_per_step: How many calls make one update; their gradients are added up.
        op: Average, Sum, Min, Max or Product.
        gradient_predivide_factor: Divides before the sum of an average, and multiplies after it.
        average_aggregated_gradients: Whether the added-up gradients are divided by their number.
        num_groups: Horovod's older name of `groups`.
        groups: How many groups of gradients travel, or lists of variables.
        process_set: The ranks that take part.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.

    Returns:
        The same optimizer.

    Raises:
        ValueError: For op=Adasum, which works on tensors only, and for arguments that do not fit together.
    """
    if op == Adasum:
        raise ValueError("op=Adasum works in allreduce, not with Keras optimizers.")
    options = gradient_options(
        *(op, compression, gradient_predivide_factor, num_groups, groups, sparse_as_dense, process_set),
        scale_local_gradients,
    )
    if options.plain and backward_passes_per_step == 1:
        _planned.DistributedOptimizer(optimizer, compression=compression.name)

        def register_local_var(variable: Any) -> None:
            # The planned buckets hold all gradients, so from now on the rest is reduced by name.
            vars(optimizer).pop("apply", None)
            wrap_optimizer(optimizer, options).register_local_var(variable)

        optimizer.register_local_var = register_local_var
        return optimizer
    return wrap_optimizer(optimizer, options, backward_passes_per_step, average_aggregated_gradients)


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> ReducingTape:
    """Return a tape whose `gradient` reduces over ranks. Arguments are those of `DistributedOptimizer`."""
    options = gradient_options(
        *(op, compression, gradient_predivide_factor, num_groups, groups, sparse_as_dense, process_set),
        scale_local_gradients,
    )

    def planned(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return _planned.average_gradients(gradients, variables, compression=compression.name)

    return ReducingTape(gradtape, options, planned)


def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> ReducingTape:
    """Return a tape like `DistributedGradientTape` that leaves the gradients of some layers on their rank.

    Args:
        gradtape: The tape to record with.
        device_dense: Changes nothing.
        device_sparse: Changes nothing.
        compression: As for `DistributedGradientTape`.
        sparse_as_dense: As for `DistributedGradientTape`.
        op: As for `DistributedGradientTape`.
        gradient_predivide_factor: As for `DistributedGradientTape`.
        num_groups: As for `DistributedGradientTape`.
        groups: As for `DistributedGradientTape`.
        process_set: The ranks that take part.
        local_layers: A Keras layer or several.
        scale_local_gradients: Whether their gradients are divided by the number of ranks.

    Returns:
        The tape.

    Raises:
        ValueError: If `local_layers` are not Keras layers.
    """
    tape = DistributedGradientTape(
        *(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor),
        *(num_groups, groups, process_set, scale_local_gradients),
    )
    for layer in layers_given(local_layers):
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


def layers_given(layers: Any) -> list[Any]:
    """Return one layer or several as a list; raise ValueError for anything else."""
    listed = [] if layers is None else [layers] if hasattr(layers, "trainable_weights") else list(layers)
    if not all(hasattr(layer, "trainable_weights") for layer in listed):
        raise ValueError(f"local_layers should be Keras layers. Received: {layers!r}")
    return listed
