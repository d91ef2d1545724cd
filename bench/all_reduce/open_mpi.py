"""MPI_Allreduce by each of Open MPI's algorithms, in one run.

Open MPI reads its choice of an algorithm when it makes a communicator. So each algorithm has a communicator
of its own. The choice is a control variable of the MPI tools interface (MPI 4.1, chapter 15), which mpi4py
lacks. It counts only if coll_tuned_use_dynamic_rules was 1 when MPI was initialised.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from mpi4py import MPI

_VARIABLE = b"coll_tuned_allreduce_algorithm"
ALGORITHMS = {
    2: "reduce and broadcast",
    3: "recursive doubling",
    4: "ring",
    5: "segmented ring",
    6: "Rabenseifner",
}


def communicators() -> dict[str, MPI.Intracomm]:
    """Return a communicator of all ranks for each algorithm, by name; none under another MPI."""
    try:
        write = _writer()
    except (OSError, AttributeError, LookupError):
        return {}
    found = {}
    for number, name in ALGORITHMS.items():
        write(number)
        found[name] = MPI.COMM_WORLD.Dup()
    write(0)
    return found


def _writer() -> Callable[[int], None]:
    """Return a function that writes the control variable. LookupError if this MPI has none."""
    library = ctypes.CDLL("libmpi.so.40")  # the one that mpi4py has loaded
    index, count, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if (
        library.MPI_T_init_thread(MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        or library.MPI_T_cvar_get_index(_VARIABLE, ctypes.byref(index))
        or library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count))
    ):
        raise LookupError(_VARIABLE)

    def write(algorithm: int) -> None:
        if library.MPI_T_cvar_write(handle, ctypes.byref(ctypes.c_int(algorithm))):
            raise LookupError(_VARIABLE)

    return write
