"""What benchmarks share that start themselves as ranks: their options, how they start, where results go.

A benchmark that a person starts runs `python -m bench.NAME` on every rank and reads rank 0's report from a
file. A benchmark that a launcher starts is one of the ranks: it measures, and rank 0 prints the report.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cluster.spec import add_spec_arguments
from bench.cluster.virtual_cluster import VirtualCluster
from bench.launch import mpirun
from bench.launch.ranks import ends_all_ranks, run_ranks, started_as_rank
from hvpipe.errors import HvpipeError

if TYPE_CHECKING:
    from bench.all_reduce.report import AllReduceReport
    from bench.pipeline.report import PipelineReport

    Report = AllReduceReport | PipelineReport


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of `python -m NAME` with the options that say where ranks run."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument(
        "--ranks", type=int, help="ranks on this host (default: 2), or on the cluster (default: every slot)"
    )
    add_spec_arguments(parser)
    return parser


def add_output_arguments(parser: argparse.ArgumentParser, sample: str) -> None:
    """Add the options that end a run and keep its results. `sample` is what the JSON has many of."""
    parser.add_argument(
        "--timeout", type=float, default=3600.0, help="seconds until the run is ended (default: 3600)"
    )
    parser.add_argument("--json", type=Path, help=f"write every {sample} to this file")
    parser.set_defaults(kept=f"{sample}s")
    # For a rank that the command starts: where its report goes, and how the report describes the hosts.
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--where", default="as launched", help=argparse.SUPPRESS)


def run_command(
    name: str,
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    *,
    check: Callable[[argparse.Namespace], object],
    measure: Callable[[argparse.Namespace, int], Report],
    drive: Callable[[argparse.Namespace, list[str]], Report | None],
) -> int:
    """Run a benchmark's command line and return its exit code.

    Args:
        name: the benchmark's module, as in "bench.all_reduce".
        parser: from make_parser, with the benchmark's own options.
        argv: the words of the command line; None: this process's.
        check: raises BenchError for options that cannot be followed, before anything starts.
        measure: a rank's part. Takes the options and the number of ranks, and returns the report.
        drive: starts the ranks and returns their report, or None if it has printed everything itself.

    Returns:
        0 when measured, 1 with a line of explanation when not, 130 at Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(words)
    try:
        check(arguments)
        if started_as_rank(arguments.result):
            _run_rank(arguments, measure)
            return 0
        report = drive(arguments, words)
    except (HvpipeError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if report is not None:
        _show(report, arguments)
    return 0


def on_this_host(arguments: argparse.Namespace) -> bool:
    """Return whether the ranks run on this host and not on a virtual cluster."""
    return arguments.hosts is None and arguments.spec is None


def run_on_this_host(name: str, arguments: argparse.Namespace, words: list[str]) -> str:
    """Start the ranks on this host and return the text of their report."""
    ranks = 2 if arguments.ranks is None else arguments.ranks
    return run_ranks(
        name,
        lambda command: mpirun.one_host(ranks, command),
        words,
        where="one host",
        timeout_s=arguments.timeout,
    )


def run_on_cluster(
    name: str, arguments: argparse.Namespace, words: list[str], cluster: VirtualCluster
) -> str:
    """Start the ranks on a cluster that is up and return the text of their report."""
    ranks = cluster.spec.slots if arguments.ranks is None else arguments.ranks
    return run_ranks(
        name,
        lambda command: cluster.mpirun_command(ranks, command),
        words,
        where=cluster.spec.describe(),
        timeout_s=arguments.timeout,
    )


def say(text: str) -> None:
    """Print a line about progress."""
    print(text, file=sys.stderr, flush=True)


def _run_rank(arguments: argparse.Namespace, measure: Callable[[argparse.Namespace, int], Report]) -> None:
    """Do a rank's part. An error on any rank ends them all."""
    with ends_all_ranks() as world:
        report = measure(arguments, world.size)
        if world.rank == 0 and arguments.result is not None:
            arguments.result.write_text(report.to_json())
        elif world.rank == 0:
            _show(report, arguments)


def _show(report: Report, arguments: argparse.Namespace) -> None:
    print(report.to_text())
    if arguments.json is not None:
        arguments.json.write_text(report.to_json())
        print(f"{arguments.kept}: {arguments.json}")
