"""The step of a pipeline by placement (greedy, random, ...), measured, against what was simulated.

``python -m bench.pipeline --hosts 2 --rate 1gbit --model resnet50`` on a virtual cluster, ``--ranks 2`` on
this host, or under a launcher. Every rank first profiles the model and the links, as `hvpipe profile` does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.cluster.spec import spec_from_arguments
from bench.cluster.virtual_cluster import VirtualCluster
from bench.errors import BenchError
from bench.hosts import rank_benchmark
from bench.pipeline.models import MODELS
from bench.pipeline.report import PipelineReport
from bench.rounds.record import Task
from bench.training.workloads import check

_NAME = "bench.pipeline"
_METHODS = (
    "chosen",
    "greedy",
    "even",
    "pipedream",
    "data",
    "round_robin",
    "random",
    "random_cuts",
    "m_topo",
    "m_etf",
)
"""`chosen` is what the search finds for all ranks, with any schedule; `data` is one stage on all ranks."""


def _parser() -> argparse.ArgumentParser:
    parser = rank_benchmark.make_parser(_NAME, "Measure the step of a pipeline.")
    parser.add_argument("--model", default="resnet50", choices=sorted(MODELS))
    parser.add_argument("--pixels", type=int, default=64, help="side of an image, or length of a sequence")
    parser.add_argument("--batch", type=int, default=32, help="samples of a step (default: 32)")
    parser.add_argument("--microbatches", default="auto", help="a number (default: what greedy finds best)")
    parser.add_argument("--methods", default="greedy,random", help=f"some of {','.join(_METHODS)}")
    parser.add_argument("--seeds", type=int, default=2, help="how many random placements (default: 2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps of a plan in a round (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="of a TensorFlow operation (default: 1)")
    rank_benchmark.add_output_arguments(parser, "step")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see run_command for the exit codes."""
    return rank_benchmark.run_command(_NAME, _parser(), argv, check=_check, measure=_measure, drive=_drive)


def _check(arguments: argparse.Namespace) -> None:
    _methods(arguments), _microbatches(arguments)
    check(_task(arguments))


def _task(arguments: argparse.Namespace) -> Task:
    return Task(arguments.model, arguments.batch, arguments.pixels, arguments.threads)


def _methods(arguments: argparse.Namespace) -> tuple[str, ...]:
    methods = tuple(name for name in arguments.methods.split(",") if name)
    if not methods or not set(methods) <= set(_METHODS):
        raise BenchError(
            f"Methods must be some of {', '.join(_METHODS)}. Received: methods={arguments.methods!r}"
        )
    return methods


def _microbatches(arguments: argparse.Namespace) -> int | None:
    """Return how many micro-batches, or None if the planner chooses."""
    return None if arguments.microbatches == "auto" else int(arguments.microbatches)


def _measure(arguments: argparse.Namespace) -> PipelineReport:
    from bench.pipeline.worker import WorkerOptions, measure

    options = WorkerOptions(
        methods=_methods(arguments),
        seeds=arguments.seeds,
        microbatches=_microbatches(arguments),
        rounds=arguments.rounds,
        steps=arguments.steps,
    )
    return measure(_task(arguments), options, arguments.where, rank_benchmark.say)


def _drive(arguments: argparse.Namespace, words: list[str]) -> PipelineReport:
    if rank_benchmark.on_this_host(arguments):
        return rank_benchmark.run_ranks(_NAME, arguments, words)
    with VirtualCluster(spec_from_arguments(arguments)) as cluster:
        return rank_benchmark.run_ranks(_NAME, arguments, words, cluster)


if __name__ == "__main__":
    sys.exit(main())
