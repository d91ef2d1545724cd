"""The step of a pipeline by placement (greedy, random, ...), measured, against what was simulated.

``python -m bench.pipeline --hosts 2 --rate 1gbit --model resnet50`` on a virtual cluster, ``--ranks 2`` on
this host, or under a launcher. Every rank first profiles the model and the links, as `hvpipe profile` does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.cluster.command import add_spec_arguments, spec_from_arguments
from bench.cluster.virtual_cluster import Cluster, ClusterError
from bench.launch import mpirun
from bench.launch.ranks import ends_all_ranks, run_ranks, started_as_rank
from bench.pipeline.report import PipelineReport
from bench.training.image_model import MODELS, Workload

_METHODS = ("greedy", "even", "round_robin", "random", "random_cuts", "m_topo", "m_etf")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description="The step of a pipeline.")
    parser.add_argument("--ranks", type=int, help="ranks on this host (default: 2), or on the cluster")
    add_spec_arguments(parser)
    parser.add_argument("--model", default="resnet50", choices=sorted([*MODELS, "transformer"]))
    parser.add_argument("--pixels", type=int, default=64, help="side of an image, or length of a sequence")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="samples of a step (default: 32)")
    parser.add_argument("--microbatches", default="auto", help="a number (default: what greedy finds best)")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--methods", default="greedy,random", help=f"some of {','.join(_METHODS)}")
    parser.add_argument("--seeds", type=int, default=2, help="how many random placements (default: 2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of a plan in a round (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="of a TensorFlow operation (default: 1)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds until the run is ended")
    parser.add_argument("--json", type=Path, help="write every step there")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--where", default="as launched", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 when measured, 1 with a line of explanation when not."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    try:
        _methods(arguments), _microbatches(arguments)
        if started_as_rank(arguments.result):
            return _measure(arguments)
        report = _drive(arguments, words)
    except (ClusterError, ValueError) as error:
        print(f"bench.pipeline: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    _show(report, arguments)
    return 0


def _methods(arguments: argparse.Namespace) -> tuple[str, ...]:
    methods = tuple(name for name in arguments.methods.split(",") if name)
    if not methods or not set(methods) <= set(_METHODS):
        raise ValueError(
            f"Methods must be some of {', '.join(_METHODS)}. Received: methods={arguments.methods!r}"
        )
    return methods


def _microbatches(arguments: argparse.Namespace) -> int | None:
    """How many; None where the planner chooses."""
    return None if arguments.microbatches == "auto" else int(arguments.microbatches)


def _measure(arguments: argparse.Namespace) -> int:
    """A rank's part; an error on any rank ends them all."""
    from bench.pipeline.worker import Effort, measure

    with ends_all_ranks() as world:
        effort = Effort(
            methods=_methods(arguments),
            seeds=arguments.seeds,
            schedule=arguments.schedule,
            microbatches=_microbatches(arguments),
            chunks=arguments.chunks,
            rounds=arguments.rounds,
            steps=arguments.steps,
        )
        workload = Workload(
            arguments.model, arguments.pixels, arguments.classes, arguments.batch, arguments.threads
        )
        report = measure(
            workload, effort, arguments.where, lambda text: print(text, file=sys.stderr, flush=True)
        )
        if world.rank == 0 and arguments.result is not None:
            arguments.result.write_text(report.to_json())
        elif world.rank == 0:
            _show(report, arguments)
    return 0


def _drive(arguments: argparse.Namespace, words: list[str]) -> PipelineReport:
    """Start the ranks here or on a virtual cluster."""

    def run(start: mpirun.Start, where: str) -> PipelineReport:
        text = run_ranks("bench.pipeline", start, words, where=where, timeout_s=arguments.timeout)
        return PipelineReport.from_json(text)

    if arguments.hosts is None and arguments.spec is None:
        ranks = 2 if arguments.ranks is None else arguments.ranks
        return run(lambda command: mpirun.one_host(ranks, command), "one host")
    spec = spec_from_arguments(arguments)
    ranks = spec.slots if arguments.ranks is None else arguments.ranks
    with Cluster(spec) as cluster:
        return run(lambda command: cluster.mpirun_command(ranks, command), spec.describe())


def _show(report: PipelineReport, arguments: argparse.Namespace) -> None:
    print(report.to_text())
    if arguments.json is not None:
        arguments.json.write_text(report.to_json())
        print(f"steps: {arguments.json}")


if __name__ == "__main__":
    sys.exit(main())
