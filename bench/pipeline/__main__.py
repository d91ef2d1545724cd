"""The step of pipelines by placement (greedy, random, ...), measured, against what was simulated.

``python -m bench.pipeline --out runs/pipelines`` measures several models on several virtual clusters, or with
``--hosts a,b`` on real hosts. Every rank first profiles the model and the links, as `hvpipe profile` does.
Each case gets a JSON file, and a case that has one does not run again. At the end comes a table of all.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.cluster.spec import named_cluster
from bench.errors import BenchError
from bench.hosts import rank_benchmark
from bench.pipeline.report import PipelineReport, summary
from bench.pipeline.worker import METHODS, WorkerOptions
from bench.rounds.record import Task, from_dict
from bench.training.workloads import check
from hvpipe.atomic_file import atomic_file
from hvpipe.errors import HvpipeError

MODELS = {"resnet50": 64, "vgg16": 64, "transformer": 128}
"""Pixels or tokens by model."""
_CLUSTERS = "gigabit-2,slow-cpu,slow-link,gigabit-4,unequal-4"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pipeline",
        description="Measure pipelines of several models on several clusters.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the cases' JSON files")
    parser.add_argument(
        "--clusters", default=_CLUSTERS, metavar="NAMES", help="as 2x1gbit, or files (default: %(default)s)"
    )
    parser.add_argument("--hosts", metavar="LIST", help="real hosts instead, as in a:2,b:2")
    parser.add_argument("--models", default=",".join(MODELS), help="some of %(default)s (default: all)")
    parser.add_argument(
        "--methods",
        default="greedy,random",
        help=f"greedy first, then some of {','.join(METHODS)} (default: %(default)s)",
    )
    parser.add_argument("--batch", type=int, default=32, help="samples of a step (default: 32)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="of a plan in a round (default: 3)")
    parser.add_argument("--seeds", type=int, default=1, help="how many random placements (default: 1)")
    parser.add_argument("--ranks", type=int, help="ranks (default: every slot)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing cases. Return 0, 1 if a case failed, 2 on a wrong argument, 130 at Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        cases = _cases(options)
    except HvpipeError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for number, (cluster, model) in enumerate(cases, start=1):
        place = re.sub(r"[^\w.-]", "_", Path(cluster).stem if cluster else options.hosts)
        file = options.out / f"{place}-{model}.json"
        if file.exists():
            continue
        print(f"==> {number} of {len(cases)}: {model} on {cluster or options.hosts}", flush=True)
        try:
            report = _measured(options, cluster, model)
            print(report.to_text())
            with atomic_file(file) as written:
                written.write(report.to_json().encode())
        except (HvpipeError, OSError) as error:  # the other cases run
            failed.append(file.stem)
            print(f"bench.pipeline: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            return 130
    print(summary(read(options.out)))
    if failed:
        print(f"bench.pipeline: not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _cases(options: argparse.Namespace) -> list[tuple[str | None, str]]:
    """Return clusters (None: the real hosts) with models. BenchError for options that cannot be followed."""
    models, methods = options.models.split(","), options.methods.split(",")
    if unknown := sorted({*models} - {*MODELS}):
        raise BenchError(f"--models should be some of {', '.join(MODELS)}. Received: {unknown[0]!r}")
    if methods[0] != "greedy" or not {*methods} <= {*METHODS}:
        raise BenchError(
            f"--methods should be greedy, with which others are compared, and some of {', '.join(METHODS)}. "
            f"Received: {options.methods!r}"
        )
    for model in models:
        check(_task(options, model))
    if options.hosts is not None:
        return [(None, model) for model in models]
    clusters = options.clusters.split(",")
    for cluster in clusters:
        named_cluster(cluster, Path())
    return [(cluster, model) for cluster in clusters for model in models]


def _task(options: argparse.Namespace, model: str) -> Task:
    return Task(model, options.batch, MODELS[model])


def _measured(options: argparse.Namespace, cluster: str | None, model: str) -> PipelineReport:
    methods = tuple(options.methods.split(","))
    wanted = WorkerOptions(methods, options.seeds, options.rounds, options.steps)
    with rank_benchmark.hosts_of(cluster, options.hosts) as hosts:
        arguments = {"task": _task(options, model), "options": wanted, "where": hosts.describe()}
        report: PipelineReport = rank_benchmark.run_on_ranks(
            "bench.pipeline.worker", arguments, hosts, options.ranks, timeout_s=900.0
        )
    return report


def read(folder: Path) -> dict[str, PipelineReport]:
    """Return the reports of a folder by case."""
    files = sorted(folder.glob("*.json"))
    return {file.stem: from_dict(PipelineReport, json.loads(file.read_text())) for file in files}


if __name__ == "__main__":
    sys.exit(main())
