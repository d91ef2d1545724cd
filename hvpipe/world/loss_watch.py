"""Notices lost ranks under ULFM, the fault tolerance of Open MPI 5 (Bland et al., IJHPCA 2013)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from hvpipe.errors import InitError

_PERIOD_S = 0.02


def check_fault_tolerance(enabled: bool, library: str) -> None:
    """Raise InitError unless MPI survives the loss of a rank."""
    if not enabled:
        raise InitError(
            "--elastic needs Open MPI 5 whose ranks were started with `mpirun --with-ft ulfm`; "
            "`hvpipe run --elastic` does that. Without it, use `hvpipe run --restarts` with hk.Checkpoint. "
            f"Received: {library} without ULFM"
        )


class LossWatch:
    """A thread that looks for lost ranks of a communicator, and then revokes it.

    A reduction in shared memory makes no MPI call that could fail, so somebody has to look.

    Args:
        mpi: mpi4py.MPI.
        comm: The communicator.
        lost: Called once, in the thread, with the lost ranks. A rank that learns it from another rank's
            revoke may get none.
        others: Communicators of the same ranks to revoke as well.
    """

    def __init__(
        self, mpi: ModuleType, comm: Any, lost: Callable[[list[int]], None], others: Sequence[Any] = ()
    ) -> None:
        self._mpi = mpi
        self._comm = comm
        self._others = others
        self._lost = lost
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="hvpipe-loss-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(_PERIOD_S):
            self._mpi.COMM_SELF.Iprobe()  # MPI takes note of failures only while it makes progress
            found = failed_ranks(self._comm)
            if found or self._comm.Is_revoked():
                for comm in (self._comm, *self._others):
                    comm.Revoke()
                self._lost(found)
                return


def failed_ranks(comm: Any) -> list[int]:
    """Return the ranks of a communicator that are known to be lost. Local."""
    group = comm.Get_failed()
    ranks = group.Translate_ranks(list(range(group.size)), comm.Get_group()) if group.size else []
    return sorted(ranks)


def shrunk(mpi: ModuleType, comm: Any) -> Any:
    """Return a communicator of the remaining ranks. Collective over them; they keep their order."""
    comm.Revoke()
    begun_s = time.monotonic()
    while True:
        try:
            left = comm.Shrink()
        except mpi.Exception:
            if time.monotonic() - begun_s > 30.0:
                raise
            continue
        left.Set_errhandler(mpi.ERRORS_RETURN)
        return left
