"""The world of ranks: its interface, and the world of a single rank without MPI."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING, Any, Protocol

from hvpipe.comm.discover import Launch, Settings
from hvpipe.errors import HvpipeError

if TYPE_CHECKING:
    from hvpipe.comm.mpi import StartedWorld

__all__ = ["SingleWorld", "World", "open_world", "started_world"]


class World(Protocol):
    """The ranks of one run; owns its communicators and frees them in `close`.

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
    def fortran_handle(self) -> int | None:
        """Handle of the communicator reserved for the C++ engine; None without MPI."""

    @property
    def library_version(self) -> str:
        """Name and version of the MPI library, such as "Open MPI v5.0.11"; "none" without MPI."""

    @property
    def eager_bytes(self) -> int:
        """The largest message that every rank sends without a handshake, in bytes; 0 without MPI."""

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""

    def gather_object(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks, in rank order, on rank 0, and None on the others."""

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the value of rank `root` on every rank."""

    def barrier(self) -> None:
        """Wait until all ranks have called this."""

    def clock_offset_s(self) -> float:
        """Return the seconds to add to this rank's `time.monotonic()` to get rank 0's."""

    def abort(self, code: int = 1) -> None:
        """End all ranks now, with this exit code. Does not return."""

    def close(self) -> None:
        """Free the communicators. Another call does nothing."""


class SingleWorld:
    """One rank that nobody launched: every method works without MPI."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    fortran_handle: int | None = None
    library_version = "none"
    eager_bytes = 0

    def __init__(self) -> None:
        self.host = socket.gethostname()

    def allgather_object(self, value: Any) -> list[Any]:
        return [value]

    def gather_object(self, value: Any) -> list[Any] | None:
        return [value]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        if root != 0:
            raise HvpipeError(f"root should be a rank, 0 to 0. Received: root={root}")
        return value

    def barrier(self) -> None:
        pass

    def clock_offset_s(self) -> float:
        return 0.0

    def abort(self, code: int = 1) -> None:
        sys.exit(code)

    def close(self) -> None:
        pass


def started_world() -> StartedWorld | None:
    """Return the ranks of the MPI that runs in this process, even if hvpipe has not joined them."""
    if "mpi4py.MPI" not in sys.modules:
        return None
    from hvpipe.comm import mpi

    return mpi.started_world()


def open_world(launch: Launch, settings: Settings) -> World:
    """Join the ranks of this launch. Without a launcher and a running MPI the world has one rank."""
    if launch.launcher == "none" and "mpi4py.MPI" not in sys.modules:
        return SingleWorld()
    from hvpipe.comm import mpi

    return mpi.open_world(launch, timeout_s=settings.timeout_s)
