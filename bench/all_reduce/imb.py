"""The Intel MPI Benchmarks as the referee of our all-reduce figures.

    python -m venv build/imb && build/imb/bin/pip install impi-rt mpi4py numpy psutil
    python -m bench.all_reduce.imb --environment build/imb --cluster 2x1gbit --min 4M --max 64M

Three things are timed in turn: the Intel MPI Benchmarks (IMB-MPI1, which others wrote) with Intel MPI; our
worker with the same Intel MPI, which shows whether both measure the same; and our worker with hvpipe.
With Intel MPI both sum into another buffer. hvpipe sums in place, as it trains.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median

from bench.all_reduce.report import AllReduceReport
from bench.command import add_hosts, add_sizes, status_of
from bench.errors import BenchError
from bench.hosts import rank_benchmark
from bench.hosts.hosts import Hosts
from bench.metrics import bus_bandwidth, format_size, parse_size, sizes, table

_LIMIT_S = 3600.0
_CONTENDERS = ("IMB, Intel MPI", "ours, Intel MPI", "ours, hvpipe")
_ROW = re.compile(r"^\s*(\d+)\s+\d+\s+[\d.]+\s+([\d.]+)\s+[\d.]+\s*$", re.MULTILINE)  # bytes, ..., t_max


def parse(output: str) -> dict[int, float]:
    """Return the seconds of the slowest rank by size in bytes, from what IMB-MPI1 prints."""
    return {int(size): float(most_us) * 1e-6 for size, most_us in _ROW.findall(output)}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 when measured, 1 with a line of explanation when not, 130 at Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.all_reduce.imb", description="All-reduce beside the Intel MPI Benchmarks."
    )
    parser.add_argument("--environment", type=Path, required=True, help="where pip installed impi-rt")
    add_hosts(parser)
    add_sizes(parser, "1M", "64M")
    parser.add_argument("--rounds", type=int, default=3)
    return status_of("bench.all_reduce.imb", partial(_measure, parser.parse_args(argv)))


def _measure(options: argparse.Namespace) -> int:
    with rank_benchmark.hosts_of(options.cluster, options.hosts) as hosts:
        print(_measured(hosts, options))
    return 0


def _measured(hosts: Hosts, options: argparse.Namespace) -> str:
    if options.rounds < 1:
        raise BenchError(f"--rounds must be at least 1. Received: --rounds {options.rounds}")
    if not (options.environment / "bin" / "IMB-MPI1").exists():
        raise BenchError(
            "--environment must be a virtual environment with impi-rt, mpi4py, numpy and psutil. "
            f"Received: {options.environment}, which has no bin/IMB-MPI1"
        )
    sizes_bytes = sizes(parse_size(options.min), parse_size(options.max))
    ranks = options.ranks or hosts.spec.slots
    found: dict[str, list[dict[int, float]]] = {name: [] for name in _CONTENDERS}
    for _ in range(options.rounds):
        with _activated(options.environment):
            found[_CONTENDERS[0]].append(_imb(hosts, ranks, sizes_bytes, options.environment))
            found[_CONTENDERS[1]].append(_ours("mpi-imb", hosts, ranks, sizes_bytes, options.environment))
        found[_CONTENDERS[2]].append(_ours("hvpipe", hosts, ranks, sizes_bytes, options.environment))
    seconds = {
        name: {size: median(each[size] for each in rounds) for size in sizes_bytes}
        for name, rounds in found.items()
    }
    imb, same, hvpipe = seconds.values()
    rows = [
        [
            format_size(size),
            *(f"{bus_bandwidth(size, each[size], ranks) / 1e9:.4g}" for each in seconds.values()),
            f"{same[size] / imb[size]:.2f}",
            f"{imb[size] / hvpipe[size]:.2f}x",
        ]
        for size in sizes_bytes
    ]
    header = ["size", *(f"{name} GB/s" for name in _CONTENDERS), "ours / IMB, time", "hvpipe over IMB"]
    method = geometric_mean(same[size] / imb[size] for size in sizes_bytes)
    gain = geometric_mean(imb[size] / hvpipe[size] for size in sizes_bytes)
    means = f"geometric means: ours / IMB on the same MPI {method:.2f}, hvpipe over IMB {gain:.2f}x"
    head = f"{ranks} ranks, {hosts.describe()}; medians of {options.rounds} rounds; bus bandwidths"
    return f"{head}\n{table(header, rows)}\n{means}"


def _ours(
    contender: str, hosts: Hosts, ranks: int, sizes_bytes: Sequence[int], environment: Path
) -> dict[int, float]:
    python = environment / "bin" / "python" if contender != "hvpipe" else Path(sys.executable)
    arguments = {"sizes_bytes": sizes_bytes, "sample_s": 0.3, "where": "", "names": (contender,)}
    report: AllReduceReport = rank_benchmark.run_on_ranks(
        "bench.all_reduce.worker", arguments, hosts, ranks, python=str(python)
    )
    return {row.size_bytes: row.seconds(contender) for row in report.rows}


def _imb(hosts: Hosts, ranks: int, sizes_bytes: Sequence[int], environment: Path) -> dict[int, float]:
    with tempfile.NamedTemporaryFile("w", dir=hosts.shared_folder, suffix=".sizes") as lengths:
        lengths.write("".join(f"{size}\n" for size in sizes_bytes))
        lengths.flush()
        program = [str(environment / "bin" / "IMB-MPI1"), "Allreduce", "-npmin", str(ranks)]
        command = [*program, "-msglen", lengths.name, "-msglog", "0:30", "-iter", "1000,2000", "-time", "2"]
        try:
            done = hosts.run(ranks, command, timeout_s=_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"IMB-MPI1 must end. Received: none after {error.timeout:g} s") from error
    measured = parse(done.stdout)
    if done.returncode != 0 or not set(sizes_bytes) <= set(measured):
        raise BenchError(
            f"IMB-MPI1 failed with status {done.returncode}: {done.stdout[-500:]}{done.stderr[-2000:]}"
        )
    return measured


@contextmanager
def _activated(environment: Path) -> Iterator[None]:
    """Let programs of that environment find one another and their libraries.

    Ranks of Intel MPI are bound to no cores and give up theirs while they wait, as ours do.
    """
    settings = {"I_MPI_PIN": "off", "I_MPI_THREAD_YIELD": "2"}
    for name, folder in (("PATH", "bin"), ("LD_LIBRARY_PATH", "lib")):
        paths = (str(environment.resolve() / folder), os.environ.get(name))
        settings[name] = os.pathsep.join(filter(None, paths))
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


if __name__ == "__main__":
    sys.exit(main())
