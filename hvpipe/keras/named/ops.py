"""The TensorFlow ops of the named collectives (csrc/named), their names and their gradients.

Ranks meet by the name of a call. A call without a name takes one from its kind, and in a graph also from its
place there, so ranks that build the same graph give the same names.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from hvpipe.keras.named.process_sets import ranks_of
from hvpipe.keras.ops import library, without_autograph
from hvpipe.session import current

# The numbers are those of csrc/named/call.h, and of Horovod.
OPS = {"average": 0, "sum": 1, "adasum": 2, "min": 3, "max": 4, "product": 5}

_REDUCIBLE = frozenset(
    [tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64, tf.half, tf.bfloat16, tf.float32, tf.float64]
)

_names_in_graphs: weakref.WeakKeyDictionary[Any, dict[tuple[int, str], int]] = weakref.WeakKeyDictionary()


@without_autograph
def allreduce(
    tensors: Sequence[Any],
    op: int,
    factors: tuple[float, float],
    process_set: int,
    name: str | None = None,
) -> list[Any]:
    """Reduce tensors over the ranks of a process set, all of them or none. `factors`: before and after."""
    return _reduced("allreduce", tensors, op, factors, process_set, name)


@without_autograph
def allgather(tensors: Sequence[Any], process_set: int, name: str | None = None) -> list[Any]:
    """Concatenate tensors of all ranks of a process set along the first axis, which may differ by rank."""
    _check_types("allgather", tensors)
    call = _call_name("allgather", name, tensors, process_set)
    return _listed(
        library().hvpipe_named_allgather(
            tensors=tensors, factors=_factors(), call=call, process_set=process_set
        )
    )


@without_autograph
def broadcast(tensors: Sequence[Any], root_rank: int, process_set: int, name: str | None = None) -> list[Any]:
    """Return the tensors of one rank."""
    _check_types("broadcast", tensors)
    call = _call_name("broadcast", name, tensors, process_set)
    return _listed(
        library().hvpipe_named_broadcast(
            tensors=tensors, factors=_factors(), call=call, process_set=process_set, root_rank=root_rank
        )
    )


@without_autograph
def alltoall(tensor: Any, splits: Any, process_set: int, name: str | None = None) -> tuple[Any, Any]:
    """Send `splits[i]` rows to the set's i-th rank; return the rows received, and how many from each rank."""
    _check_types("alltoall", [tensor])
    call = _call_name("alltoall", name, [tensor], process_set)
    received = library().hvpipe_named_alltoall(
        tensor=tensor, splits=splits, factors=_factors(), call=call, process_set=process_set
    )
    return received.received, received.received_splits


@without_autograph
def reducescatter(
    tensors: Sequence[Any],
    op: int,
    factors: tuple[float, float],
    process_set: int,
    name: str | None = None,
) -> list[Any]:
    """Reduce tensors over a process set; each rank gets its part of the first axis."""
    return _reduced("reducescatter", tensors, op, factors, process_set, name)


def _reduced(
    kind: str,
    tensors: Sequence[Any],
    op: int,
    factors: tuple[float, float],
    process_set: int,
    name: str | None,
) -> list[Any]:
    _check_types(kind, tensors, _REDUCIBLE)
    call = _call_name(kind, name, tensors, process_set)
    reduce = getattr(library(), f"hvpipe_named_{kind}")
    return _listed(
        reduce(tensors=tensors, factors=_factors(*factors), call=call, process_set=process_set, reduce_op=op)
    )


@without_autograph
def world_number(what: str, process_set: int = 0) -> Any:
    """Return a number of the world, read when the graph runs.

    It is one of rank, size, local_rank, local_size and included. ValueError: no process set has this number.
    """
    ranks_of(process_set)
    return library().hvpipe_world(what=what, process_set=process_set)


def _check_types(
    kind: str, tensors: Sequence[Any], known: Collection[tf.DType] = _REDUCIBLE | {tf.bool}
) -> None:
    """Raise InvalidArgumentError for a tensor of a type that the op does not take."""
    for tensor in tensors:
        given = tf.as_dtype(tensor.dtype).base_dtype
        if given not in known:
            raise tf.errors.InvalidArgumentError(
                None,
                None,
                f"Tensors of {kind} should be of {', '.join(sorted(each.name for each in known))}. "
                f"Received: {given.name}; cast it to one of these",
            )


