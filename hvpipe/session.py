"""The default session: the ranks that `hvpipe.init` joined, and the public functions on them."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hvpipe import log
from hvpipe.comm.discover import Settings, discover
from hvpipe.comm.discover import settings as read_settings
from hvpipe.comm.world import World, open_world, started_world
from hvpipe.errors import HvpipeError
from hvpipe.monitor.core_binding import tell_placement

if TYPE_CHECKING:
    from typing import Protocol

    from numpy.typing import NDArray

    class SampleCounter(Protocol):
        def total(self) -> float: ...

    from hvpipe.comm.engine import Compression, Engine, Op
    from hvpipe.comm.mpi import StartedWorld
    from hvpipe.monitor.status_reporter import LiveReport, Progress
    from hvpipe.monitor.utilization import Sampler

__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "counters",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
    "trace_path",
]


class Session:
    """One joined world: its engine, its clocks and what is written at the end. Closed by `close`."""

    def __init__(self, settings: Settings) -> None:
        from hvpipe.comm.engine import Engine, import_native

        launch = discover()
        self.world: World = open_world(launch, settings)
        log.show(settings.log_level, self.world.rank)
        tell_placement(self.world, launch)
        self.settings = settings = _as_rank_0(settings, self.world)
        self.engine: Engine = Engine(self.world, settings, settings.ranks_per_host)
        self.step_durations_s: list[float] = []
        self.sample_counters: list[SampleCounter] = []
        self.reducers: dict[Any, Any] = {}  # by what they reduce; see keras.distributed
        self.announcements = 0  # of steps that reduce, counted when their graph is made
        self.clock_reading = (0.0, 0.0)  # see hvpipe.trace.Clock
        self.sampler: Sampler | None = None
        self.live_report: LiveReport | None = None
        if self.engine.core is not None:
            import_native().set_default(self.engine.core)
        self._start_sampler()

    def close(self) -> None:
        """Write the trace and the summary, let what is under way end, free everything; all ranks together."""
        # A rank that goes on by itself, exporting the model, say, is not to be ended by those that are done.
        self.engine.agree("shutdown", patient=True)
        if self.sampler is not None:
            from hvpipe.run_outputs import report_run

            self.sampler.stop()
            if self.live_report is not None:
                self.live_report.close()
            report_run(self)
        if self.engine.core is not None:
            from hvpipe.comm.engine import import_native

            import_native().set_default(None)
        self.engine.stop()
        self.engine.core = None
        self.world.close()

    def read_clock(self) -> tuple[float, float]:
        """A reading for hvpipe.trace.Clock; all ranks together."""
        ahead_s = self.world.clock_offset_s()
        return time.monotonic(), ahead_s

    def _start_sampler(self) -> None:
        from hvpipe.monitor.status_reporter import open_live_report

        settings, world = self.settings, self.world
        self.live_report = open_live_report(world, settings, self._progress)
        asked = settings.trace_path or settings.utilization_path or settings.summary
        if not (asked or self.live_report is not None):
            return
        from hvpipe.monitor.utilization import Sampler, SamplerOptions

        self.clock_reading = self.read_clock()
        options = SamplerOptions(
            period_s=1 / settings.utilization_hz,
            local_rank=world.local_rank,
            visible_gpus=settings.visible_gpus,
            on_sample=self.live_report.publish if self.live_report is not None else None,
        )
        self.sampler = Sampler(world.rank, options)
        self.sampler.start()

    def _progress(self) -> Progress:
        """Called in the sampler's thread."""
        from hvpipe.monitor.status_reporter import Progress

        steps = len(self.step_durations_s)
        return Progress(
            steps=steps,
            last_steps_s=tuple(self.step_durations_s[max(1, steps - 20) :] or self.step_durations_s),
            samples=sum(counter.total() for counter in tuple(self.sample_counters)),
            bytes_sent=self.engine.counters()["bytes_sent"],
        )


