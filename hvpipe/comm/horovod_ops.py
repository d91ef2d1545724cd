"""Runs Horovod's operations on NumPy arrays, by name and from any thread."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

    Array = NDArray[Any]

_DIFFERENCES = ("FailedPreconditionError", "InvalidArgumentError")
"""TensorFlow's errors for ranks that differ and for bad input; others mean that a rank has gone."""


@dataclass(frozen=True)
class HorovodReduction:
    """How ranks reduce: operation, factors, and the number of the process set."""

    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    process_set: int = 0


class HorovodOps:
    """Blocking collectives of Horovod.

    Horovod matches ranks by the names of TensorFlow operations. Eager operations have no names of their own,
    so each is a node of a graph, which a session runs on the calling thread. TensorFlow's thread pool, which
    may be busy with training, is not used.

    Any thread may call. Calls with one name must not overlap.
    """

    def __init__(self, hvd: ModuleType) -> None:
        self._hvd = hvd
        self._tf = tf = hvd.tf  # the TensorFlow that Horovod was built for
        self._sets: dict[int, Any] = {0: hvd.global_process_set}
        self._lock = threading.Lock()
        self._graph = tf.Graph()
        config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
        self._session = tf.compat.v1.Session(graph=self._graph, config=config)
        self._options = tf.compat.v1.RunOptions(inter_op_thread_pool=-1)
        self._nodes: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}

    def close(self) -> None:
        """Free the graph. Nothing may be under way."""
        self._session.close()

    def allreduce(self, name: str, arrays: Sequence[Array], how: HorovodReduction) -> list[Array]:
        """Reduce arrays over the ranks. Horovod has no bfloat16, so it is added and sent as float32."""
        return self._narrow(arrays, self._run("allreduce", name, self._widen(arrays), how))

    def reducescatter(self, name: str, arrays: Sequence[Array], how: HorovodReduction) -> list[Array]:
        """Reduce arrays over the ranks; each rank gets some rows."""
        return self._narrow(arrays, self._run("reducescatter", name, self._widen(arrays), how))

    def allgather(self, name: str, array: Array, process_set: int) -> Array:
        """Concatenate the arrays of all ranks along axis 0."""
        return self._run("allgather", name, [array], process_set)[0]

    def broadcast(self, name: str, array: Array, root: int, process_set: int) -> Array:
        """Return the array of rank `root`."""
        return self._run("broadcast", name, [array], root, process_set)[0]

    def alltoall(self, name: str, array: Array, splits: Sequence[int], process_set: int) -> list[Array]:
        """Send rows to each rank; return the rows received, and how many came from each rank."""
        return self._run("alltoall", name, [array, np.array(splits, np.int32)], process_set)

    def serve(self, call: Any) -> None:
        """Run a call of the C++ queue (`hvpipe._engine.TakenCall`) and tell it how it ended."""
        try:
            number, ranks = self._serve(call)
        except Exception as error:
            mismatch = type(error).__name__ in _DIFFERENCES
            call.fail(f"Horovod's {call.kind} named {call.name} failed: {error}", mismatch)
        else:
            call.finish(number, ranks)

    def _serve(self, call: Any) -> tuple[int, list[int]]:
        """Run a call; return the number and the ranks that answer it, where it asks for them."""
        if call.kind == "barrier":
            self.allgather(f"barrier.{call.name}", np.zeros(1, np.uint8), call.process_set)
        elif call.kind == "join":
            return int(self._run("join", call.name, [])[0]), []
        elif call.kind == "add_process_set":
            ranks = sorted(call.splits)
            return self._add_set(ranks), ranks
        elif call.kind == "remove_process_set":
            return self._remove_set(call.root), []
        else:
            for index, value in enumerate(self._results(call)):
                call.set_output(index, list(value.shape), _bytes_of(value))
        return 0, []

    def _results(self, call: Any) -> list[Array]:
        arrays = [
            call.input(i).view(self._dtype(call.dtype(i))).reshape(call.shape(i)) for i in range(call.tensors)
        ]
        if call.kind in ("allreduce", "reducescatter"):
            how = HorovodReduction(call.op, call.prescale, call.postscale, call.process_set)
            return (self.allreduce if call.kind == "allreduce" else self.reducescatter)(
                call.name, arrays, how
            )
        names = [f"{call.name}.{i}" for i in range(call.tensors)] if call.tensors > 1 else [call.name]
        if call.kind == "allgather":
            return [self.allgather(name, a, call.process_set) for name, a in zip(names, arrays, strict=True)]
        if call.kind == "broadcast":
            return [
                self.broadcast(name, a, call.root, call.process_set)
                for name, a in zip(names, arrays, strict=True)
            ]
        return self.alltoall(call.name, arrays[0], call.splits, call.process_set)

    def _add_set(self, ranks: list[int]) -> int:
        added = self._hvd.add_process_set(ranks)
        self._sets[added.process_set_id] = added
        return int(added.process_set_id)

    def _remove_set(self, number: int) -> int:
        known = self._sets.pop(number, None)
        removed = known is not None and self._hvd.remove_process_set(known)
        return number if removed else -1

    def _dtype(self, name: str) -> Any:
        return self._tf.dtypes.as_dtype(name).as_numpy_dtype

    def _widen(self, arrays: Sequence[Array]) -> list[Array]:
        return [a.astype(np.float32) if a.dtype == self._dtype("bfloat16") else a for a in arrays]

    def _narrow(self, like: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
        return [a.astype(given.dtype, copy=False) for given, a in zip(like, arrays, strict=True)]

    def _run(self, kind: str, name: str, arrays: Sequence[Array], *details: Any) -> list[Array]:
        """Run the nodes of an operation; add them to the graph when it first comes."""
        node = f"hvpipe.{kind}.{_as_node_name(name)}"
        key = (node, tuple(a.dtype for a in arrays), tuple(a.ndim for a in arrays), details)
        with self._lock:
            found = self._nodes.get(key)
            if found is None:
                with self._graph.as_default(), self._tf.device("/cpu:0"):
                    inputs = [
                        self._tf.compat.v1.placeholder(a.dtype, [None] * a.ndim, f"input/{node}")
                        for a in arrays
                    ]
                    found = inputs, self._outputs(kind, f"{len(self._nodes)}/{node}", inputs, *details)
                self._nodes[key] = found
        inputs, outputs = found
        feeds = dict(zip(inputs, arrays, strict=True))
        values: list[Array] = self._session.run(outputs, feeds, options=self._options)
        return values

    def _outputs(self, kind: str, node: str, inputs: list[Any], *details: Any) -> list[Any]:
        """Add the operation to the graph. Horovod ignores what precedes the last slash of `node`."""
        # Not the functions that `hvd` exports: those add casts and averages of their own, and choose names.
        ops = self._hvd.mpi_ops
        if kind == "join":
            return [ops.join()]
        if kind in ("allreduce", "reducescatter"):
            (how,) = details
            arguments = {
                "op": getattr(self._hvd, how.op.capitalize()),
                "prescale_factor": how.prescale,
                "postscale_factor": how.postscale,
                "process_set": self._sets[how.process_set],
                "ignore_name_scope": True,
            }
            reduce = getattr(ops, f"_{kind}")
            return [reduce(x, name=f"{node}.{i}", **arguments) for i, x in enumerate(inputs)]
        *root, number = details
        arguments = {"name": node, "process_set": self._sets[number], "ignore_name_scope": True}
        found = getattr(ops, kind)(*inputs, *root, **arguments)
        return list(found) if isinstance(found, tuple) else [found]


def _as_node_name(name: str) -> str:
    """Return a name with only the characters that TensorFlow allows in the last part of a node's name."""
    return re.sub(r"[^A-Za-z0-9.]", lambda found: f"_{ord(found[0]):x}_", name)


def _bytes_of(array: Array) -> Array:
    """Return the elements as bytes; NumPy's bfloat16 has no buffer that C++ can read."""
    found: Array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return found
