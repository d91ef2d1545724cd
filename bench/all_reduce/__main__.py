"""All-reduce bandwidth: hvpipe against MPI_Allreduce, and against what memory or the link gives.

``python -m bench.all_reduce --ranks 2`` measures this host. ``--hosts 4 --rate 300mbit`` or ``--spec FILE``
measures a virtual cluster, and its link before and after. Under a launcher, as in
``mpirun -np 8 python -m bench.all_reduce``, it measures the launcher's ranks. MPI_Allreduce runs as it is,
and with the best of Open MPI's algorithms for each size. Bandwidths are defined as in nccl-tests (see
metrics.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from bench.all_reduce.report import AllReduceReport
from bench.cluster.link_rate import measure_two_way
from bench.cluster.spec import spec_from_arguments
from bench.cluster.virtual_cluster import VirtualCluster
from bench.hosts import rank_benchmark
from bench.metrics import parse_size, sizes

_NAME = "bench.all_reduce"
# A link's token bucket lets 256 KB pass at once after a pause. Samples are so long that this weighs little.
_LINK_SAMPLE_S = 0.3


def _parser() -> argparse.ArgumentParser:
    parser = rank_benchmark.make_parser(_NAME, "Measure all-reduce bandwidth.")
    parser.add_argument("--min", default="4K", help="smallest buffer (default: 4K)")
    parser.add_argument("--max", default="256M", help="largest buffer (default: 256M)")
    parser.add_argument(
        "--sample-seconds", type=float, help="minimum length of a sample (default: 0.02; on links 0.3)"
    )
    rank_benchmark.add_output_arguments(parser, "sample")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see run_command for the exit codes. Results are verified."""
    os.environ.setdefault("OMPI_MCA_coll_tuned_use_dynamic_rules", "1")  # lets mpi-best choose an algorithm
    return rank_benchmark.run_command(_NAME, _parser(), argv, check=_sizes, measure=_measure, drive=_drive)


def _sizes(arguments: argparse.Namespace) -> tuple[int, ...]:
    return tuple(sizes(parse_size(arguments.min), parse_size(arguments.max)))


def _measure(arguments: argparse.Namespace) -> AllReduceReport:
    from bench.all_reduce.worker import measure

    sample_s = 0.02 if arguments.sample_seconds is None else arguments.sample_seconds
    return measure(_sizes(arguments), sample_s, arguments.where, rank_benchmark.say)


def _drive(arguments: argparse.Namespace, words: list[str]) -> AllReduceReport:
    """Start the ranks here or on a virtual cluster, and add the measured rate of its links."""
    if rank_benchmark.on_this_host(arguments):
        return rank_benchmark.run_ranks(_NAME, arguments, words)
    spec = spec_from_arguments(arguments)
    if arguments.sample_seconds is None:
        words = [*words, "--sample-seconds", str(_LINK_SAMPLE_S)]
    with VirtualCluster(spec) as cluster:
        rates = []
        if len(spec.hosts) > 1:
            rates.append(measure_two_way(cluster, spec.hosts[0].name, spec.hosts[-1].name))
        report = rank_benchmark.run_ranks(_NAME, arguments, words, cluster)
        if len(spec.hosts) > 1:
            rates.append(measure_two_way(cluster, spec.hosts[0].name, spec.hosts[-1].name))
    if not rates:
        return report
    return replace(report, link_bits_per_s=sum(rate.bits_per_s for rate in rates) / len(rates))


if __name__ == "__main__":
    sys.exit(main())
