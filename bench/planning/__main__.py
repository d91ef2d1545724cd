"""How good greedy plans are, against the optimum and random placements.

``python -m bench.planning --json FILE --png FILE``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

from bench.planning.report import PlanningCase, PlanningReport, Result
from hvpipe.errors import PlanError
from hvpipe.forecast.pipeline import forecast
from hvpipe.plan.baselines import baseline
from hvpipe.plan.exact import exact
from hvpipe.plan.greedy import partition
from hvpipe.plan.memory_shortage import least_memory_bytes
from hvpipe.plan.pipelining import Pipelining
from hvpipe.specs.cluster import Cluster, Link, equal_cluster
from hvpipe.specs.profile import Profile

_PROFILES = Path(__file__).parents[2] / "tests" / "data" / "profiles"
_MODELS = ("alexnet", "gnmt", "inception_v3", "resnet50", "vgg16")
_MICROBATCHES = 8
_DRAWS = 100
_LATENCY_S = 1e-4
_UNEQUAL = (1.0, 0.5, 0.25)
_LIMITS = {
    "equal": ((1.0,), False),
    "unequal": (_UNEQUAL, False),
    "equal, short of memory": ((1.0,), True),
    "unequal, short of memory": (_UNEQUAL, True),
}
"""Kinds of clusters: speeds, and whether every device has only the least memory that allows a plan."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.planning",
        description="Measure how good plans are.",
    )
    parser.add_argument("--json", type=Path, help="write every case there")
    parser.add_argument("--png", type=Path, help="write a plot there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    cases = list(all_cases(_MODELS, (4, 8)))
    results = []
    for number, case in enumerate(cases, start=1):
        print(
            f"{number} of {len(cases)}: {case.model}, {case.devices} devices, {case.limits}", file=sys.stderr
        )
        results.append(measure(case))
    report = PlanningReport(_MICROBATCHES, _DRAWS, tuple(results))
    print(report.to_text())
    if options.json:
        options.json.write_text(report.to_json() + "\n")
    if options.png:
        report.plot(options.png)
    return 0


def all_cases(models: Sequence[str], devices: Sequence[int]) -> Iterator[PlanningCase]:
    """Yield every model on every kind of cluster, at 1 and 10 Gb/s."""
    for model, count, limits, rate in product(models, devices, _LIMITS, (1e9, 10e9)):
        yield PlanningCase(model, count, limits, rate)


def measure(case: PlanningCase, draws: int = _DRAWS) -> Result:
    """Plan the case by each method, with a stage on every device; random has `draws` placements."""
    how = Pipelining("1f1b", _MICROBATCHES)
    profile = Profile.read(_PROFILES / f"{case.model}.txt")
    cluster = _cluster(case, profile, how)
    greedy = partition(profile, cluster, case.devices, how)
    return Result(
        case=case,
        greedy_bottleneck_s=greedy.bottleneck_s,
        exact_bottleneck_s=exact(profile, cluster, case.devices, how).bottleneck_s,
        greedy_step_s=forecast(greedy, profile, cluster).step_s,
        random_step_s=_random_step_s(profile, cluster, how, draws),
    )


def _cluster(case: PlanningCase, profile: Profile, how: Pipelining) -> Cluster:
    speeds, short = _LIMITS[case.limits]
    cluster = equal_cluster(case.devices, Link(_LATENCY_S, case.bits_per_s / 8), speeds=speeds)
    if not short:
        return cluster
    memory_bytes = least_memory_bytes(profile, cluster, case.devices, how)
    hosts = (
        replace(host, devices=tuple(replace(device, memory_bytes=memory_bytes) for device in host.devices))
        for host in cluster.hosts
    )
    return Cluster(tuple(hosts))


def _random_step_s(profile: Profile, cluster: Cluster, how: Pipelining, draws: int) -> float | None:
    steps = []
    for seed in range(draws):
        try:
            plan = baseline("random", profile, cluster, len(cluster.devices), how, seed=seed)
        except PlanError:  # none of a thousand draws fits
            return None
        steps.append(forecast(plan, profile, cluster).step_s)
    return median(steps)


if __name__ == "__main__":
    sys.exit(main())
