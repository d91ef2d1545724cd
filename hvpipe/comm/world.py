"""The world of ranks: what it offers whichever library joins the ranks, and the world of a single rank."""

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
    """The ranks of one run; owns its communicators and gives them back in `close`.

    Methods that involve every rank (`allgather_object`, `gather_object`, `broadcast_object`, `barrier`,
    `clock_offset_s`) are called by all ranks in the same order, from one thread at a time.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def local_size(self) -> int: ...

    @property
    def host(self) -> str: ...

    @property
    def fortran_handle(self) -> int | None:
        """Handle of the communicator reserved for the C++ engine; None where there is no MPI."""

    @property
    def library_version(self) -> str:
        """Name and version of the library, e.g. "Open MPI v5.0.11"; "none" for a single rank without MPI."""

    @property
    def eager_bytes(self) -> int:
        """The largest message that leaves at once on every rank; 0 where there is no MPI."""

    def allgather_object(self, value: Any) -> list[Any]: ...

    def gather_object(self, value: Any) -> list[Any] | None:
        """Every rank's value, in rank order, on rank 0; None on the others."""

    def broadcast_object(self, value: Any, root: int = 0) -> Any: ...

    def barrier(self) -> None: ...

    def clock_offset_s(self) -> float:
        """Seconds to add to this rank's `time.monotonic()` to get rank 0's."""

    def abort(self, code: int = 1) -> None:
        """End every rank now, with this exit code; does not return."""

    def close(self) -> None:
        """Free the communicators; calling it again does nothing."""


class SingleWorld:
    """One rank that nobody launched: everything works, and no MPI is needed."""

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
    """The ranks of an MPI that runs in this process, whether hvpipe has joined them or not."""
    if "mpi4py.MPI" not in sys.modules:
        return None
    from hvpipe.comm import mpi

    return mpi.started_world()


def open_world(launch: Launch, settings: Settings) -> World:
    """Join the ranks of this launch; without a launcher and without a running MPI, a world of one rank."""
    if launch.launcher == "none" and "mpi4py.MPI" not in sys.modules:
        return SingleWorld()
    from hvpipe.comm import mpi

    return mpi.open_world(launch, timeout_s=settings.timeout_s)
