"""The world of ranks: its interface, and the world of a single rank without MPI."""

from __future__ import annotations

import socket
import sys
from typing import Any, Protocol

from hvpipe.comm.discover import Launch
from hvpipe.comm.settings import Settings
from hvpipe.comm.versions import check_same_versions
from hvpipe.errors import InitError

__all__ = ["SingleWorld", "World", "open_world", "started_world"]


class StartedWorld(Protocol):
    """The ranks of a library that runs in this process, even if hvpipe has not joined them."""

    @property
    def rank(self) -> int:
        """This process's number, 0 to size - 1."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def host(self) -> str:
        """The name of this host."""

    @property
    def alone(self) -> bool:
        """Whether the job has had one rank from the start."""

    def abort(self, code: int) -> None:
        """End all ranks now, with this exit code. Does not return."""


class World(Protocol):
    """The ranks of one run; owns what connects them and frees it in `close`.

    All ranks call the collective methods (`allgather_object`, `gather_object`, `broadcast_object`, `barrier`,
    `clock_offset_s`) in the same order, from one thread at a time.
    """

    @property
    def rank(self) -> int:
        """This process's number, 0 to size - 1."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host."""

    @property
    def local_size(self) -> int:
        """The number of ranks on this host."""

    @property
    def host(self) -> str:
        """The name of this host."""

    @property
    def trusted(self) -> bool:
        """Whether the ranks have proved who they are, so that pickles of other ranks may be read."""

    @property
    def library_version(self) -> str:
        """Name and version of the library that joined the ranks, such as "Open MPI v5.0.11"; or "none"."""

    @property
    def network(self) -> str:
        """What carries the data between ranks, and why, for the log."""

    def make_engine(self, settings: Settings) -> Any:
        """Return the C++ engine between the ranks; None with one rank. Collective."""

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the plain values (see hvpipe.comm.objects) of all ranks, in rank order.

        For what ranks must know before they have an engine, which gathers objects from then on.
        """

    def clock_offset_s(self) -> float:
        """Return the seconds to add to this rank's `time.monotonic()` to get rank 0's."""

    def abort(self, code: int = 1) -> None:
        """End all ranks now, with this exit code. Does not return."""

    def leaves_unfinalised(self) -> bool:
        """Let this process end without waiting for the others; return whether it can."""

    def close(self) -> None:
        """Free what connects the ranks. Another call does nothing."""

    def leave_to_parent(self) -> None:
        """In a child of os.fork(): forget what connects the ranks."""


class SingleWorld:
    """One rank that nobody launched: every method works without MPI."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    trusted = True
    library_version = network = "none"

    def __init__(self) -> None:
        self.host = socket.gethostname()

    def make_engine(self, settings: Settings) -> Any:
        return None

    def allgather_object(self, value: Any) -> list[Any]:
        return [value]

    def clock_offset_s(self) -> float:
        return 0.0

    def abort(self, code: int = 1) -> None:
        sys.exit(code)

    def leaves_unfinalised(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def leave_to_parent(self) -> None:
        pass


def started_world() -> StartedWorld | None:
    """Return the ranks that MPI or TCP has joined in this process, even if hvpipe has not joined them."""
    if "mpi4py.MPI" in sys.modules:
        from hvpipe.comm import mpi

        by_mpi = mpi.started_world()
        if by_mpi is not None and not by_mpi.alone:
            return by_mpi
    if "hvpipe.comm.tcp" in sys.modules:
        from hvpipe.comm import tcp

        return tcp.started_world()
    return None


def open_world(launch: Launch, settings: Settings) -> World:
    """Join the ranks of this launch. Without a launcher and a running MPI the world has one rank.

    Raises:
        InitError: If the ranks cannot be joined, or `settings.backend` cannot carry their data.
    """
    if launch.launcher == "horovodrun":
        if settings.backend == "mpi":
            raise InitError(
                "MPI has no ranks under `horovodrun --gloo`: each process would be alone. Leave "
                "HVPIPE_BACKEND unset, or launch with `horovodrun --mpi`, `mpirun` or `hvpipe run`. "
                f"Received: backend={settings.backend!r}"
            )
        from hvpipe.comm import tcp

        world = tcp.open_world(launch, settings)
        check_same_versions(world)
        return world
    if launch.launcher == "none" and "mpi4py.MPI" not in sys.modules:
        return SingleWorld()
    from hvpipe.comm import ethernet, mpi

    ranks = mpi.open_world(launch, settings.timeout_s, settings.longest_shutdown_s)
    check_same_versions(ranks)
    return ethernet.over_tcp(ranks, launch, settings)