# Settings of what is recorded, and of which messages and collectives there are.
_ALIKE = (
    *("trace_path", "utilization_path", "utilization_hz", "summary"),
    *("bucket_bytes", "table_bytes", "segment_bytes", "slot_bytes", "messages_in_flight", "ranks_per_host"),
    "shared_memory",
    *("nccl_library", "nccl_span", "gpus_may_be_shared"),
)

_lock = threading.Lock()
_session: Session | None = None
_when_joined: list[Callable[[Session], None]] = []


def init(*, timeout_s: float | None = None, trace: str | None = None) -> None:
    """Join the ranks that the launcher started; call it first, on every rank. A second call does nothing.

    `timeout_s` is the longest wait for another rank (default 300, or HVPIPE_TIMEOUT). `trace` names a file
    for a timeline of all ranks (or HVPIPE_TRACE, or `hvpipe run --trace`). From now on an uncaught
    exception on any rank ends all ranks.

    Raises InitError where the ranks cannot be joined, BuildMismatchError where hvpipe was built with
    another MPI.
    """
    global _session
    with _lock:
        if _session is not None:
            return
        _end_all_on_error()
        settings = read_settings()
        if timeout_s is not None:
            if not timeout_s > 0:
                raise HvpipeError(f"timeout_s should be positive. Received: timeout_s={timeout_s}")
            settings = replace(settings, timeout_s=timeout_s)
        if trace is not None:
            settings = replace(settings, trace_path=trace)
        session = Session(settings)
        for prepare in _when_joined:
            prepare(session)
        _session = session
        atexit.register(shutdown)


def shutdown() -> None:
    """Leave the ranks, all together; runs by itself at exit. A second call does nothing."""
    global _session
    with _lock:
        session, _session = _session, None
    if session is None:
        return
    atexit.unregister(shutdown)
    try:
        session.close()
    except Exception:
        if session.world.size == 1:
            raise
        # At exit an exception would be printed and forgotten, and the peers would wait.
        _print_with_rank(session.world, traceback.format_exc())
        session.world.abort(1)


def when_joined(prepare: Callable[[Session], None]) -> None:
    """Call `prepare` with every session that is made, and at once with the present one."""
    _when_joined.append(prepare)
    if _session is not None:
        prepare(_session)


def current() -> Session:
    """The session; HvpipeError before `init`."""
    if _session is None:
        raise HvpipeError("hvpipe.init() should be called first. Received: no session")
    return _session


def is_initialized() -> bool:
    """Whether `init` was called and `shutdown` was not."""
    return _session is not None


def rank() -> int:
    """This process's number, 0 to size - 1."""
    return current().world.rank


def size() -> int:
    """The number of ranks."""
    return current().world.size


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return current().world.local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return current().world.local_size


def trace_path() -> str | None:
    """The file that the trace of this run goes to, if one is written."""
    return current().settings.trace_path


def allreduce(
    array: Any,
    op: Op = "average",
    compression: Compression = None,
    out: NDArray[Any] | None = None,
    **others: Any,
) -> NDArray[Any]:
    """Average or sum of an array over all ranks, the same bits on each; see `Engine.allreduce`."""
    if others:
        check_other_arguments("allreduce", others)
    return current().engine.allreduce(array, op, compression, out)


def allgather(array: Any, **others: Any) -> NDArray[Any]:
    """All ranks' arrays, one after the other along the first axis, whose length may differ by rank."""
    check_other_arguments("allgather", others)
    return current().engine.allgather(array)


def broadcast(array: Any, root_rank: int = 0, *, root: int | None = None, **others: Any) -> NDArray[Any]:
    """The root's array, on every rank; `root` is another name for `root_rank`."""
    check_other_arguments("broadcast", others)
    return current().engine.broadcast(array, root_rank if root is None else root)


def allgather_object(value: Any, **others: Any) -> list[Any]:
    """Every rank's value, in rank order (pickled)."""
    check_other_arguments("allgather_object", others)
    return current().engine.allgather_object(value)


