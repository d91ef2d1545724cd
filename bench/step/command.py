"""The time of a training step by overlap mode, against computing alone and the bound of computing and links.

``python -m bench.step --hosts 2 --rate 300mbit`` on a virtual cluster, ``--ranks 2`` on this host, or under a
launcher. ``--plain`` compares one rank under hvpipe with plain Keras: step, tracing, memory, import.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace

from bench.cluster.command import spec_from_arguments
from bench.cluster.link_rate import measure_two_way
from bench.cluster.virtual_cluster import VirtualCluster
from bench.hosts import rank_benchmark
from bench.step.report import StepReport
from bench.training.image_model import MODELS, ImageWorkload

_NAME = "bench.step"
_MODES = ("none", "backward", "step", "stale")
_OTHER_MODES = ("local",)


def _parser() -> argparse.ArgumentParser:
    parser = rank_benchmark.make_parser(_NAME, "Measure the time of a training step.")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="compare one rank with plain Keras: step, tracing, memory, import",
    )
    parser.add_argument("--model", default="resnet50", choices=sorted(MODELS))
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="images per rank and step (default: 8)")
    parser.add_argument(
        "--threads", type=int, help="threads of an operation (default: cores / ranks of a host)"
    )
    parser.add_argument(
        "--modes",
        default=",".join(_MODES),
        help=f"also {', '.join(_OTHER_MODES)} (default: {','.join(_MODES)})",
    )
    parser.add_argument("--every", type=int, default=16, help="steps in a round of local (default: 16)")
    parser.add_argument(
        "--beside-tcp",
        action="store_true",
        help="also compute alone while plain TCP moves as many bytes between the hosts as gradients would",
    )
    parser.add_argument("--rounds", type=int, default=3, help="each trains every mode (default: 3)")
    parser.add_argument("--steps", type=int, default=6, help="steps of a mode in a round (default: 6)")
    rank_benchmark.add_output_arguments(parser, "step")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see run_command for the exit codes."""
    return rank_benchmark.run_command(_NAME, _parser(), argv, check=_check, measure=_measure, drive=_drive)


def _check(arguments: argparse.Namespace) -> None:
    _workload(arguments, 1), _modes(arguments)


def _modes(arguments: argparse.Namespace) -> tuple[str, ...]:
    modes = tuple(mode for mode in arguments.modes.split(",") if mode)
    known = (*_MODES, *_OTHER_MODES)
    if not set(modes) <= set(known) or len(set(modes)) < len(modes):
        raise ValueError(f"Modes must be some of {', '.join(known)}. Received: modes={arguments.modes!r}")
    return modes


def _workload(arguments: argparse.Namespace, threads: int) -> ImageWorkload:
    count = threads if arguments.threads is None else arguments.threads
    return ImageWorkload(arguments.model, arguments.pixels, arguments.classes, arguments.batch, count)


def _threads(ranks: int) -> int:
    """Divide the cores among the ranks of this machine, those of virtual hosts included."""
    return max(1, (os.cpu_count() or 1) // ranks)


def _measure(arguments: argparse.Namespace, ranks: int) -> StepReport:
    from bench.step.worker import StepOptions, measure

    options = StepOptions(
        _modes(arguments),
        arguments.rounds,
        arguments.steps,
        beside_tcp=arguments.beside_tcp,
        every=arguments.every,
    )
    return measure(_workload(arguments, _threads(ranks)), options, arguments.where, rank_benchmark.say)


def _drive(arguments: argparse.Namespace, words: list[str]) -> StepReport | None:
    """Start the ranks here or on a virtual cluster, and add the rate of its links."""
    if arguments.plain:
        _compare_with_plain_keras(arguments, words)
        return None
    if rank_benchmark.on_this_host(arguments):
        return StepReport.from_json(rank_benchmark.run_on_this_host(_NAME, arguments, words))
    spec = spec_from_arguments(arguments)
    with VirtualCluster(spec) as cluster:
        measured = None
        if len(spec.hosts) > 1 and spec.slowest_rate_bits_per_s is not None:
            measured = measure_two_way(cluster, spec.hosts[0].name, spec.hosts[-1].name)
        report = StepReport.from_json(rank_benchmark.run_on_cluster(_NAME, arguments, words, cluster))
    limit = spec.slowest_rate_bits_per_s if len(spec.hosts) > 1 else None
    if measured is None:
        return replace(report, link_bits_per_s=limit)
    return replace(
        report, link_bits_per_s=limit, measured_bits_per_s=measured.bits_per_s, link_tool=measured.tool
    )


def _compare_with_plain_keras(arguments: argparse.Namespace, words: list[str]) -> None:
    """Measure one rank with and without hvpipe; then tracing, memory and import in fresh processes."""
    from bench.step.overhead import measure_overhead

    if "--modes" not in " ".join(words):
        words = [*words, "--modes", "step"]
    ranks = 2 if arguments.ranks is None else arguments.ranks
    alone = argparse.Namespace(**{**vars(arguments), "ranks": 1})
    one = StepReport.from_json(rank_benchmark.run_on_this_host(_NAME, alone, words))
    print(one.to_text(), flush=True)
    overhead = measure_overhead(_workload(arguments, _threads(ranks)), ranks, arguments.timeout)
    print(overhead.to_text())
    if arguments.json is not None:
        arguments.json.write_text(f'{{"one_rank": {one.to_json()},\n"overhead": {overhead.to_json()}}}\n')
        print(f"samples: {arguments.json}")
