"""The Python face of the C++ engine: collectives and messages of NumPy and device arrays."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hvpipe.engine.device_array import (
    DeviceArray,
    check_writable,
    common_stream,
    device_array,
    is_device_array,
)
from hvpipe.engine.host_array import as_bytes, as_plain_dtype, check_output, host_array, reducible_dtype
from hvpipe.engine.rank_gpu import open_gpu, open_gpus_of_all
from hvpipe.environment.native import LeftToParent, import_native
from hvpipe.environment.settings import Settings
from hvpipe.errors import HvpipeError
from hvpipe.log import logger
from hvpipe.plan.buckets import WIRE_DTYPE, BucketPlan
from hvpipe.world.objects import packed, packed_for_user, unpacked, unpacked_for_user
from hvpipe.world.world import World

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

Op = Literal["average", "sum"]
Compression = Literal["bf16", "fp16"] | None

_CALL_NAMES = {"average": "allreduce (average)", "sum": "allreduce (sum)"}
_LATE_S = 60.0
"""After this time in a patient wait, hvpipe warns."""
_plan_numbers = itertools.count()  # for all engines: graphs of an earlier session keep their plans' numbers
_NOT_STEPS = -(1 << 62)  # the count of steps while none count
_RECORDED = ("forward", "backward", "update", "step")


def check_compression(compression: str | None) -> None:
    """Raise HvpipeError unless the engine knows this compression."""
    if compression is not None and compression not in WIRE_DTYPE:
        raise HvpipeError(
            f"compression should be None, 'bf16' or 'fp16'. Received: compression={compression!r}"
        )


class EngineClient:
    """Collectives between the ranks of a world; owns the progress thread and the fused buffers.

    With one rank and no MPI, `native` is None: there is no C++ engine, and every collective is a copy.

    All ranks call the blocking methods in the same order. Ranks that disagree get a MismatchError, and a wait
    beyond the time limit raises a DeadlineError. After either error the engine accepts no more calls.
    """

    def __init__(self, world: World, settings: Settings) -> None:
        self.world = world
        self._traced = settings.trace_path is not None
        self._earlier_events: list[tuple[str, str, float, float]] = []  # of engines before a loss of ranks
        self._recorded_s = dict.fromkeys(_RECORDED, 0.0)
        self._recorded_steps = 0
        self._waited_s = 0.0  # in pipelines; data_parallel counts in C++
        self._in_step = False
        self._settings = settings
        self._counted: Counter[str] = Counter()  # by engines before this one, which lost ranks
        self._own_requests = 0
        self._requests_lock = threading.Lock()
        self._gpu_lock = threading.Lock()
        self._two_calls = threading.RLock()  # lengths, then data: no call of another thread comes between
        self._gpu_route: str | None = None
        self._groups: dict[tuple[int, ...], int] = {}
        self._all_on_gpus: bool | None = None
        self.native: Any = world.make_engine(settings)
        self._plans: dict[int, tuple[Any, ...]] = {}  # by number

    def allreduce(
        self, array: Any, op: Op = "average", compression: Compression = None, out: Array | None = None
    ) -> Array:
        """Average or sum an array over all ranks. The result has the same bits on every rank.

        Half types are added in float32, and sums are rounded once for the ranks of a host and again at each
        further host. NCCL, which reduces arrays in device memory, adds them in their own type instead.

        Args:
            array: Of float32, float64, float16 or bfloat16, with the same shape and dtype on every rank. An
                array in device memory needs `out`, and then all ranks must give device arrays. The work is
                enqueued on the stream that the array names, on PyTorch's current stream for a PyTorch tensor,
                otherwise on the default stream.
            op: "average" or "sum".
            compression: "bf16" or "fp16" to send float32 as a half type; None to send it as it is.
            out: The array for the result; may be `array` itself, and otherwise does not overlap it.

        Returns:
            `out`, or a new array of the same shape and dtype.

        Raises:
            HvpipeError: For an array or argument that the engine does not take.
        """
        call = _CALL_NAMES.get(op)
        scale = 1.0 / self.world.size if op == "average" else 1.0
        plain = compression is None and type(array) is np.ndarray and type(out) is np.ndarray
        if plain and call and self.native and self.native.all_reduce_plain(array, out, scale, call):
            return out  # type: ignore[return-value]
        if type(array) is not np.ndarray and is_device_array(array):
            return self._allreduce_on_device(array, op, compression, out)  # type: ignore[no-any-return]
        source = host_array(array)
        dtype = reducible_dtype(source)
        if call is None:
            raise HvpipeError(f"op should be 'average' or 'sum'. Received: op={op!r}")
        if compression is not None:
            check_compression(compression)
        # If `out` is the array itself, the engine reports an array that it may not write.
        in_place = out is source
        target: Array = (
            np.empty_like(source) if out is None else source if in_place else check_output(out, source)
        )
        if self.native is None:
            np.copyto(check_output(target, source), source)
            return target
        if compression is None or dtype != "float32":
            given = source if dtype != "bfloat16" else as_plain_dtype(source)
            if in_place:
                self.native.all_reduce_in_place(given, dtype, scale, call)
            else:
                self.native.all_reduce(given, as_plain_dtype(target), dtype, scale, call)
            return target
        check_output(target, source)
        wire = WIRE_DTYPE[compression]
        native = import_native()
        buffer = np.empty(source.size, np.uint16)
        native.cast(source, "float32", buffer, wire, scale)
        self.native.all_reduce_in_place(buffer, wire, 1.0, f"{call} under {compression}")
        native.cast(buffer, wire, target, "float32", 1.0)
        return target

    def _allreduce_on_device(self, array: Any, op: Op, compression: Compression, out: Any) -> Any:
        if op not in ("average", "sum"):
            raise HvpipeError(f"op should be 'average' or 'sum'. Received: op={op!r}")
        if compression is not None or out is None or not is_device_array(out):
            raise HvpipeError(
                "A device array needs out= (itself or another device array) and takes no compression. "
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
        self.native.all_reduce_device(
            *(source.address, target.address, source.nbytes, source.dtype, scale, _CALL_NAMES[op], stream)
        )
        return out

    def _on_device(self, array: Any) -> DeviceArray:
        self._native_for("A device array")
        return device_array(array, import_native())

    def use_device(self, ordinal: int | None = None) -> str:
        """Open this rank's GPU and, between several ranks, NCCL. All ranks call it together; once is enough.

        Without NCCL, data goes through pinned host memory to MPI.

        Args:
            ordinal: Number of the GPU among those that CUDA_VISIBLE_DEVICES shows; None for the local rank's.

        Returns:
            The route of data on GPUs, for people; if it is not NCCL, with the reason.
        """
        core = self._native_for("A GPU")
        with self._gpu_lock:
            if self._gpu_route is None:
                opened, text = open_gpu(core, self._settings, ordinal)
                if not opened:
                    raise HvpipeError(f"Every rank should open its GPU. Received: {text}")
                self._gpu_route = text
            return self._gpu_route

    @property
    def nccl_connects_all(self) -> bool:
        """Whether data on GPUs goes by NCCL between all ranks, also between hosts; after `use_device`."""
        return bool(self._native_for("NCCL").nccl_connects_all)

    @property
    def messages_by_nccl(self) -> bool:
        """Whether NCCL carries messages and sums of groups of ranks; after `use_device`."""
        return bool(self._native_for("NCCL").messages_by_nccl)

    def use_gpus_of_all(self, ordinal: int | None) -> bool:
        """Tell whether the gradients of all ranks are reduced in the memory of their GPUs.

        The first call opens them, if every rank can open its own. Otherwise rank 0 warns, and the callers
        pass gradients in host memory. The first call is collective in jobs where any rank may have a GPU.

        Args:
            ordinal: As for `use_device`, of the GPU with this rank's gradients; None if host memory has them.

        Raises:
            HvpipeError: If HVPIPE_NCCL_LIBRARY names an NCCL that not all ranks can use.
        """
        core = self._native_for("A GPU")
        with self._gpu_lock:
            if self._all_on_gpus is None:
                route = None
                if self._settings.job_may_have_gpus:
                    route = open_gpus_of_all(core, self._settings, ordinal, self._gpu_route)
                self._all_on_gpus = route is not None
                self._gpu_route = self._gpu_route or route
            return self._all_on_gpus

    def submit_on_device(self, plan: int, bucket: int, tensors: Sequence[Any], scale: float) -> None:
        """Pack a bucket's device arrays, times `scale`, and let its all-reduce start. Does not wait."""
        found = [self._on_device(tensor) for tensor in tensors]
        self.native.submit_device(plan, bucket, [f.span for f in found], scale, common_stream(found))

    def collect_on_device(
        self, plan: int, bucket: int, tensors: Sequence[Any], on_stream: bool = False
    ) -> None:
        """Wait for the sum of a bucket, and enqueue its copy into these device arrays.

        With `on_stream`, the host only waits until NCCL's calls are on the device, and the arrays' stream
        waits for the sum.
        """
        found = [check_writable(self._on_device(tensor)) for tensor in tensors]
        self.native.collect_device(plan, bucket, [f.span for f in found], common_stream(found), on_stream)

    def allgather(self, array: Any) -> Array:
        """Concatenate the arrays of all ranks along axis 0, in rank order.

        Args:
            array: At least one axis; ranks may contribute different lengths of axis 0.
        """
        source = host_array(array)
        if source.ndim == 0:
            raise HvpipeError("allgather needs an array with at least one axis. Received: a scalar")
        if self.native is None:
            return np.array(source)
        what = f"allgather of {source.dtype}{['*', *source.shape[1:]]}"
        row_bytes = int(np.prod(source.shape[1:])) * source.itemsize
        with self._two_calls:
            rows = self._lengths(source.shape[0], what)
            gathered = self._gathered(source.reshape(-1).view(np.uint8), rows * row_bytes, what)
        joined: Array = gathered.view(source.dtype).reshape(int(rows.sum()), *source.shape[1:])
        return joined

    def _lengths(self, mine: int, what: str) -> Array:
        """Return a number of each rank, in rank order."""
        everyones = np.empty(self.world.size, np.int64)
        self.native.gather(
            np.array([mine], np.int64), everyones, [8] * self.world.size, None, f"{what} (lengths)"
        )
        return everyones

    def _gathered(self, mine: Array, lengths: Array, what: str, root: int | None = None) -> Array:
        """Return the bytes of all ranks, in rank order; with a `root`, none on other ranks."""
        receives = root is None or root == self.world.rank
        gathered = np.empty(int(lengths.sum()) if receives else 0, np.uint8)
        self.native.gather(mine, gathered, lengths.tolist(), root, what)
        return gathered

    def broadcast(self, array: Any, root: int = 0) -> Array:
        """Return the array of rank `root` on every rank.

        Args:
            array: The same shape and dtype on every rank. A device array is overwritten with the result.
            root: The rank whose array is sent.
        """
        self._check_root(root)
        if is_device_array(array):
            filled = check_writable(self._on_device(array))
            self.use_device()
            what = f"broadcast of {filled.dtype}{list(filled.shape)} from rank {root}"
            self.native.broadcast_device(*filled.span, root, what, filled.stream)
            return array  # type: ignore[no-any-return]
        target: Array = np.array(host_array(array))
        if self.native is not None:
            what = f"broadcast of {target.dtype}{list(target.shape)} from rank {root}"
            self.native.broadcast(as_plain_dtype(target), root, what)
        return target

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.world.size:
            raise HvpipeError(f"root should be a rank, 0 to {self.world.size - 1}. Received: root={root}")

    def agree(self, what: str, samples: float = 0.0) -> list[float]:
        """Wait until all ranks call this with the same `what`.

        Args:
            what: Names the meeting point; ranks that name another one get a MismatchError.
            samples: A number to share with the other ranks.

        Returns:
            The `samples` of every rank, in rank order.
        """
        return [samples] if self.native is None else list(self.native.agree(what, samples))

    def agree_patiently(self, what: str, limit_s: float, shown: str = "") -> None:
        """Wait until all ranks call this with the same `what`. A rank may be busy with other work for long.

        After a minute, the rank before a missing one warns.

        Args:
            what: Names the meeting point.
            limit_s: The longest wait, in seconds, instead of the engine's time limit.
            shown: What errors of other ranks say that this one is at; `what` if not given.
        """
        if self.native is None:
            return
        late_s = min(_LATE_S, limit_s / 4)

        def warn(missing: int) -> None:
            logger.warning(
                "hvpipe: rank %d on %s has waited %.0f s in %s for rank %d, which is still busy or hangs. "
                "The job ends after %.0f s (HVPIPE_SHUTDOWN_TIMEOUT).",
                *(self.world.rank, self.world.host, late_s, what, missing, limit_s),
            )

        self.native.agree_patiently(what, limit_s, late_s, warn, shown)

    def request(self, bits: int, wanted: bool = True) -> None:
        """Set or clear bits that all ranks see in `requests` after the next exchange. Any thread may call.

        They travel in the record with which every training step and every blocking call begins, so they cost
        no message.
        """
        with self._requests_lock:
            self._own_requests = self._own_requests | bits if wanted else self._own_requests & ~bits
            if self.native is not None:
                self.native.set_requests(self._own_requests)

    def requests(self) -> int:
        """Return the bits that any rank had set in the last exchange; the same on all ranks between steps."""
        if self.native is None or self.world.size == 1:
            return self._own_requests
        return int(self.native.requests())

    def allgather_object(self, value: Any, what: str) -> list[Any]:
        """Return the plain values (see hvpipe.world.objects) of all ranks; errors say `what` the user did."""
        return [value] if self.native is None else self._gathered_objects(value, what)

    def gather_object(self, value: Any, what: str) -> list[Any] | None:
        """Return the plain values of all ranks, in rank order, on rank 0, and None on the others."""
        if self.native is None:
            return [value]
        values = self._gathered_objects(value, what, root=0)
        return values if self.world.rank == 0 else None

    def _gathered_objects(self, value: Any, what: str, root: int | None = None) -> list[Any]:
        payload = np.frombuffer(packed(value), np.uint8)
        with self._two_calls:
            lengths = self._lengths(payload.size, what)
            gathered = self._gathered(payload, lengths, what, root)
        if gathered.size == 0:
            return []
        return [unpacked(part.data) for part in np.split(gathered, np.cumsum(lengths)[:-1])]

    def broadcast_object(self, value: Any, what: str, root: int = 0) -> Any:
        """Return the plain value of rank `root` on every rank."""
        self._check_root(root)
        if self.native is None:
            return value
        sends = self.world.rank == root
        payload: Array = np.frombuffer(packed(value) if sends else b"", np.uint8)
        length = np.array([payload.size], np.int64)
        with self._two_calls:
            self.native.broadcast(length, root, f"{what} (length)")
            data: Array = np.array(payload) if sends else np.empty(int(length[0]), np.uint8)
            self.native.broadcast(data, root, what)
        return value if sends else unpacked(data.data)

    def allgather_any_object(self, value: Any) -> list[Any]:
        """Return the user's values of all ranks, in rank order: pickled if ranks are trusted."""
        trusted = self.world.trusted
        everyone = self.allgather_object(packed_for_user(value, trusted), "allgather_object")
        return [unpacked_for_user(data, trusted) for data in everyone]

    def broadcast_any_object(self, value: Any, root: int = 0) -> Any:
        """Return the user's value of rank `root` on every rank: pickled if ranks are trusted."""
        trusted, sends = self.world.trusted, self.world.rank == root
        data = self.broadcast_object(
            packed_for_user(value, trusted) if sends else b"", f"broadcast_object from rank {root}", root
        )
        return value if sends else unpacked_for_user(data, trusted)

    def send(self, array: Any, peer: int, tag: int, what: str) -> Any:
        """Start to send the bytes of an array to rank `peer`, without waiting.

        Messages with one tag between two ranks keep their order. A device array is sent after the work that
        its stream holds now; it needs `use_device` on all ranks before, and `receive_on_device` on the peer.

        Returns:
            A request. The array must not change until its `wait()` returns.
        """
        if is_device_array(array):
            found = self._on_device(array)
            return self.native.send_device(array, *found.span, peer, tag, what, common_stream([found]))
        return self._native_for(what).send(as_bytes(host_array(array)), peer, tag, what)

    def receive(self, nbytes: int, peer: int, tag: int, what: str) -> Any:
        """Start to receive bytes from rank `peer`; return a request.

        After the request's `wait()`, its `arrived()` returns the bytes as uint8[nbytes].
        """
        return self._native_for(what).receive(nbytes, peer, tag, what)

    def receive_on_device(self, array: Any, peer: int, tag: int, what: str) -> Any:
        """Start to receive bytes from rank `peer` into a device array; return a request.

        The bytes are written after the work that the array's stream holds now. After `wait()` all streams see
        them.
        """
        found = check_writable(self._on_device(array))
        return self.native.receive_device(array, *found.span, peer, tag, what, common_stream([found]))

    def post_send(self, peer: int, tag: int, what: str) -> Any:
        """Reserve a message to rank `peer`; return a request.

        TensorFlow passes the device array later, under the request's `number`.
        """
        return self._native_for(what).post_send(peer, tag, what)

    def post_receive(self, nbytes: int, peer: int, tag: int, what: str) -> Any:
        """Start to receive bytes into the engine's own device memory; return a request.

        TensorFlow takes the bytes later, under the request's `number`.
        """
        return self._native_for(what).post_receive(nbytes, peer, tag, what)

    def add_group(self, ranks: Sequence[int]) -> int:
        """Make a group of ranks (ascending, with this one) that reduce among themselves.

        All ranks of the group call it. Returns the number of the group, the same for the same ranks.
        """
        core, members = self._native_for("add_group"), tuple(ranks)
        if members not in self._groups:
            self._groups[members] = int(core.add_group(list(members)))
        return self._groups[members]

    def group_allreduce(self, group: int, array: Array, what: str) -> Any:
        """Start to sum a C-contiguous array over the ranks of a group, in place; return a request.

        The ranks of the group call it in the same order, and get the same bits.
        """
        core = self._native_for(what)
        return core.group_all_reduce(group, as_plain_dtype(array), reducible_dtype(array), what)

    def post_group_reduce(self, group: int, count: int, dtype: str, what: str) -> Any:
        """Reserve a sum over the ranks of a group, in the engine's own device memory; return a request.

        TensorFlow passes an array of `count` elements later, under the request's `number`. After `wait()` it
        takes the sum under the same number. The ranks of the group call this in the same order.
        """
        return self._native_for(what).post_group_reduce(group, count, dtype, what)

    def send_posted(self, number: int, array: Any) -> None:
        """Hand over the device array of what was posted, as TensorFlow's kernels do with tensors."""
        found = self._on_device(array)
        self.native.send_posted(number, array, *found.span, common_stream([found]))

    def take_posted(self, number: int, array: Any) -> None:
        """Write what has arrived into a device array, behind the work that the array's stream holds."""
        found = check_writable(self._on_device(array))
        self.native.take_posted(number, *found.span, found.dtype, common_stream([found]))

    def _native_for(self, what: str) -> Any:
        if self.native is None:
            raise HvpipeError(f"{what} needs another rank. Received: one rank without MPI")
        return self.native

    def add_plan(self, name: str, plan: BucketPlan, on_device: bool = False) -> int:
        """Make the fused buffers of the buckets that one step reduces together. Not collective.

        Args:
            name: Names the plan in errors and traces.
            plan: The buckets.
            on_device: Whether the gradients are in device memory; then call `use_device` first.

        Returns:
            The number of the plan, which no other plan of this process has.
        """
        if self.native is None:
            raise HvpipeError("A plan needs several ranks or MPI. Received: one rank without MPI")
        rows = [(b.name, b.dtype, b.wire_dtype, list(b.counts), b.priority, b.row) for b in plan.buckets]
        arguments = (name, plan.signature, rows, on_device)
        number = next(_plan_numbers)
        self.native.add_plan(number, *arguments)
        self._plans[number] = arguments
        return number

    def remove_plan(self, plan: int) -> None:
        """Free the buffers of a plan, unless one of its steps is under way. Not collective."""
        self._plans.pop(plan, None)
        if self.native is not None:
            self.native.remove_plan(plan)

    def counters(self) -> dict[str, float]:
        """Return totals since the start: bytes, messages, operations, seconds waited and `recorded`."""
        totals = Counter(self._counted)
        totals.update({} if self.native is None else self.native.counters())
        found: dict[str, float] = dict(totals)
        found |= {f"{category}_s": seconds for category, seconds in self._recorded_s.items()}
        found["exposed_wait_s"] = found.get("exposed_wait_s", 0.0) + self._waited_s
        found["bytes_sent"] = found.get("network_bytes_sent", 0) + found.get("shared_memory_bytes", 0)
        return found

    def take_events(self) -> list[tuple[str, str, float, float]]:
        """Return (category, name, start_s, end_s) of each event recorded since the last call."""
        earlier, self._earlier_events = self._earlier_events, []
        return earlier if self.native is None else [*earlier, *self.native.take_events()]

    @contextlib.contextmanager
    def recorded(self, category: str, name: str) -> Iterator[None]:
        """Time a block for the counters and the trace.

        Args:
            category: "forward", "backward", "update" or "step".
            name: The event's name in the trace.
        """
        now = time.perf_counter if self.native is None else import_native().now
        start_s = now()
        if category == "step" and self.native is not None and self._recorded_steps >= 0:
            self.native.note_step(name, self._recorded_steps)
        self._in_step |= category == "step"
        try:
            yield
        finally:
            self._in_step &= category != "step"
        end_s = now()
        self._recorded_s[category] += end_s - start_s
        if category == "step" and self.native is not None:
            self._recorded_steps += 1
            if self._recorded_steps == 2:  # a pipeline's; steps of data_parallel are counted in C++
                self.native.end_first_steps()
        if self._traced and self.native is not None:
            self.native.log(category, name, start_s, end_s)

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Count and trace no block inside this one: it measures, and its steps train nothing."""
        before = dict(self._recorded_s), self._recorded_steps, self._waited_s, self._traced
        self._recorded_steps, self._traced = _NOT_STEPS, False
        try:
            yield
        finally:
            self._recorded_s, self._recorded_steps, self._waited_s, self._traced = before

    def wait(self, request: Any) -> None:
        """Wait for a request; within a step of training the counter `exposed_wait_s` has the time."""
        start_s = time.perf_counter()
        request.wait()
        if self._in_step:
            self._waited_s += time.perf_counter() - start_s

    def tell_rank_0(self, status: str) -> None:
        """Send rank 0 a text that tells how this rank does. Nothing waits for it. Any thread may call."""
        if self.native is not None:
            self.native.tell_rank_0(status)

    def take_statuses(self) -> list[bytes]:
        """Return the newest text of each rank that has told this one since the last call."""
        return [] if self.native is None else self.native.take_statuses()

    def lose_ranks(self, why: str) -> None:
        """End all communication, because ranks are lost. Any thread may call."""
        if self.native is not None:
            self.native.lose_peer(why)

    def go_on_with(self, world: World, settings: Settings) -> None:
        """Replace the C++ engine, which has failed, by one between the ranks of `world`; collective.

        Plans keep their numbers, so graphs that use them stay valid. The buffers of the old engine stay,
        because messages that were under way may still use them.
        """
        if self.native is not None:
            self.native.stop()
        self._earlier_events = self.take_events()
        totals = {} if self.native is None else self.native.counters()
        self.world, self._settings = world, settings
        self._groups.clear()
        self.native = world.make_engine(settings)
        self._counted.update(totals)
        for number, arguments in list(self._plans.items()):  # a model that is freed now removes its plan
            self.native.add_plan(number, *arguments)
            if number not in self._plans:
                self.native.remove_plan(number)
        self.native.set_requests(self._own_requests)

    def steps_begun(self) -> int:
        """Return how many training steps this rank has announced to the others."""
        return 0 if self.native is None else int(self.native.counters()["steps"])

    def fail_in_step(self, why: str, what: str = "A step") -> None:
        """End all communication with an error, because `what`, which began, will not be complete."""
        if self.native is not None:
            self.native.fail(
                f"{what} ended with an error on this rank after it began. "
                "The other ranks may wait for its tensors, and weights may be updated in part, "
                f"so this process cannot continue training. Received: {why}"
            )

    def leave_to_parent(self) -> None:
        """In a child of os.fork(): forget the engine, which belongs to the parent. Calls then raise."""
        if self.native is not None:
            import_native().leave_to_parent(self.native)
            self.native = LeftToParent()

    def stop(self) -> None:
        """Leave the other ranks, which leave too. Ends the progress thread and frees what MPI holds."""
        if self.native is not None:
            self.native.stop()
