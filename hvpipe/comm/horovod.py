"""The world of ranks over Horovod; the only file that imports horovod."""

from __future__ import annotations

import functools
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvpipe.comm.daemon_pool import DaemonPool
from hvpipe.comm.discover import Launch, unfused_horovod
from hvpipe.comm.horovod_ops import HorovodOps
from hvpipe.comm.native import import_native
from hvpipe.comm.settings import Settings
from hvpipe.errors import DeadlineError, HvpipeError, InitError

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

_CLOCK_ROUNDS = 32


class HorovodWorld:
    """The ranks of Horovod. `open_world` makes it.

    It never ends Horovod: Horovod does that itself at exit, and the program may use it after `close`.
    """

    def __init__(self, hvd: ModuleType, settings: Settings) -> None:
        self._timeout_s = settings.timeout_s
        self._dynamic_sets = settings.dynamic_process_sets
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()
        self.host: str = socket.gethostname()
        carrier = "MPI" if hvd.mpi_enabled() else "Gloo"
        self.library_version = f"Horovod {sys.modules['horovod'].__version__} on {carrier}"
        self._pool = DaemonPool("hvpipe-horovod")
        self._ops = HorovodOps(hvd)
        self._calls: Any = None

    def make_engine(self, settings: Settings) -> Any:
        """Return the C++ engine, whose communication Horovod carries. Collective."""
        hosts = self.allgather_object((self.host, self.local_rank))
        return import_native().Engine.create_over_calls(
            self.make_named_calls(settings),
            first_on_host=hosts.index((self.host, 0)) if (self.host, 0) in hosts else self.rank,
            hosts=sum(1 for _, local_rank in hosts if local_rank == 0),
            timeout_s=settings.engine_timeout_s,
            first_step_timeout_s=settings.engine_first_step_s,
            trace=settings.trace_path is not None,
            stall_warn_s=settings.engine_stall_s,
            flight_path=settings.flight_path,
        )

    def make_named_calls(self, settings: Settings) -> Any:
        """Return the queue of calls, and serve it with Horovod."""
        if self._calls is None:
            self._calls = import_native().QueuedCalls.create(
                self.rank, self.size, self.local_rank, self.local_size
            )
            self._pool.start(self._serve_calls)
        return self._calls

    def connect(self, groups: Iterable[Sequence[int]] = ()) -> None:
        """Prepare messages between any two ranks, and all-reduces among each of these groups of ranks.

        Horovod has no messages. Each pair and each group gets a process set: a message is a broadcast there.
        Collective, with the same groups on all ranks.

        Raises:
            HvpipeError: If more than two ranks need process sets, and Horovod did not start with
                HOROVOD_DYNAMIC_PROCESS_SETS=1.
        """
        calls = self._calls
        known = {tuple(calls.ranks_of(number)) for number in calls.sets()}
        pairs = {(low, high) for high in range(self.size) for low in range(high)}
        missing = sorted((pairs | {tuple(group) for group in groups}) - known)
        if missing and not self._dynamic_sets:
            raise HvpipeError(
                "Messages between ranks use process sets of Horovod, which it must expect from its start. "
                "Set HOROVOD_DYNAMIC_PROCESS_SETS=1, or start with `horovodrun --mpi`. "
                f"Received: {self.size} ranks without it"
            )
        for ranks in missing:
            calls.add_set(list(ranks))

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order (pickled)."""
        payload = np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
        lengths = self._gather("lengths of objects", np.array([payload.size], np.int64))
        joined = memoryview(self._gather("objects", payload).tobytes())
        ends = np.cumsum(lengths)
        return [pickle.loads(joined[end - length : end]) for end, length in zip(ends, lengths, strict=True)]

    def gather_object(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks, in rank order, on rank 0, and None on the others (pickled)."""
        values = self.allgather_object(value)
        return values if self.rank == 0 else None

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the value of rank `root` on every rank (pickled)."""
        if not 0 <= root < self.size:
            raise HvpipeError(f"root should be a rank, 0 to {self.size - 1}. Received: root={root}")
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) if self.rank == root else b""
        # A gather of nothing from all ranks but one, because the others do not know the length.
        joined = self._gather(f"broadcast of an object from rank {root}", np.frombuffer(payload, np.uint8))
        return value if self.rank == root else pickle.loads(joined.tobytes())

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self._gather("barrier", np.zeros(1, np.uint8))

    def clock_offset_s(self) -> float:
        """Return the seconds to add to this rank's `time.monotonic()` to get rank 0's.

        In each round all ranks give their time. Rank 0 gave its own after this rank had begun the round
        before, and before this rank has the result. All rounds together bound the offset; its middle is
        returned.
        """
        earliest_s, latest_s = -float("inf"), float("inf")
        began_s = -float("inf")  # no round before the first one bounds the offset
        for _ in range(_CLOCK_ROUNDS):
            now_s = time.monotonic()
            rank0_s = float(self._gather("clock", np.array([now_s], np.float64))[0])
            earliest_s = max(earliest_s, rank0_s - time.monotonic())
            latest_s = min(latest_s, rank0_s - began_s)
            began_s = now_s
        return 0.0 if self.rank == 0 else (earliest_s + latest_s) / 2

    def abort(self, code: int = 1) -> None:
        """End all ranks now, with this exit code. Does not return.

        Horovod's launcher ends the other ranks when one ends with an error.
        """
        _abort(code)

    def close(self) -> None:
        """End the threads that serve calls. Horovod stays."""
        self._calls = None
        self._ops.close()

    def _gather(self, what: str, array: NDArray[Any]) -> NDArray[Any]:
        """Concatenate one-dimensional arrays of all ranks, in rank order."""
        name = what.replace(" ", "_")
        return self._within_deadline(what, functools.partial(self._ops.allgather, name, array, 0))

    def _within_deadline(self, what: str, call: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        future = self._pool.start(call)
        if not future.wait(self._timeout_s):
            raise DeadlineError(
                f"Rank {self.rank} of {self.size} on {self.host} waited for the {what}: every rank should "
                f"take part within {self._timeout_s:g} s (HVPIPE_TIMEOUT). "
                "Received: nothing from at least one rank"
            )
        result: NDArray[Any] = future.result()
        return result

    def _serve_calls(self) -> None:
        """Run the calls of the queue, each on its own thread: Horovod blocks until all ranks are there."""
        calls = self._calls
        while (call := calls.take()) is not None:
            self._pool.start(functools.partial(self._ops.serve, call))


class StartedWorld:
    """The ranks of the Horovod that runs in this process, even if hvpipe has not joined them."""

    def __init__(self, hvd: ModuleType) -> None:
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.host: str = socket.gethostname()
        self.alone: bool = self.size == 1

    def abort(self, code: int) -> None:
        """End all ranks now, with this exit code. Does not return."""
        _abort(code)


def open_world(launch: Launch, settings: Settings) -> HorovodWorld:
    """Join the ranks of Horovod. Initialises Horovod if it is not initialised yet.

    Args:
        launch: Who launched this process.
        settings: The settings of this rank.

    Raises:
        InitError: If Horovod is missing, or does not join its ranks.
    """
    try:
        import horovod.tensorflow as hvd
    except (ImportError, OSError) as error:
        raise InitError(
            "The back end horovod needs Horovod, built for this TensorFlow: `pip install 'hvpipe[horovod]'`. "
            "For the back end mpi, start with `hvpipe run`, `mpirun` or `horovodrun --mpi`. "
            f"Received: {type(error).__name__}: {error}"
        ) from error
    if not hvd.is_initialized():
        _initialise(hvd)
    if launch.size is not None and launch.size != hvd.size():
        raise InitError(
            f"{launch.launcher} started {launch.size} ranks, but Horovod joined {hvd.size()}. "
            f"Received: launched_size={launch.size}, horovod_size={hvd.size()}"
        )
    return HorovodWorld(hvd, settings)


def _initialise(hvd: ModuleType) -> None:
    try:
        with unfused_horovod():
            hvd.init()
    except Exception as error:
        raise InitError(
            "Horovod should join the ranks: is the `horovodrun` that started this process still running, "
            f"and can this host reach it? Received: {type(error).__name__}: {error}"
        ) from error


def started_world() -> StartedWorld | None:
    """Return the ranks of the running Horovod; None before its start and after its end."""
    hvd = sys.modules.get("horovod.tensorflow")
    return StartedWorld(hvd) if hvd is not None and hvd.is_initialized() else None


def _abort(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
