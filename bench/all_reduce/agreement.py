"""What it costs that all ranks agree on what comes next, by the number of ranks.

    python -m bench.all_reduce.agreement --ranks 2,4,8,16,32,64

Beside it MPI_Allgather of a control record, which is the least that tells each rank what all others do.
Messages grow as the logarithm of the ranks. All ranks share the cores of this host, so times grow faster.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

from bench.command import status_of
from bench.errors import BenchError
from bench.hosts import rank_benchmark
from bench.hosts.hosts import ThisHost
from bench.metrics import table

_RECORD_BYTES = 128
_SAMPLES, _SAMPLE_S = 15, 0.05


def measure() -> tuple[float, float, float]:
    """Return the seconds of an agreement and of MPI_Allgather, and the messages of an agreement by rank 0."""
    import numpy as np
    from mpi4py import MPI

    import hvpipe
    from hvpipe.session import current

    hvpipe.init()
    ranks = MPI.COMM_WORLD.Dup()
    record, all_records = np.zeros(_RECORD_BYTES, np.uint8), np.zeros(_RECORD_BYTES * ranks.size, np.uint8)
    contenders: tuple[Callable[[], object], ...] = (
        hvpipe.barrier,
        lambda: ranks.Allgather(record, all_records),
    )
    found: tuple[list[float], ...] = ([], [])
    before = current().engine.counters()["messages_sent"]
    hvpipe.barrier()
    messages = current().engine.counters()["messages_sent"] - before
    times = [max(1, int(_SAMPLE_S / _sample(ranks, call, 3))) for call in contenders]
    for _ in range(_SAMPLES):
        for call, count, samples in zip(contenders, times, found, strict=True):
            samples.append(_sample(ranks, call, count))
    return median(found[0]), median(found[1]), messages


def _sample(ranks: object, call: Callable[[], object], times: int) -> float:
    from mpi4py import MPI

    ranks.Barrier()
    begun_s = time.perf_counter()
    for _ in range(times):
        call()
    return float(ranks.allreduce((time.perf_counter() - begun_s) / times, op=MPI.MAX))


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 when measured, 1 with a line of explanation when not, 130 at Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.all_reduce.agreement", description="An agreement's cost by number of ranks."
    )
    parser.add_argument("--ranks", default="2,4,8,16,32,64", metavar="N,N,...")
    options = parser.parse_args(argv)
    return status_of("bench.all_reduce.agreement", lambda: _measure(options.ranks))


def _measure(text: str) -> int:
    counts = [int(each) if each.isdecimal() else 0 for each in text.split(",")]
    if min(counts) < 2:
        raise BenchError(f"--ranks must be numbers from 2 on, as 2,4,8. Received: --ranks {text}")
    os.environ["HVPIPE_SHARED_MEMORY"] = "0"
    found = {
        ranks: rank_benchmark.run_on_ranks("bench.all_reduce.agreement", {}, ThisHost(), ranks)
        for ranks in counts
    }
    most = max(messages for _, _, messages in found.values())
    rows = [
        [
            str(ranks),
            f"{messages:g}",
            "#" * round(20 * messages / most),
            f"{own_s * 1e6:.1f}",
            f"{mpi_s * 1e6:.1f}",
            f"{mpi_s / own_s:.2f}x",
        ]
        for ranks, (own_s, mpi_s, messages) in found.items()
    ]
    print(table(["ranks", "messages", "", "us", "MPI_Allgather us", "speed over MPI's"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
