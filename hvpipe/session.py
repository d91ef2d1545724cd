"""The default session: `hvpipe.init` joins the ranks; `rank`, `size` and others describe this one."""

from __future__ import annotations

import atexit
import os
import threading
import time
import traceback
import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hvpipe.engine.rank_gpu import may_have_gpu
from hvpipe.environment.discover import discover
from hvpipe.environment.job_folder import CHOSEN_CODES, tell_end, tell_joined
from hvpipe.environment.native import LeftToParent, import_native
from hvpipe.environment.settings import Settings, job_name, strange_job_folder
from hvpipe.environment.settings import settings as read_settings
from hvpipe.errors import HvpipeError, InitError, MismatchError, name_lost
from hvpipe.failures.abort_on_error import abort_on_uncaught_errors, in_one_line, tell_end_of_rank
from hvpipe.failures.flight_record import (
    end_record,
    flight_path,
    flight_path_without_lost,
    keep_record,
    tell_recorder,
)
from hvpipe.failures.noted_exit import exit_call
from hvpipe.log import logger, set_log_level
from hvpipe.monitor.core_binding import log_placement
from hvpipe.specs.tuning import Tuning, carrier
from hvpipe.world.open import open_world
from hvpipe.world.world import World

if TYPE_CHECKING:
    from typing import Protocol

    from hvpipe.engine.engine import EngineClient
    from hvpipe.monitor.status_reporter import StatusReporter, TrainingProgress
    from hvpipe.monitor.utilization import Sampler

    class CountsSamples(Protocol):
        """Counts the samples that this rank has trained on."""

        def total(self) -> float: ...


