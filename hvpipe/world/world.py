"""The world of ranks: its interface, and the world of a single rank without MPI."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hvpipe.environment.settings import Settings


@dataclass(frozen=True)
class RunningRanks:
    """The ranks of a library that runs in this process, even if hvpipe has not joined them.

    Attributes:
        rank: This process's number, 0 to size - 1.
        size: The number of ranks.
        host: The name of this host.
        alone: Whether the job has had one rank from the start.
        abort: Ends all ranks now, with this exit code. Does not return.
    """

    rank: int
    size: int
    host: str
    alone: bool
    abort: Callable[[int], None]


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

    @property
    def messages(self) -> str:
        """Where MPI carries the data: which MPI, by what, as it was told. "" otherwise."""

    def make_engine(self, settings: Settings) -> Any:
        """Return the C++ engine between the ranks; None with one rank. Collective."""

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the plain values (see hvpipe.world.objects) of all ranks, in rank order.

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
    messages = ""

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
