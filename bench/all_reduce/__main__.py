"""All-reduce bandwidth: hvpipe against MPI_Allreduce, and against what memory or the link gives.

``python -m bench.all_reduce --ranks 2`` measures this host. ``--cluster 4x300mbit`` measures a virtual
cluster, and its link before and after; ``--hosts a:2,b:2`` real hosts. MPI_Allreduce runs as it is, and with
the best of Open MPI's algorithms for each size; ``--algorithm each`` measures hvpipe's own as well.
Bandwidths are defined as in nccl-tests (see metrics.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from bench.all_reduce.report import AllReduceReport
from bench.command import add_hosts, add_sizes, status_of
from bench.hosts import rank_benchmark
from bench.hosts.links import measure_two_way
from bench.metrics import parse_size, sizes
from hvpipe.specs.tuning import ALGORITHMS

# A link's token bucket lets 256 KB pass at once after a pause. Samples are so long that this weighs little.
_SAMPLE_S, _LINK_SAMPLE_S = 0.02, 0.3


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 when measured, 1 with a line of explanation when not, 130 at Ctrl-C. Results are verified."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.all_reduce", description="Measure all-reduce bandwidth."
    )
    add_hosts(parser)
    add_sizes(parser, "4K", "256M")
    parser.add_argument("--out", action="store_true", help="sum into another buffer instead of in place")
    parser.add_argument("--no-shared-memory", action="store_true", help="ranks of one host use the network")
    parser.add_argument(
        "--algorithm", choices=("each",), help="also hvpipe by each algorithm of HVPIPE_ALL_REDUCE"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    os.environ.setdefault("OMPI_MCA_coll_tuned_use_dynamic_rules", "1")  # lets mpi-best choose an algorithm
    return status_of("bench.all_reduce", partial(_measure, parser.parse_args(argv)))


def _measure(options: argparse.Namespace) -> int:
    """Measure on the ranks, and their link before and after."""
    sizes_bytes = sizes(parse_size(options.min), parse_size(options.max))
    with rank_benchmark.hosts_of(options.cluster, options.hosts) as hosts:
        names = [host.name for host in hosts.spec.hosts]
        several = len(names) > 1
        arguments = {"sizes_bytes": sizes_bytes, "sample_s": _LINK_SAMPLE_S if several else _SAMPLE_S}
        arguments["where"] = hosts.describe()
        arguments["in_place"] = not options.out
        usual = ["mpi", "hvpipe"] if options.out else ["mpi", "mpi-best", "hvpipe"]
        own = [f"hvpipe-{name}" for name in ALGORITHMS] if options.algorithm else []
        arguments["names"] = [*usual, *own]
        if options.no_shared_memory:
            os.environ["HVPIPE_SHARED_MEMORY"] = "0"
            arguments["where"] += ", without shared memory"
        rates = list(measure_two_way(hosts, names[0], names[-1])) if several else []
        report: AllReduceReport = rank_benchmark.run_on_ranks(
            "bench.all_reduce.worker", arguments, hosts, options.ranks
        )
        rates += measure_two_way(hosts, names[0], names[-1]) if several else ()
    report = replace(report, link_bits_per_s=fmean(rates)) if rates else report
    print(report.to_text())
    if options.json is not None:
        options.json.write_text(report.to_json())
        print(f"written: {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