__all__ = [
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

_LEARNS_OF_LOSS_S = 2.0
"""How much earlier the error of a call may come than the watch's report of lost ranks."""

_SHOWN_STEPS = 20
"""The number of last steps whose median time `hvpipe top` shows."""

# Settings that must be the same on all ranks: they decide about records, messages and collectives.
_RANK_0_DECIDES = (
    *("trace_path", "utilization_path", "utilization_hz", "summary"),
    *("bucket_bytes", "table_bytes", "segment_bytes", "slot_bytes", "messages_in_flight", "ranks_per_host"),
    *("shared_memory", "algorithms", "algorithms_ranks"),
    *("nccl_library", "gpus_may_be_shared"),
    *("verify_every", "nonfinite", "strict"),
    *("stall_warn_s", "stall_abort_s", "flight_folder"),
    *("elastic", "min_ranks", "lr_scaling"),
)

_lock = threading.Lock()
_session: Session | None = None
_when_joined: list[Callable[[Session], None]] = []


def run_directly(call: Callable[[], Any]) -> Any:
    """Run what all ranks do together, outside of any `fit` of an elastic job."""
    return call()


class Session:
    """One joined world with its engine, its clocks and the run's records. `close` ends it."""

    def __init__(self, settings: Settings) -> None:
        from hvpipe.engine.engine import EngineClient

        launch = discover()
        self.world: World = open_world(launch, settings)
        set_log_level(settings.log_level, self.world.rank)
        log_placement(self.world, launch)
        if settings.without_effect and self.world.rank == 0:
            names = ", ".join(settings.without_effect)
            logger.warning("hvpipe: these variables of Horovod have no effect here: %s", names)
        if settings.unknown and self.world.rank == 0:
            logger.warning("hvpipe: unknown variables, which have no effect: %s", ", ".join(settings.unknown))
        if (why := strange_job_folder()) is not None and self.world.local_rank == 0:
            logger.warning("hvpipe: HVPIPE_JOB_FOLDER is not used on %s. Received: %s", self.world.host, why)
        self.layout = self._gather_layout()
        settings = _with_settings_of_rank_0(settings, self.world, self.hosts)
        self.settings = settings = replace(settings, flight_path=flight_path(settings, self.world))
        self.engine: EngineClient = EngineClient(self.world, settings)
        self.step_durations_s = array("d")
        self.sample_counters: list[CountsSamples] = []
        self.reducers: dict[Any, Any] = {}  # by what they reduce; see hvpipe.keras.data_parallel.custom_loops
        self.loops_by_plan = False  # whether a tape or an optimizer of a custom loop reduces by a plan
        self.trained_with: dict[str, Any] = {}  # arguments of the last data-parallel model, for the trace
        self.announcements = 0  # of steps that reduce, counted when their graph is built
        # See hvpipe.keras.training_alone.
        self.averagings = 0
        self.averaged: dict[int, int] = {}  # variables by identity: which averaging had their gradient
        self.reduced_by_hand = 0  # numbers that the script has summed or averaged since an update
        self.looked_at: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers
        self.trained_alone: dict[str, str] = {}  # what this rank has trained alone, and a text that says so
        self.clock_reading = (0.0, 0.0)  # see hvpipe.trace.events.Clock
        self.sampler: Sampler | None = None
        self.status_reporter: StatusReporter | None = None
        self._named_calls: Any = None
        self._is_parents = False
        self._warned_of_checks = False
        if self.engine.native is not None:
            import_native().set_default(self.engine.native)
            keep_record(self.engine.native)
            self.named_calls()  # now, because kernels of TensorFlow look for them
        self.checkpoints: Path | None = None  # their folder, once `fit` writes some
        self.lost: str | None = None  # says which ranks are lost, until the others go on
        self.run_section: Callable[[Callable[[], Any]], Any] = run_directly
        """Runs what all ranks do together between steps; see hvpipe.keras.data_parallel.elastic."""
        self._left_behind: list[Any] = []  # freeing it could wait for a lost rank
        if settings.elastic:
            self._watch()
        self._start_sampler()
        tell_joined(settings.job_folder)

    def close(self, by: str) -> None:
        """Write the trace and the summary, finish pending communication, free everything. Collective.

        `by` says to ranks that have not come what lets this one leave.
        """
        if self._is_parents:
            return
        if self._named_calls is not None:
            self._named_calls.leave()
        # Another rank may still be working, for instance exporting the model.
        self.agree_patiently("shutdown", shown=by)
        self._tell_of_training_alone()
        if self.sampler is not None:
            from hvpipe.run_outputs import report_run

            self.sampler.stop()
            if self.status_reporter is not None:
                self.status_reporter.close()
            report_run(self)
            # Rank 0 may write for long. The engine waits for a moment only, and then frees nothing.
            self.agree_patiently("the end of shutdown")
        if self._named_calls is not None:
            import_native().set_default_named_calls(None)
            self._named_calls = None
        if self.engine.native is not None:
            import_native().set_default(None)
        self.engine.stop()
        end_record(self.settings.flight_path)
        self.engine.native = None
        self.world.close()
        shared = self.checkpoints if self._left_behind else None  # all ranks of that host may be lost
        tell_end(job_name(), shared, _chosen_code())

    def _tell_of_training_alone(self) -> None:
        """Warn of what this rank has trained alone, and no lower rank; rank 0 told at once. Collective."""
        what = "what ranks have trained alone"
        if not any(self.engine.agree(what, float(len(self.trained_alone)))):
            return
        everyones = self.engine.allgather_object(list(self.trained_alone), what)
        lower = {what for whats in everyones[: self.world.rank] for what in whats}
        for what, text in self.trained_alone.items():
            if self.world.rank > 0 and what not in lower:
                logger.warning("hvpipe: %s", text)

    def has_lost_ranks(self) -> bool:
        """Tell whether an error came from the loss of ranks, which this rank may learn of a moment later."""
        deadline_s = time.monotonic() + _LEARNS_OF_LOSS_S
        while self.lost is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return self.lost is not None

    def go_on_without_lost(self) -> Resize:
        """Replace the ranks by the remaining ones, and the engine by one between them; collective over them.

        Returns:
            What changed.
        """
        from hvpipe.world.mpi import MpiWorld

        before = self.world
        assert isinstance(before, MpiWorld)
        tell_recorder(f"PeerError: {self.lost}")  # that of the engine before stays
        while True:
            assert isinstance(self.world, MpiWorld)
            self.world = self.world.survivors()
            self.lost = None
            native = import_native()
            native.set_default(None)
            native.set_default_named_calls(None)
            self._left_behind.append(self._named_calls)
            self._named_calls = None
            try:
                path = flight_path_without_lost(self.settings.flight_path, self.world)
                self.settings = replace(self.settings, flight_path=path)
                self._watch()  # first, because another rank may be lost from now on
                self.layout = self._gather_layout()
                self.engine.go_on_with(self.world, self.settings)
                if self._loses():  # only the engine before was told
                    self._end_communication()
                native.set_default(self.engine.native)
                keep_record(self.engine.native)
                self.named_calls()
                lost = tuple(before.missing_in(self.world))
                if 0 in lost and (self.settings.trace_path or self.settings.utilization_path):
                    self.clock_reading = self.read_clock()  # of another rank 0
            except HvpipeError:
                if not self.has_lost_ranks():
                    raise
                continue  # another rank was lost meanwhile
            return Resize(before.size, self.world.size, before.rank, self.world.rank, lost)

    def _gather_layout(self) -> list[tuple[int, int]]:
        """Return the local rank and local size of each rank; collective."""
        return self.world.allgather_object((self.world.local_rank, self.world.local_size))

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return sum(local_rank == 0 for local_rank, _ in self.layout)

    def _loses(self) -> bool:
        return self.lost is not None

    def _watch(self) -> None:
        from hvpipe.world.mpi import MpiWorld

        if not isinstance(self.world, MpiWorld):
            raise HvpipeError(
                "--elastic needs ranks that Open MPI joins: start them with `hvpipe run --elastic`. "
                f"Received: {self.world.library_version}"
            )
        self.world.watch(self._ranks_are_lost)

    def _ranks_are_lost(self, ranks: list[int]) -> None:
        self.lost = name_lost(ranks, self.world.size)
        self._end_communication()

    def _end_communication(self) -> None:
        self.engine.lose_ranks(
            "Only `fit` continues after ranks are lost, with data_parallel, or with pipeline_parallel and "
            "hk.Checkpoint. Collectives that a script or a callback calls end with this error. "
            f"Received: {self.lost}"
        )

    def warn_without_checks(self, what: str) -> None:
        """Warn, once on rank 0, if --verify or --nonfinite were asked for and `what` does not obey them."""
        settings = self.settings
        asked = [f"HVPIPE_VERIFY={settings.verify_every}"] if settings.verify_every else []
        asked += [f"HVPIPE_NONFINITE={settings.nonfinite}"] if settings.nonfinite != "ignore" else []
        if asked and not self._warned_of_checks and self.world.rank == 0:
            logger.warning(
                "hvpipe: only models of hk.data_parallel in fit, and pipelines, compare weights over ranks "
                "and look for NaN and Inf: these settings have no effect on %s. Received: %s",
                what,
                ", ".join(asked),
            )
        self._warned_of_checks = True

    def leave_to_parent(self) -> None:
        """In a child of os.fork(): keep the numbers of rank and size, and forget what communicates.

        Threads and MPI connections are the parent's. The child must neither use nor free them.
        """
        self._is_parents = True
        self.sampler = self.status_reporter = None
        self.engine.leave_to_parent()
        self.world.leave_to_parent()
        if self._named_calls is not None:
            native = import_native()
            native.leave_to_parent(self._named_calls)
            native.set_default(None)
            native.set_default_named_calls(None)
            self._named_calls = LeftToParent()

    @property
    def is_parents(self) -> bool:
        """Whether this process is a child of os.fork(), which communicates with nobody."""
        return self._is_parents

    def agree_patiently(self, what: str, least_s: float = 0.0, shown: str = "") -> None:
        """Wait until all ranks call this with the same `what`, each of which may be busy with other work."""
        self.engine.agree_patiently(what, max(self.settings.longest_shutdown_s, least_s), shown)

    def named_calls(self) -> Any:
        """Return the collectives that ranks call by name (csrc/named)."""
        if self._named_calls is None:
            native, world = import_native(), self.world
            self._named_calls = native.NamedCalls.create(
                self.engine.native, world.local_rank, world.local_size
            )
            native.set_default_named_calls(self._named_calls)
        return self._named_calls

    def read_clock(self) -> tuple[float, float]:
        """Return a reading for `hvpipe.trace.events.Clock`. Collective."""
        ahead_s = self.world.clock_offset_s()
        return time.monotonic(), ahead_s

    def _start_sampler(self) -> None:
        from hvpipe.monitor.status_reporter import open_status_reporter

        settings, world = self.settings, self.world
        self.status_reporter = open_status_reporter(self.engine, settings, self._progress)
        recorded = settings.trace_path or settings.utilization_path or settings.summary
        if not (recorded or self.status_reporter is not None):
            return
        from hvpipe.monitor.utilization import Sampler, SamplerOptions

        self.clock_reading = self.read_clock()
        options = SamplerOptions(
            period_s=1 / settings.utilization_hz,
            local_rank=world.local_rank,
            visible_gpus=settings.visible_gpus,
            on_sample=self.status_reporter.publish if self.status_reporter is not None else None,
        )
        self.sampler = Sampler(world.rank, options)
        self.sampler.start()

    def _progress(self) -> TrainingProgress:
        """Return this rank's progress so far. The sampler's thread calls it."""
        from hvpipe.monitor.status_reporter import TrainingProgress

        steps = len(self.step_durations_s)
        # The first step also traces and compiles, so it counts only while it is the only one.
        recent_s = self.step_durations_s[max(1, steps - _SHOWN_STEPS) :]
        return TrainingProgress(
            steps=steps,
            last_steps_s=tuple(recent_s or self.step_durations_s),
            samples=sum(counter.total() for counter in tuple(self.sample_counters)),
            bytes_sent=self.engine.counters()["bytes_sent"],
        )


@dataclass(frozen=True)
class Resize:
    """A change of the number of ranks.

    Attributes:
        old_size: The number of ranks before.
        size: The number of ranks now.
        old_rank: The number of this rank before; -1 in a new process, which resumes from a checkpoint.
        rank: The number of this rank now.
        lost: The ranks that were lost, by their numbers before.
    """

    old_size: int
    size: int
    old_rank: int
    rank: int
    lost: tuple[int, ...]


def init(
    *,
    timeout_s: float | None = None,
    trace: str | None = None,
    backend: Literal["mpi", "tcp"] | None = None,
    strict: bool | None = None,
) -> None:
    """Join the ranks that the launcher started.

    Call it first, on every rank. Another call does nothing. Without a launcher there is one rank. From now on
    an uncaught exception on any rank ends all ranks.

    Args:
        timeout_s: Longest wait for another rank, in seconds; HVPIPE_TIMEOUT if not given, else 300.
        trace: File for one timeline of all ranks, as from `hvpipe run --trace`; HVPIPE_TRACE if not given.
        backend: "mpi" or "tcp": what carries the data between ranks; HVPIPE_BACKEND if not given, else TCP
            between hosts with Ethernet and under `horovodrun --gloo`, and MPI everywhere else.
        strict: Whether training that no rank averages is an error on the rank that does it, instead of a
            warning: a model without `data_parallel`, for example. HVPIPE_STRICT if not given, else no.

    Raises:
        InitError: If the ranks cannot be joined.
        BuildMismatchError: If hvpipe was built with another MPI.
        HvpipeError: If `timeout_s` is not positive, `backend` is unknown, or a variable of the environment
            has a bad value.

    Example:
        ```python
        import hvpipe

        hvpipe.init()
        print(f"rank {hvpipe.rank()} of {hvpipe.size()}")
        ```
    """
    global _session
    with _lock:
        if _session is not None:
            return
        abort_on_uncaught_errors(_show_error)
        settings = read_settings()
        if timeout_s is not None:
            if not timeout_s > 0:
                raise HvpipeError(f"timeout_s should be positive. Received: timeout_s={timeout_s}")
            settings = replace(settings, timeout_s=timeout_s)
        if trace is not None:
            settings = replace(settings, trace_path=trace)
        if backend is not None:
            if backend not in ("mpi", "tcp"):
                raise HvpipeError(f"backend should be 'mpi' or 'tcp'. Received: backend={backend!r}")
            settings = replace(settings, backend=backend)
        if strict is not None:
            settings = replace(settings, strict=bool(strict))
        session = Session(settings)
        for prepare in _when_joined:
            prepare(session)
        _session = session
        atexit.register(_leave_at_exit)


def shutdown() -> None:
    """Leave the ranks. All ranks call it together; it also runs at exit.

    It writes the trace and the summary if `hvpipe run` requested them. Another call does nothing. Afterwards
    each rank continues on its own. At exit the ranks wait for each other in MPI_Finalize, at most
    HVPIPE_SHUTDOWN_TIMEOUT.

    Raises:
        HvpipeError: With one rank, if closing fails. With several ranks a failure ends all of them.

    Example:
        ```python
        hvpipe.shutdown()  # each rank continues on its own
        ```
    """
    _leave("hvpipe.shutdown()")


def _leave_at_exit() -> None:
    call = exit_call()
    _leave("the end of its script, or SystemExit" if call is None else call.text, at_exit=True)


def _leave(by: str, at_exit: bool = False) -> None:
    global _session
    with _lock:
        session, _session = _session, None
    if session is None:
        return
    atexit.unregister(_leave_at_exit)
    try:
        session.close(by)
    except Exception as error:
        if session.settings.elastic and session.has_lost_ranks():
            logger.warning("hvpipe: %s in shutdown", session.lost)  # its work was done
            session.engine.stop()  # without the others; its threads must not call MPI once that is finalised
            tell_end(job_name(), session.checkpoints, _chosen_code())
            return
        if session.world.size == 1:
            raise
        # At exit Python would print the exception and continue, and the peers would wait.
        if at_exit and isinstance(error, MismatchError):
            _leave_alone(session, error)
        else:
            tell_end_of_rank(session.world, in_one_line(error), traceback.format_exc())
            session.world.abort(1)


def _chosen_code() -> int:
    """Return the exit code that hvpipe has chosen for all ranks; 0 if it has not, or the program goes on."""
    call = exit_call()
    return call.code if call is not None and call.code in CHOSEN_CODES else 0


def _leave_alone(session: Session, error: MismatchError) -> None:
    """End all ranks with the exit code of this one, whose program has ended while others still need it."""
    call = exit_call()
    _, _, places = str(error).partition("Received: ")
    kind = "EarlyEnd" if call is None else "SystemExit"
    why = f"{kind}: this rank left while others still need it. {places}"
    tell_end_of_rank(session.world, why.removesuffix("."), f"{why}\n")
    if call is not None or not session.world.leaves_unfinalised():
        session.world.abort(1 if call is None else call.code or 1)
    # The program may have raised SystemExit. Only C will learn its exit code, and the launcher from that.
    native = import_native()
    native.leave_to_parent(session.engine.native)
    if session._named_calls is not None:
        native.leave_to_parent(session._named_calls)
    native.fail_at_exit()


def _show_error() -> None:
    """Let a rank that waits in its shutdown see that this one does not come."""
    if _session is not None:
        _session.engine.agree("an uncaught exception")


def _leave_session_to_parent() -> None:
    """Run in every child of os.fork(): `shutdown` at its exit would end the job of its parent."""
    global _lock
    _lock = threading.Lock()  # a thread that the child lacks may have held it
    atexit.unregister(_leave_at_exit)
    if _session is not None:
        _session.leave_to_parent()


os.register_at_fork(after_in_child=_leave_session_to_parent)


def when_joined(prepare: Callable[[Session], None]) -> None:
    """Call `prepare` with every session that starts from now on, and with the current one at once."""
    _when_joined.append(prepare)
    if _session is not None:
        prepare(_session)


def current() -> Session:
    """Return the session; raise HvpipeError before `init`."""
    if _session is None:
        raise HvpipeError("Call hvpipe.init() first.")
    return _session


def is_initialized() -> bool:
    """Tell whether this rank has joined the others: `init` was called and `shutdown` was not.

    Returns:
        True between `init` and `shutdown`.

    Example:
        ```python
        if not hvpipe.is_initialized():
            hvpipe.init()
        ```
    """
    return _session is not None


def rank() -> int:
    """Return the number of this process among all ranks.

    Returns:
        0 to `size()` - 1.

    Raises:
        HvpipeError: Before `init`.

    Example:
        ```python
        if hvpipe.rank() == 0:
            print("only once")
        ```
    """
    return current().world.rank


def size() -> int:
    """Return the number of ranks.

    Returns:
        At least 1.

    Raises:
        HvpipeError: Before `init`.

    Example:
        ```python
        optimizer = keras.optimizers.SGD(0.1 * hvpipe.size())
        ```
    """
    return current().world.size


def local_rank() -> int:
    """Return the number of this process among the ranks of its host.

    Returns:
        0 to `local_size()` - 1.

    Raises:
        HvpipeError: Before `init`.

    Example:
        ```python
        cache = Path.home() / f"cache-{hvpipe.local_rank()}"  # ranks of one host share its disks
        ```
    """
    return current().world.local_rank


def local_size() -> int:
    """Return the number of ranks on this host.

    Returns:
        At least 1.

    Raises:
        HvpipeError: Before `init`.

    Example:
        ```python
        threads = os.cpu_count() // hvpipe.local_size()
        ```
    """
    return current().world.local_size


def trace_path() -> str | None:
    """Return the file that the trace of this run is written to.

    Returns:
        A path, or None if the run writes no trace.

    Raises:
        HvpipeError: Before `init`.

    Example:
        ```python
        hvpipe.init(trace="trace.json")
        print(hvpipe.trace_path())  # trace.json
        ```
    """
    return current().settings.trace_path


def counters() -> dict[str, float]:
    """Return counters of this rank's communication, waiting and computing since `init`.

    Returns:
        Totals by name, such as `bytes_sent` (bytes), `operations`, `exposed_wait_s` (seconds that training
        waited for communication) and, in a pipeline, `forward_s` and `backward_s` (seconds).

    Raises:
        HvpipeError: Before `init`.

    Example:
        ```python
        before = hvpipe.counters()["bytes_sent"]
        model.fit(data)
        print(f"{(hvpipe.counters()['bytes_sent'] - before) / 1e6:.0f} MB sent")
        ```
    """
    return current().engine.counters()


def _tuned(settings: Settings, world: World, hosts: int) -> Settings:
    """Take the algorithms of the file of `hvpipe tune`, which rank 0 reads, if it is of such a cluster."""
    path = settings.tuning_path
    if not path or world.rank != 0:
        return settings
    tuning, network = Tuning.read(path), carrier(world.network, world.messages, hosts)
    if world.size == 1:
        return settings
    if network != tuning.network:
        logger.warning(
            "hvpipe: HVPIPE_ALL_REDUCE=%s is not used: it is of %s. Received: %s",
            *(path, tuning.network, network),
        )
        return settings
    if tuning.ranks not in (world.size, hosts):
        logger.warning(
            "hvpipe: only sums of %d ranks or hosts use HVPIPE_ALL_REDUCE=%s. Received: ranks=%d, hosts=%d",
            *(tuning.ranks, path, world.size, hosts),
        )
    return replace(settings, algorithms=tuning.algorithms, algorithms_ranks=tuning.ranks)


def _with_settings_of_rank_0(settings: Settings, world: World, hosts: int) -> Settings:
    """Take rank 0's value of each setting that must be the same on all ranks.

    mpirun does not pass HVPIPE_* to other hosts. Ranks that record different things or expect different
    messages would wait for each other. All ranks also learn whether any of them may find a GPU: if so, they
    meet later to choose the route of gradients (EngineClient.use_gpus_of_all).
    """
    failure = ""
    try:
        settings = _tuned(settings, world, hosts)
    except HvpipeError as error:
        failure = f"HVPIPE_ALL_REDUCE should name a file of `hvpipe tune`: {error}"
    decided = {name: getattr(settings, name) for name in _RANK_0_DECIDES} if world.rank == 0 else None
    everyones = world.allgather_object((decided, may_have_gpu(settings), failure))
    if failure := everyones[0][2]:
        raise InitError(failure)
    return replace(settings, **everyones[0][0], job_may_have_gpus=any(may for _, may, _ in everyones))