def _factors(before: float = 1.0, after: float = 1.0) -> Any:
    """Return the factors, from an op that keeps TensorFlow from computing a call only once."""
    current().named_calls()  # opens the service in a world of one rank
    with tf.device("CPU:0"):
        return library().hvpipe_factors(factors=tf.constant([before, after], tf.float64))


def _listed(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _call_name(kind: str, name: str | None, tensors: Sequence[Any], process_set: int) -> str:
    """Return the name under which the ranks of a process set meet.

    In a graph each call has a name of its own, because its calls may run at the same time: the given one or
    that of its first tensor, numbered from its second use on a process set on. Each set counts for itself,
    because ranks outside of it do not call. Where a function calls another one, the op puts that call before
    the name (csrc/faces/tf_named_ops.cc).
    """
    if tf.executing_eagerly():
        return f"{kind}.{name or 'unnamed'}"
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "building_function", False):
        graph = graph.outer_graph  # branches of tf.cond may run at the same time, too
    given = name or re.sub(r"[^a-zA-Z0-9_]", "_", str(tensors[0].name))
    # An eager tensor that a graph captures has a number as its name, which differs between ranks.
    base = f"{kind}.{'captured' if given[0].isdigit() and not name else given}"
    used = _names_in_graphs.setdefault(graph, {})
    before = used.get((process_set, base), 0)
    used[process_set, base] = before + 1
    return f"{base}.{before}" if before else base


# --- Gradients, as Horovod defines them ------------------------------------------------------------------


@tf.RegisterGradient("HvpipeNamedAllreduce")
def _allreduce_gradient(op: Any, *upstream: Any) -> list[Any]:
    """Return the same reduction of the gradients."""
    factors, process_set = op.inputs[-1], op.get_attr("process_set")
    call = _call_name("allreduce", _gradient_name(op), upstream, process_set)
    reduced = library().hvpipe_named_allreduce(
        tensors=list(upstream),
        factors=factors,
        call=call,
        process_set=process_set,
        reduce_op=op.get_attr("reduce_op"),
    )
    return [*_listed(reduced), None]


@tf.RegisterGradient("HvpipeNamedAllgather")
def _allgather_gradient(op: Any, *upstream: Any) -> list[Any]:
    """Return this rank's rows of the averaged gradients."""
    process_set = op.get_attr("process_set")
    name = _gradient_name(op)
    averaged = allreduce(list(upstream), OPS["average"], (1.0, 1.0), process_set, name)
    place = process_set_place(process_set)
    rows = allgather([tf.shape(x, tf.int64)[:1] for x in op.inputs[:-1]], process_set, f"{name}.rows")
    own = [
        gradient[tf.reduce_sum(lengths[:place]) : tf.reduce_sum(lengths[: place + 1])]
        for gradient, lengths in zip(averaged, rows, strict=True)
    ]
    return [*own, None]


@tf.RegisterGradient("HvpipeNamedBroadcast")
def _broadcast_gradient(op: Any, *upstream: Any) -> list[Any]:
    """Return the averaged gradients on the root, and zeros elsewhere."""
    averaged = allreduce(
        list(upstream), OPS["average"], (1.0, 1.0), op.get_attr("process_set"), _gradient_name(op)
    )
    if current().world.rank != op.get_attr("root_rank"):
        averaged = [gradient * 0 for gradient in averaged]
    return [*averaged, None]


@tf.RegisterGradient("HvpipeNamedAlltoall")
def _alltoall_gradient(op: Any, upstream: Any, _of_splits: Any) -> list[Any]:
    """Send the gradients back to where the rows came from."""
    returned, _ = alltoall(upstream, op.outputs[1], op.get_attr("process_set"), _gradient_name(op))
    return [returned, None, None]


@tf.RegisterGradient("HvpipeNamedReducescatter")
def _reducescatter_gradient(op: Any, *upstream: Any) -> list[Any]:
    """Gather the gradients; of a sum, times the number of ranks."""
    process_set = op.get_attr("process_set")
    ranks = len(ranks_of(process_set))
    factor = tf.reduce_prod(op.inputs[-1]) * (ranks if op.get_attr("reduce_op") == OPS["sum"] else 1)
    scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in upstream]
    return [*allgather(scaled, process_set, _gradient_name(op)), None]


def process_set_place(process_set: int) -> int:
    """Return this rank's place among the ranks of a process set."""
    return ranks_of(process_set).index(current().world.rank)


def _gradient_name(op: Any) -> str:
    # Without the kind, which the gradient's own call adds.
    name = tf.compat.as_str(op.get_attr("call"))
    return f"{name.split('.', 1)[1]}.gradient"
