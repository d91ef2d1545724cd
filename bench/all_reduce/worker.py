"""What every rank of the all-reduce benchmark does: verify, then time the contenders in turn."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from bench.all_reduce.report import AllReduceReport, Row
from bench.metrics import format_size, repetitions
from hvpipe.specs.tuning import ALGORITHMS

Buffer = npt.NDArray[np.float32]
Sum = Callable[[Buffer], Any]  # in place, or returns another buffer with the sum

_PAGE_BYTES = 4096
_SECONDS = 2.0  # for the samples of a size and contender
_LEAST_SAMPLES, _MOST_SAMPLES = 5, 50  # of a size
_PROBES = 3  # operations by which the best algorithm is found, for each algorithm and size
_VARIABLE = b"coll_tuned_allreduce_algorithm"
_ALGORITHMS = {
    2: "reduce and broadcast",
    3: "recursive doubling",
    4: "ring",
    5: "segmented ring",
    6: "Rabenseifner",
}
_PATTERN = 251  # values stay below 2^24 when summed, so float32 is exact in any order


def communicators() -> dict[str, MPI.Intracomm]:
    """Return a communicator of all ranks for each of Open MPI's algorithms, by name; none under another MPI.

    Open MPI reads its choice of an algorithm when it makes a communicator. The choice is a control variable
    of the MPI tools interface (MPI 4.1, chapter 15), which mpi4py lacks. It counts only if
    coll_tuned_use_dynamic_rules was 1 when MPI was initialised.
    """
    try:
        write = _writer()
    except (OSError, AttributeError, LookupError):
        return {}
    found = {}
    for number, name in _ALGORITHMS.items():
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


class BestOfMpi:
    """MPI_Allreduce with the algorithm that is fastest for a size. `choose` finds it."""

    def __init__(self) -> None:
        self._known = {"default": MPI.COMM_WORLD, **communicators()}
        self.chosen = "default"

    def __call__(self, buffer: Buffer) -> None:
        self._known[self.chosen].Allreduce(MPI.IN_PLACE, buffer)

    def choose(self, buffer: Buffer, sample_s: float) -> None:
        """Time every algorithm, in turns, and take the fastest. All ranks take the same."""
        times: dict[str, list[float]] = {name: [] for name in self._known}
        for _ in range(_PROBES):
            for name in self._known:
                self.chosen = name
                count = repetitions(sample_s / 4, _sample(self, buffer, 1))
                times[name].append(_sample(self, buffer, count))
        self.chosen = min(times, key=lambda name: median(times[name]))


def contenders(names: Sequence[str], in_place: bool = True) -> dict[str, Sum]:
    """Return these operations by name. "mpi" in place is its faster form here.

    "mpi-imb" sums as the Intel MPI Benchmarks do. "hvpipe-ALGORITHM" sums over the network by this algorithm.
    Only "hvpipe" and these need hvpipe.
    """
    made: dict[str, Callable[[], Sum]] = {
        "mpi": lambda: partial(MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE) if in_place else _to_another_buffer,
        "mpi-best": BestOfMpi,
        "mpi-imb": lambda: _to_another_buffer,
        "hvpipe": partial(_hvpipe, None, in_place),
        **{f"hvpipe-{name}": partial(_hvpipe, name, in_place) for name in ALGORITHMS},
    }
    return {name: made[name]() for name in names}


def _hvpipe(algorithm: str | None, in_place: bool) -> Sum:
    import hvpipe
    from hvpipe.engine.engine import EngineClient
    from hvpipe.session import current

    hvpipe.init()
    allreduce: Callable[..., Any] = hvpipe.allreduce
    if algorithm is not None:
        session = current()
        algorithms = ((algorithm, 0),)
        settings = replace(session.settings, algorithms=algorithms, shared_memory=False)
        allreduce = EngineClient(session.world, settings).allreduce
    return lambda buffer: allreduce(buffer, op="sum", out=buffer if in_place else _result(buffer.size))


def _to_another_buffer(buffer: Buffer) -> Buffer:
    """Sum into another buffer, always the same for a size."""
    result = _result(buffer.size)
    MPI.COMM_WORLD.Allreduce(buffer, result)
    return result


@cache
def _result(elements: int) -> Buffer:
    return aligned(elements, 0)


def aligned(elements: int, value: float) -> Buffer:
    """Return an array that starts on a page.

    On some CPUs a copy between arrays aligned differently modulo 64 is ten times slower. Frameworks align
    their tensors to 64. NumPy aligns to 16, and where in 64 is left to chance.
    """
    raw = np.empty(elements * 4 + _PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % _PAGE_BYTES
    array: Buffer = raw[start : start + elements * 4].view(np.float32)
    array[:] = value
    return array


def expected_and_mine(elements: int, rank: int, ranks: int) -> tuple[Buffer, Buffer]:
    """Return the exact sum and this rank's part: whole numbers that differ by rank and by index."""
    at = np.arange(elements, dtype=np.int32) % _PATTERN
    mine = (at * (rank + 1) + rank).astype(np.float32)
    expected = (at * (ranks * (ranks + 1) // 2) + ranks * (ranks - 1) // 2).astype(np.float32)
    return expected, mine


def verify(operation: Sum, name: str, size_bytes: int) -> None:
    """Raise ArithmeticError on every rank if any element of an all-reduce is wrong on any rank."""
    world = MPI.COMM_WORLD
    expected, buffer = expected_and_mine(size_bytes // 4, world.rank, world.size)
    returned = operation(buffer)
    received = buffer if returned is None else returned
    wrong = int(np.count_nonzero(received != expected))
    total = world.allreduce(wrong)
    if total:
        where = f", the first at {int(np.flatnonzero(received != expected)[0])}" if wrong else ""
        raise ArithmeticError(
            f"{name}: all-reduce of {format_size(size_bytes)} on {world.size} ranks must give the exact sum. "
            f"Received: {total} wrong elements on all ranks, {wrong} on rank {world.rank}{where}"
        )


def _sample(operation: Sum, buffer: Buffer, times: int) -> float:
    """Return the seconds of one operation on the slowest rank, averaged over `times` back to back."""
    world = MPI.COMM_WORLD
    world.Barrier()
    start = time.perf_counter()
    for _ in range(times):
        operation(buffer)
    mine = (time.perf_counter() - start) / times
    return float(world.allreduce(mine, op=MPI.MAX))


def measure_size(size_bytes: int, operations: dict[str, Sum], sample_s: float) -> Row:
    """Verify each contender, then take samples of them and of a plain copy in turn."""
    # Sums of zeros stay zeros. Memory is touched before it is timed.
    buffer, target = aligned(size_bytes // 4, 0), aligned(size_bytes // 4, 1)
    best = operations.get("mpi-best")
    if isinstance(best, BestOfMpi):
        best.choose(buffer, sample_s)
    for name, operation in operations.items():
        verify(operation, name, size_bytes)
    turns: dict[str, Sum] = {**operations, "copy": lambda source: np.copyto(target, source)}
    times = {name: repetitions(sample_s, _sample(each, buffer, 1)) for name, each in turns.items()}
    samples: dict[str, list[float]] = {name: [] for name in turns}
    world = MPI.COMM_WORLD
    deadline = time.perf_counter() + _SECONDS * len(operations)
    for count in range(_MOST_SAMPLES):
        late = world.bcast(time.perf_counter() > deadline)  # rank 0 decides for all
        if count >= _LEAST_SAMPLES and late:
            break
        for name, operation in turns.items():
            samples[name].append(_sample(operation, buffer, times[name]))
    copies = samples.pop("copy")
    for name, operation in operations.items():
        verify(operation, name, size_bytes)
    return Row(size_bytes, samples, copies, best.chosen if isinstance(best, BestOfMpi) else "")


def measure(
    sizes_bytes: Sequence[int],
    sample_s: float,
    where: str,
    names: Sequence[str] = ("mpi", "mpi-best", "hvpipe"),
    in_place: bool = True,
) -> AllReduceReport:
    """Measure these contenders with every size in turn. All ranks call this and get the report.

    Operations shorter than `sample_s` are timed several at once.
    """
    world = MPI.COMM_WORLD
    operations = contenders(names, in_place)
    rows = []
    for size_bytes in sizes_bytes:
        if world.rank == 0:
            print(f"{format_size(size_bytes)} ...", file=sys.stderr, flush=True)
        rows.append(measure_size(size_bytes, operations, sample_s))
    version = MPI.Get_library_version().split(",")[0].strip()
    hosts = len(set(world.allgather(MPI.Get_processor_name())))
    return AllReduceReport(world.size, where, hosts, version, tuple(rows), in_place=in_place)
