"""All-reduce bandwidth: hvpipe against MPI_Allreduce, and against what memory or the link gives.

``python -m bench.all_reduce --ranks 2`` on this host; ``--hosts 4 --rate 300mbit`` or ``--spec FILE`` on a
virtual cluster, with iperf3 before and after; under a launcher (``mpirun -np 8 python -m bench.all_reduce``)
it measures that world. Bandwidths are those of nccl-tests (see metrics.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.all_reduce.report import AllReduceReport
from bench.cluster.command import add_spec_arguments, spec_from_arguments
from bench.cluster.link_rate import measure_two_way
from bench.cluster.virtual_cluster import Cluster, ClusterError
from bench.launch import mpirun
from bench.launch.ranks import ends_all_ranks, run_ranks, started_as_rank
from bench.metrics import parse_size, sizes

# A link's token bucket holds 256 KB that pass at once after a pause: samples so long that it weighs little.
_LINK_SAMPLE_S = 0.3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.all_reduce", description="All-reduce bandwidth.")
    parser.add_argument(
        "--ranks", type=int, help="ranks on this host (default: 2), or on the cluster (every slot)"
    )
    add_spec_arguments(parser)
    parser.add_argument("--min", default="4K", help="smallest buffer (default: 4K)")
    parser.add_argument("--max", default="256M", help="largest buffer (default: 256M)")
    parser.add_argument("--factor", type=int, default=4, help="between sizes (default: 4)")
    parser.add_argument("--engines", default="mpi,hvpipe", help="who takes part (default: mpi,hvpipe)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for a size and engine (default: 2)")
    parser.add_argument("--samples", type=int, default=5, help="least samples of a size (default: 5)")
    parser.add_argument(
        "--sample-seconds", type=float, help="least length of a sample (default: 0.02; links 0.3)"
    )
    parser.add_argument(
        "--offset",
        type=int,
        default=0,
        help="bytes between a page's begin and the buffer's (default: 0)",
    )
    parser.add_argument(
        "--pool",
        default="0",
        help="buffers in turn of so many bytes, e.g. 128M, to meet them outside the cache",
    )
    parser.add_argument(
        "--timeout", type=float, default=3600.0, help="seconds until the run is ended (default: 3600)"
    )
    parser.add_argument("--json", type=Path, help="write every sample there")
    parser.add_argument("--plot", type=Path, help="write a PNG there")
    parser.add_argument(
        "--result", type=Path, help=argparse.SUPPRESS
    )  # a rank started by this command writes here
    parser.add_argument("--where", default="as launched", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 when measured and verified, 1 with a line of explanation when not."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    try:
        if started_as_rank(arguments.result):
            return _measure(arguments)
        report = _drive(arguments, words)
    except (ClusterError, ValueError) as error:
        print(f"bench.all_reduce: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    _show(report, arguments)
    return 0


def _engines(arguments: argparse.Namespace) -> tuple[str, ...]:
    names = tuple(arguments.engines.split(","))
    if not names or not set(names) <= {"mpi", "hvpipe"} or len(set(names)) < len(names):
        raise ValueError(f"Engines must be mpi, hvpipe or both. Received: engines={arguments.engines!r}")
    return names


def _sizes(arguments: argparse.Namespace) -> tuple[int, ...]:
    return tuple(sizes(parse_size(arguments.min), parse_size(arguments.max), arguments.factor))


def _measure(arguments: argparse.Namespace) -> int:
    """A rank's part; an error on any rank ends them all."""
    from bench.all_reduce.worker import Effort, measure

    sample_s = 0.02 if arguments.sample_seconds is None else arguments.sample_seconds
    with ends_all_ranks() as world:
        effort = Effort(
            sizes_bytes=_sizes(arguments),
            contenders=_engines(arguments),
            seconds=arguments.seconds,
            least_samples=arguments.samples,
            sample_s=sample_s,
            offset_bytes=arguments.offset,
            pool_bytes=parse_size(arguments.pool),
        )
        report = measure(effort, arguments.where, lambda text: print(text, file=sys.stderr, flush=True))
        if world.rank == 0 and arguments.result is not None:
            arguments.result.write_text(report.to_json())
        elif world.rank == 0:
            _show(report, arguments)
    return 0


def _drive(arguments: argparse.Namespace, words: list[str]) -> AllReduceReport:
    """Start the ranks here or on a virtual cluster, and add what the link gives."""
    _engines(arguments), _sizes(arguments), parse_size(arguments.pool)  # before anything is started
    if arguments.hosts is None and arguments.spec is None:
        ranks = 2 if arguments.ranks is None else arguments.ranks
        return _run(lambda command: mpirun.one_host(ranks, command), words, "one host", arguments.timeout)
    spec = spec_from_arguments(arguments)
    ranks = spec.slots if arguments.ranks is None else arguments.ranks
    if arguments.sample_seconds is None:
        words = [*words, "--sample-seconds", str(_LINK_SAMPLE_S)]
    with Cluster(spec) as cluster:
        rates = []
        if len(spec.hosts) > 1:
            rates.append(measure_two_way(cluster, spec.hosts[0].name, spec.hosts[-1].name))
        report = _run(
            lambda command: cluster.mpirun_command(ranks, command), words, spec.describe(), arguments.timeout
        )
        if len(spec.hosts) > 1:
            rates.append(measure_two_way(cluster, spec.hosts[0].name, spec.hosts[-1].name))
    if not rates:
        return report
    bits_per_s = sum(rate.bits_per_s for rate in rates) / len(rates)
    return replace(report, link_bits_per_s=bits_per_s, link_tool=rates[0].tool)


def _run(start: mpirun.Start, words: list[str], where: str, timeout_s: float) -> AllReduceReport:
    return AllReduceReport.from_json(
        run_ranks("bench.all_reduce", start, words, where=where, timeout_s=timeout_s)
    )


def _show(report: AllReduceReport, arguments: argparse.Namespace) -> None:
    print(report.to_text())
    if arguments.json is not None:
        arguments.json.write_text(report.to_json())
        print(f"samples: {arguments.json}")
    if arguments.plot is not None:
        report.plot(arguments.plot)
        print(f"plot: {arguments.plot}")


if __name__ == "__main__":
    sys.exit(main())
