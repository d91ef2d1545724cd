"""What benchmarks share that start themselves as ranks: their options, how they start, where results go.

A benchmark that a person starts runs `python -m bench.NAME` on every rank and reads rank 0's report from a
file. A benchmark that a launcher starts is one of the ranks: it measures, and rank 0 prints the report.
"""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import hvpipe
from bench.cluster.spec import add_spec_arguments
from bench.cluster.virtual_cluster import VirtualCluster
from bench.errors import BenchError
from bench.launch import mpirun
from hvpipe.comm.discover import discover
from hvpipe.errors import HvpipeError

if TYPE_CHECKING:
    from bench.all_reduce.report import AllReduceReport
    from bench.pipeline.report import PipelineReport

    Report = AllReduceReport | PipelineReport

_ROOT = Path(__file__).parents[2]


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
    measure: Callable[[argparse.Namespace], Report],
    drive: Callable[[argparse.Namespace, list[str]], Report],
) -> int:
    """Run a benchmark's command line and return its exit code.

    Args:
        name: the benchmark's module, as in "bench.all_reduce".
        parser: from make_parser, with the benchmark's own options.
        argv: the words of the command line; None: this process's.
        check: raises BenchError for options that cannot be followed, before anything starts.
        measure: a rank's part; returns the report.
        drive: starts the ranks and returns their report.

    Returns:
        0 when measured, 1 with a line of explanation when not, 130 at Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(words)
    try:
        check(arguments)
        as_rank = arguments.result is not None or discover().launcher != "none"
        report = None if as_rank else drive(arguments, words)
    except (HvpipeError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if as_rank:
        _run_rank(arguments, measure)
    else:
        _show(report, arguments)
    return 0


def on_this_host(arguments: argparse.Namespace) -> bool:
    """Return whether the ranks run on this host and not on a virtual cluster."""
    return arguments.hosts is None and arguments.spec is None


def run_ranks(
    name: str, arguments: argparse.Namespace, words: list[str], cluster: VirtualCluster | None = None
) -> Any:
    """Start the ranks on this host, or on a cluster that is up, and return rank 0's report."""
    warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="hvpipe-ranks-") as directory:
        result = Path(directory) / "report"
        where = "one host" if cluster is None else cluster.spec.describe()
        command = [sys.executable, "-m", name, *words, "--result", str(result), "--where", where]
        if cluster is None:
            ranks = 2 if arguments.ranks is None else arguments.ranks
            line = mpirun.line(ranks, command, yields=mpirun.crowded(ranks))
        else:
            ranks = cluster.spec.slots if arguments.ranks is None else arguments.ranks
            line = cluster.mpirun_command(ranks, command)
        try:
            env = {"PYTHONPATH": str(_ROOT)}
            done = mpirun.run(line, timeout_s=arguments.timeout, env=env, capture=False)
        except subprocess.TimeoutExpired as error:
            raise BenchError(
                f"The ranks must end within --timeout. Received: none after {arguments.timeout:g} s"
            ) from error
        if done.returncode != 0 or not result.exists():
            raise BenchError(f"The ranks failed with status {done.returncode}: see their output")
        return pickle.loads(result.read_bytes())


def warn_if_busy() -> None:
    """Warn if other processes use the cores, because figures measured beside them are worth little."""
    share = psutil.cpu_percent(interval=0.5) / 100
    if share > 0.1:
        print(f"other processes use {share:.0%} of the cores: expect noise", file=sys.stderr, flush=True)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run_rank(arguments: argparse.Namespace, measure: Callable[[argparse.Namespace], Report]) -> None:
    """Do a rank's part. An uncaught error on any rank ends them all: `measure` calls hvpipe.init()."""
    report = measure(arguments)
    if hvpipe.rank() == 0 and arguments.result is not None:
        arguments.result.write_bytes(pickle.dumps(report))
    elif hvpipe.rank() == 0:
        _show(report, arguments)


def _show(report: Report, arguments: argparse.Namespace) -> None:
    print(report.to_text())
    if arguments.json is not None:
        arguments.json.write_text(report.to_json())
        print(f"{arguments.kept}: {arguments.json}")