def broadcast_object(value: Any, root_rank: int = 0, *, root: int | None = None, **others: Any) -> Any:
    """The root's value, on every rank (pickled); `root` is another name for `root_rank`."""
    check_other_arguments("broadcast_object", others)
    return current().engine.broadcast_object(value, root_rank if root is None else root)


def barrier() -> None:
    """Return when all ranks have called this."""
    current().engine.agree("barrier")


def counters() -> dict[str, float]:
    """Of this rank since `init`: bytes_sent, operations, exposed_wait_s; a pipeline's forward_s, ..."""
    return current().engine.counters()


# Arguments of Horovod's functions: those that change nothing here, and for each other one the values that do
# not, and what stands for the rest.
_HARMLESS = ("name", "device", "device_dense", "device_sparse", "ignore_name_scope", "sparse_as_dense")
_INSTEAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "average": ((None, True), "op='sum' where it is False"),
    "average_aggregated_gradients": ((False, True), "gradient_accumulation_steps= of the Keras optimizer"),
    "backward_passes_per_step": ((1,), "gradient_accumulation_steps= of the Keras optimizer"),
    "gradient_predivide_factor": ((1, None), "a factor in the loss; gradients are averaged"),
    "groups": ((None,), "bucket_bytes="),
    "num_groups": ((0,), "bucket_bytes="),
    "op": ((None, "average"), "a learning rate times hvpipe.size(); gradients are averaged"),
    "postscale_factor": ((1, None), "a factor of the result"),
    "prescale_factor": ((1, None), "a factor of the argument"),
    "process_set": ((None,), "all ranks take part"),
    "scale_local_gradients": ((True, None), "all gradients are averaged"),
    "session": ((None,), "no sessions of TensorFlow 1"),
}


def check_other_arguments(function: str, given: Mapping[str, Any]) -> None:
    """Pass over arguments that Horovod's functions take where they change nothing.

    Raises HvpipeError, with what hvpipe has in its place, where one does; TypeError for any other name.
    """
    for name, value in given.items():
        if name in _HARMLESS:
            continue
        if name not in _INSTEAD:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        harmless, instead = _INSTEAD[name]
        plain = value is None or isinstance(value, (bool, int, float, str))
        if not (plain and value in harmless):
            raise HvpipeError(
                f"{function} has no {name}, which is Horovod's. Instead: {instead}. "
                f"Received: {name}={value!r}"
            )


def _as_rank_0(settings: Settings, world: World) -> Settings:
    """With rank 0's word on what all ranks must do alike: mpirun alone hands no HVPIPE_* to other hosts.

    Ranks that record something else, or expect other messages, would wait for each other.
    """
    alike = {name: getattr(settings, name) for name in _ALIKE}
    return replace(settings, **world.broadcast_object(alike))


class _EndsAllRanks:
    """Takes uncaught exceptions: prints the traceback and ends all ranks, as `python -m mpi4py` does.

    Also of a rank that failed to join: at its exit MPI would wait for the others, and they for it.
    """

    def __init__(self) -> None:
        self._previous = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world = started_world()
        if world is None or world.size == 1:
            self._previous(kind, error, trace)
        elif issubclass(kind, KeyboardInterrupt):
            self._previous(kind, error, trace)
            world.abort(130)
        else:
            _print_with_rank(world, "".join(traceback.format_exception(kind, error, trace)))
            world.abort(1)


def _end_all_on_error() -> None:
    if not isinstance(sys.excepthook, _EndsAllRanks):
        sys.excepthook = _EndsAllRanks()


def _print_with_rank(world: World | StartedWorld, text: str) -> None:
    # One write, so that ranks that fail together do not mix their lines.
    message = f"\nhvpipe: rank {world.rank} of {world.size} on {world.host} failed:\n{text}"
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(message)
        sys.stderr.flush()
