"""The time of a training step by mode, against computing alone and the bound of computing and links.

``python -m bench.step --hosts 2 --rate 300mbit`` on a virtual cluster, ``--ranks 2`` on this host, or under a
launcher. ``--plain`` compares one rank under hvpipe with plain Keras: step, tracing, memory, import.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.cluster.command import add_spec_arguments, spec_from_arguments
from bench.cluster.link_rate import measure_two_way
from bench.cluster.virtual_cluster import Cluster, ClusterError
from bench.launch import mpirun
from bench.launch.ranks import ends_all_ranks, run_ranks, started_as_rank
from bench.step.report import StepReport
from bench.training.image_model import MODELS, Workload

_MODES = ("none", "backward", "step", "stale")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description="The time of a training step.")
    parser.add_argument(
        "--ranks", type=int, help="ranks on this host (default: 2), or on the cluster (every slot)"
    )
    add_spec_arguments(parser)
    parser.add_argument(
        "--plain", action="store_true", help="one rank against plain Keras, tracing, memory, import"
    )
    parser.add_argument("--model", default="resnet50", choices=sorted(MODELS))
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="images a rank and step (default: 8)")
    parser.add_argument(
        "--threads", type=int, help="threads of an operation (default: cores / ranks of a host)"
    )
    parser.add_argument("--modes", default=",".join(_MODES), help=f"(default: {','.join(_MODES)})")
    parser.add_argument(
        "--beside-tcp",
        action="store_true",
        help="also compute alone while plain TCP moves as much between the hosts as gradients would",
    )
    parser.add_argument("--rounds", type=int, default=3, help="each has every mode (default: 3)")
    parser.add_argument("--steps", type=int, default=6, help="of a mode in a round (default: 6)")
    parser.add_argument(
        "--timeout", type=float, default=3600.0, help="seconds until the run is ended (default: 3600)"
    )
    parser.add_argument("--json", type=Path, help="write every step there")
    parser.add_argument("--plot", type=Path, help="write a PNG there")
    parser.add_argument(
        "--result", type=Path, help=argparse.SUPPRESS
    )  # a rank started by this command writes here
    parser.add_argument("--where", default="as launched", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 when measured, 1 with a line of explanation when not."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    try:
        if started_as_rank(arguments.result):
            return _measure(arguments)
        _workload(arguments, 1), _modes(arguments)  # before anything is started
        if arguments.plain:
            return _plain(arguments, words)
        report = _drive(arguments, words)
    except (ClusterError, ValueError) as error:
        print(f"bench.step: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    _show(report, arguments)
    return 0


def _modes(arguments: argparse.Namespace) -> tuple[str, ...]:
    modes = tuple(mode for mode in arguments.modes.split(",") if mode)
    if not set(modes) <= set(_MODES) or len(set(modes)) < len(modes):
        raise ValueError(f"Modes must be some of {', '.join(_MODES)}. Received: modes={arguments.modes!r}")
    return modes


def _workload(arguments: argparse.Namespace, threads: int) -> Workload:
    count = threads if arguments.threads is None else arguments.threads
    return Workload(arguments.model, arguments.pixels, arguments.classes, arguments.batch, count)


def _threads(ranks: int) -> int:
    """Cores divided among the ranks of this machine, virtual hosts included."""
    return max(1, (os.cpu_count() or 1) // ranks)


def _measure(arguments: argparse.Namespace) -> int:
    """A rank's part; an error on any rank ends them all."""
    from bench.step.worker import Effort, measure

    with ends_all_ranks() as world:
        effort = Effort(_modes(arguments), arguments.rounds, arguments.steps, beside_tcp=arguments.beside_tcp)
        workload = _workload(arguments, _threads(world.size))
        report = measure(
            workload, effort, arguments.where, lambda text: print(text, file=sys.stderr, flush=True)
        )
        if world.rank == 0 and arguments.result is not None:
            arguments.result.write_text(report.to_json())
        elif world.rank == 0:
            _show(report, arguments)
    return 0


def _run(start: mpirun.Start, words: list[str], where: str, timeout_s: float) -> StepReport:
    return StepReport.from_json(run_ranks("bench.step", start, words, where=where, timeout_s=timeout_s))


def _drive(arguments: argparse.Namespace, words: list[str]) -> StepReport:
    """Start the ranks here or on a virtual cluster, and add the rate of its links."""
    if arguments.hosts is None and arguments.spec is None:
        ranks = 2 if arguments.ranks is None else arguments.ranks
        return _run(lambda command: mpirun.one_host(ranks, command), words, "one host", arguments.timeout)
    spec = spec_from_arguments(arguments)
    ranks = spec.slots if arguments.ranks is None else arguments.ranks
    with Cluster(spec) as cluster:
        measured = None
        if len(spec.hosts) > 1 and spec.slowest_rate_bits_per_s is not None:
            measured = measure_two_way(cluster, spec.hosts[0].name, spec.hosts[-1].name)
        report = _run(
            lambda command: cluster.mpirun_command(ranks, command), words, spec.describe(), arguments.timeout
        )
    limit = spec.slowest_rate_bits_per_s if len(spec.hosts) > 1 else None
    if measured is None:
        return replace(report, link_bits_per_s=limit)
    return replace(
        report, link_bits_per_s=limit, measured_bits_per_s=measured.bits_per_s, link_tool=measured.tool
    )


def _plain(arguments: argparse.Namespace, words: list[str]) -> int:
    """One rank with and without hvpipe in one process; then fresh processes for tracing, memory, import."""
    from bench.step.overhead import measure_overhead

    if "--modes" not in " ".join(words):
        words = [*words, "--modes", "step"]
    ranks = 2 if arguments.ranks is None else arguments.ranks
    one = _run(lambda command: mpirun.one_host(1, command), words, "one host", arguments.timeout)
    print(one.to_text(), flush=True)
    overhead = measure_overhead(_workload(arguments, _threads(ranks)), ranks, arguments.timeout)
    print(overhead.to_text())
    if arguments.json is not None:
        arguments.json.write_text(f'{{"one_rank": {one.to_json()},\n"overhead": {overhead.to_json()}}}\n')
        print(f"samples: {arguments.json}")
    return 0


def _show(report: StepReport, arguments: argparse.Namespace) -> None:
    print(report.to_text())
    if arguments.json is not None:
        arguments.json.write_text(report.to_json())
        print(f"steps: {arguments.json}")
    if arguments.plot is not None:
        report.plot(arguments.plot)
        print(f"plot: {arguments.plot}")


if __name__ == "__main__":
    sys.exit(main())
