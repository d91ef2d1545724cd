"""Horovod's functions about the ranks, and its constants."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from hvpipe import session
from hvpipe.errors import HvpipeError
from hvpipe.keras.named.ops import world_number
from hvpipe.keras.named.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    register_all,
    remove_process_set,
)

logger = logging.getLogger("hvpipe")

Average, Sum, Adasum, Min, Max, Product = range(6)
OP_NAMES = ("average", "sum", "adasum", "min", "max", "product")

_process_sets: list[ProcessSet] = []


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the ranks, as `hvpipe.init`.

    Args:
        comm: None, or a list or an mpi4py communicator of all ranks in their order. hvpipe has no smaller
            world; use process sets for a part of it.
        process_sets: Sets to add, each once, the same on all ranks; or "dynamic", which hvpipe always allows.
            A set of an earlier call gets that one's number.

    Raises:
        HvpipeError: For a `comm` of some of the ranks.
        ValueError: For a `comm` or `process_sets` of another type, for a set that is given twice, and for the
            set of all ranks. None of the sets is added then; `init` may be called again.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(
            f'process_sets should be a list of sets, or "dynamic". Received: process_sets={process_sets!r}'
        )
    session.init()
    world = session.current().world
    if comm is not None:
        _check_all_ranks(comm, world.rank, world.size)
        global_process_set.mpi_comm = comm if hasattr(comm, "Get_group") else None
    if process_sets is not None and not isinstance(process_sets, str):
        _process_sets.extend(register_all(process_sets))


def _check_all_ranks(comm: Any, rank: int, size: int) -> None:
    """Raise if `comm` is neither empty, which means all ranks, nor all ranks in their order."""
    if hasattr(comm, "Get_group"):
        ranks = list(comm.allgather(rank))
    elif isinstance(comm, Iterable) and not isinstance(comm, (str, bytes)):
        ranks = list(comm) or list(range(size))
    else:
        raise ValueError(
            f"comm should be None, a list of ranks or an mpi4py communicator. Received: comm={comm!r}"
        )
    if ranks != list(range(size)):
        raise HvpipeError(
            "comm should be None or all ranks; for a part of them use process sets. "
            f"Received: comm={comm!r} of ranks {ranks}, with {size} ranks"
        )


def shutdown() -> None:
    """Leave the ranks. All ranks call it together; `init` may be called again."""
    for process_set in _process_sets:
        process_set.process_set_id = None
    _process_sets.clear()
    global_process_set.mpi_comm = None
    session.shutdown()


def is_initialized() -> bool:
    """Return whether `init` was called and `shutdown` was not."""
    return session.is_initialized()


def _number(function: Callable[[], int]) -> int:
    if not session.is_initialized():
        raise ValueError("hvpipe has not been initialized; use hvd.init().")
    return function()


def rank() -> int:
    """Return this process's number, 0 to size - 1."""
    return _number(session.rank)


def size() -> int:
    """Return the number of ranks."""
    return _number(session.size)


def local_rank() -> int:
    """Return this rank's number among the ranks of its host."""
    return _number(session.local_rank)


def local_size() -> int:
    """Return the number of ranks on this host."""
    return _number(session.local_size)


def _peers() -> list[int]:
    """Return the ranks that have this rank's local rank on their hosts."""
    mine, layout = rank(), session.current().layout
    return [peer for peer, (local, _) in enumerate(layout) if local == layout[mine][0]]


def cross_rank() -> int:
    """Return the number of this rank's host among the hosts that have this local rank."""
    return _peers().index(rank())


def cross_size() -> int:
    """Return how many hosts have this rank's local rank."""
    return len(_peers())


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    return _number(lambda: len({locals_ for _, locals_ in session.current().layout})) == 1


def rank_op(name: str | None = None) -> Any:
    """Return the rank as a tensor that is read when the graph runs."""
    return world_number("rank")


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks as a tensor that is read when the graph runs."""
    return world_number("size", process_set_id)


def local_rank_op(name: str | None = None) -> Any:
    """Return the local rank as a tensor that is read when the graph runs."""
    return world_number("local_rank")


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this host as a tensor that is read when the graph runs."""
    return world_number("local_size")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this rank is in the process set, else 0, as a tensor read when the graph runs."""
    return world_number("included", process_set_id)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Say how to record a timeline: hvpipe decides at `init` whether it records."""
    logger.warning(
        "hvpipe: start_timeline does nothing. Set HOROVOD_TIMELINE or HVPIPE_TRACE to a file, or start the "
        "job with `hvpipe run --timeline-filename FILE`. Received: file_path=%s",
        file_path,
    )


def stop_timeline() -> None:
    """Do nothing: the timeline is written at `shutdown`."""


def mpi_threads_supported() -> bool:
    """Return True: hvpipe needs an MPI that allows calls from several threads."""
    return _number(lambda: 1) == 1


def mpi_enabled() -> bool:
    """Return True: hvpipe is built with MPI, even where `horovodrun --gloo` joins the ranks."""
    return True


def mpi_built() -> bool:
    """Return True: hvpipe is built with MPI."""
    return True


def gloo_enabled() -> bool:
    """Return False: hvpipe has no Gloo of its own."""
    return False


def gloo_built() -> bool:
    """Return False: hvpipe has no Gloo of its own."""
    return False


def nccl_built() -> int:
    """Return 1: hvpipe opens NCCL when it is needed."""
    return 1


def cuda_built() -> bool:
    """Return True: hvpipe carries its GPU code."""
    return True


def rocm_built() -> bool:
    """Return False: hvpipe has no ROCm support."""
    return False


def ddl_built() -> bool:
    """Return False: hvpipe has no DDL support."""
    return False


def ccl_built() -> bool:
    """Return False: hvpipe has no oneCCL support."""
    return False


__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
