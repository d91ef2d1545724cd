"""Pipelines of several models on several virtual clusters, compared with other placements and forecasts.

``python -m bench.pipelines --out runs/pipelines`` runs `bench.pipeline` on each, writes a JSON file
for each, and ends with a table. Cases that have a file do not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from bench.cluster.spec import FOLDER
from bench.metrics import format_time, table
from bench.pipeline import __main__ as pipeline
from bench.pipeline.report import MeasuredPlan, PipelineReport

_MODELS = {"resnet50": 64, "vgg16": 64, "transformer": 128}
"""Pixels or tokens by model."""
_WHERE = ("gigabit-2", "slow-cpu", "slow-link", "gigabit-4", "unequal-4")
_CLOSE = 0.10  # relative to the simulated step
_NEAR = 0.03  # relative to the fastest plan
_INTERRUPTED = 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pipelines",
        description="Measure pipelines of several models on several clusters.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the cases' JSON files")
    parser.add_argument(
        "--clusters", default=",".join(_WHERE), help=f"of bench/clusters (default: {','.join(_WHERE)})"
    )
    parser.add_argument(
        "--models", default=",".join(_MODELS), help=f"some of {','.join(_MODELS)} (default: all)"
    )
    parser.add_argument(
        "--methods", default="greedy,random", help="of bench.pipeline, greedy first (default: greedy,random)"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="of a plan in a round (default: 3)")
    parser.add_argument("--seeds", type=int, default=1, help="how many random placements (default: 1)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for a case (default: 900)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the missing cases. Return 0, 1 if a case failed, 2 on a wrong argument, 130 at Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(argv)
    models, clusters = options.models.split(","), options.clusters.split(",")
    if unknown := sorted({*models} - {*_MODELS}):
        parser.error(f"--models should be some of {', '.join(_MODELS)}. Received: {unknown[0]!r}")
    for cluster in clusters:
        if not (FOLDER / f"{cluster}.toml").exists():
            parser.error(f"--clusters should name files in {FOLDER}. Received: {cluster!r}")
    if options.methods.split(",")[0] != "greedy":
        parser.error(
            "--methods should begin with greedy: the others are compared with it. "
            f"Received: {options.methods!r}"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for number, (cluster, model) in enumerate([(c, m) for c in clusters for m in models], start=1):
        file = options.out / f"{cluster}-{model}.json"
        if file.exists():
            continue
        print(f"==> {number} of {len(clusters) * len(models)}: {model} on {cluster}", flush=True)
        status = _measure(_words(options, cluster, model, file))
        if status == _INTERRUPTED:
            return status
        if status != 0:
            failed.append(f"{model} on {cluster}")
    print(summary(read(options.out)))
    if failed:
        print(f"bench.pipelines: not measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _words(options: argparse.Namespace, cluster: str, model: str, file: Path) -> list[str]:
    """Return the arguments of bench.pipeline for a case."""
    words = ["--spec", str(FOLDER / f"{cluster}.toml"), "--methods", options.methods]
    words += ["--model", model, "--pixels", str(_MODELS[model])]
    words += ["--rounds", str(options.rounds), "--steps", str(options.steps), "--seeds", str(options.seeds)]
    return [*words, "--timeout", str(options.timeout), "--json", str(file)]


def _measure(words: list[str]) -> int:
    """Run bench.pipeline on a case and return its status. An error does not stop the other cases.

    It runs in this process: at Ctrl-C a child would be killed before it took its cluster down.
    """
    try:
        return pipeline.main(words)
    except Exception:
        traceback.print_exc()
        return 1


def read(folder: Path) -> dict[str, PipelineReport]:
    return {
        file.stem: PipelineReport.from_dict(json.loads(file.read_text()))
        for file in sorted(folder.glob("*.json"))
    }


def summary(reports: Mapping[str, PipelineReport]) -> str:
    """Return a table of all cases, and the main figures."""
    every = [case for report in reports.values() for case in report.cases]
    # A draw of random has its number in its name: "random 0".
    others = [m for m in dict.fromkeys(c.method for c in every) if m.split()[0] not in ("greedy", "random")]
    titles = ["case", "micro-batches", "greedy", "over simulated", "over bound"]
    titles += ["random", "over simulated", "saved", *others]
    rows = []
    for name, report in reports.items():
        greedy = report.cases[0]
        bound = "" if greedy.bound_s is None else f"{greedy.seconds() / greedy.bound_s:.2f}"
        row = [name, str(report.microbatches), format_time(greedy.seconds()), f"{_over(greedy):.2f}", bound]
        if middle := _middle(report, "random"):
            saved = 1 - greedy.seconds() / middle.seconds()
            row += [format_time(middle.seconds()), f"{_over(middle):.2f}", f"{100 * saved:.0f} %"]
        else:
            row += [""] * 3
        steps = {case.method: format_time(case.seconds()) for case in report.cases}
        rows.append([*row, *(steps.get(method, "") for method in others)])
    lines = [table(titles, rows)]
    for what, cases in (("greedy plans", [p for p in every if p.method == "greedy"]), ("all plans", every)):
        close = sum(abs(_over(case) - 1) <= _CLOSE for case in cases)
        lines.append(f"{what} within {_CLOSE:.0%} of the simulation: {close} of {len(cases)}")
    for method in ("random", "even"):
        of_method = {name: middle for name in reports if (middle := _middle(reports[name], method))}
        if not of_method:
            continue
        speedups = [m.seconds() / reports[name].cases[0].seconds() for name, m in of_method.items()]
        mean = sum(1 - 1 / speedup for speedup in speedups) / len(speedups)
        lines.append(
            f"greedy against {method}: {mean:.0%} less time (arithmetic mean), "
            f"{geometric_mean(speedups):.2f}x (geometric mean), worst {min(speedups):.2f}x"
        )
    if best := [ratio for report in reports.values() for ratio in _chosen_over_fastest(report)]:
        near = sum(ratio <= 1 + _NEAR for ratio in best)
        lines.append(
            f"the chosen plan within {_NEAR:.0%} of the fastest one measured: {near} of {len(best)}; "
            f"{geometric_mean(best):.3f}x (geometric mean), worst {max(best):.3f}x"
        )
    return "\n".join(lines)


def _middle(report: PipelineReport, method: str) -> MeasuredPlan | None:
    """Return the draw of the method with the median step, the upper of two; None if it was not measured."""
    draws = [case for case in report.cases if case.method.split()[0] == method]
    return sorted(draws, key=MeasuredPlan.seconds)[len(draws) // 2] if draws else None


def _chosen_over_fastest(report: PipelineReport) -> list[float]:
    """Return the step of the chosen plan, if it was measured, over the shortest one."""
    fastest_s = min(case.seconds() for case in report.cases)
    return [case.seconds() / fastest_s for case in report.cases if case.method == "chosen"]


def _over(case: MeasuredPlan) -> float:
    """Return the measured step over the simulated one."""
    return case.seconds() / case.forecast_s


if __name__ == "__main__":
    sys.exit(main())
