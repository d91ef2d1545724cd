"""How good plans are: ``python -m bench.planning greedy|pipedream|scale``.

`greedy` compares greedy plans with the optimum and random placements, `pipedream` searched plans with
PipeDream's rule, on real models. `scale` measures the time and memory of searching large plans.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean, median

from bench.launch.termination import ended_by_exception
from bench.planning.searched import (
    LATENCY_S,
    MICROBATCHES,
    MODELS,
    PROFILES,
    SCALES,
    against_pipedream,
    planning_cost,
)
from hvpipe.errors import PlanError
from hvpipe.forecast.pipeline import forecast
from hvpipe.plan.baselines import baseline
from hvpipe.plan.exact import exact
from hvpipe.plan.greedy import partition
from hvpipe.plan.memory_shortage import least_memory_bytes
from hvpipe.plan.pipelining import Pipelining
from hvpipe.specs.cluster import Cluster, Link, equal_cluster
from hvpipe.specs.profile import Profile

_DRAWS = 100
_UNEQUAL = (1.0, 0.5, 0.25)
_LIMITS = {
    "equal": ((1.0,), False),
    "unequal": (_UNEQUAL, False),
    "equal, short of memory": ((1.0,), True),
    "unequal, short of memory": (_UNEQUAL, True),
}
"""Kinds of clusters: speeds, and whether every device has only the least memory that allows a plan."""


@dataclass(frozen=True)
class Case:
    """A model on a cluster. `limits` says whether devices are unequal and whether memory is scarce."""

    model: str
    devices: int
    limits: str
    bits_per_s: float


@dataclass(frozen=True)
class Result:
    """The bottlenecks of greedy and exact, and the steps of greedy and of the median random placement.

    `random_step_s` is None if no random placement fits the memory of the devices.
    """

    case: Case
    greedy_bottleneck_s: float
    exact_bottleneck_s: float
    greedy_step_s: float
    random_step_s: float | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; 1 if PipeDream's rule is faster than the search anywhere."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.planning", description="Measure how good plans are."
    )
    parser.add_argument("which", nargs="?", choices=("greedy", "pipedream", "scale"), default="greedy")
    parser.add_argument("--json", type=Path, help="write every case of `greedy` there")
    options = parser.parse_args(argv)
    if options.json and options.which != "greedy":
        parser.error(f"--json is for `greedy`. Received: --json with `{options.which}`")
    if options.which == "pipedream":
        return _against_pipedream()
    if options.which == "scale":
        for what in SCALES:
            # One process each, for its memory.
            with ended_by_exception(), ProcessPoolExecutor(1, get_context("spawn")) as process:
                seconds, megabytes = process.submit(planning_cost, what).result()
            print(f"{what:30} {seconds:6.1f} s of CPU time {megabytes:6.0f} MB", flush=True)
        return 0
    cases = list(all_cases(MODELS, (4, 8)))
    results = []
    for number, case in enumerate(cases, start=1):
        what = f"{case.model}, {case.devices} devices, {case.limits}"
        print(f"{number} of {len(cases)}: {what}", file=sys.stderr)
        results.append(measure(case))
    figures = summary(results)
    print(f"1f1b, {MICROBATCHES} micro-batches; random is the median of {_DRAWS} that fit")
    print("\n".join(f"{name} = {value:.4g}" for name, value in figures.items()))
    if options.json:
        lines = [{"microbatches": MICROBATCHES, "draws": _DRAWS, **figures}, *map(asdict, results)]
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


def _against_pipedream() -> int:
    ratios = []
    for what, rule_s, found_s in against_pipedream():
        ratios.append(found_s / rule_s)
        print(f"{what:40} {rule_s:9.4f} s {found_s:9.4f} s {ratios[-1]:6.3f}x", flush=True)
    mean = geometric_mean(ratios)
    print(f"{len(ratios)} cases: worst {max(ratios):.3f}x, geometric mean {mean:.3f}x of PipeDream's step")
    return int(any(ratio > 1 + 1e-9 for ratio in ratios))


def summary(results: Sequence[Result]) -> dict[str, float]:
    """Return greedy's bottleneck over the optimum's (1 is as good), and random's step over greedy's."""
    of_exact = [one.greedy_bottleneck_s / one.exact_bottleneck_s for one in results]
    speedups = [one.random_step_s / one.greedy_step_s for one in results if one.random_step_s is not None]
    return {
        "cases": len(results),
        "greedy_of_exact_worst": max(of_exact),
        "greedy_of_exact_geometric_mean": geometric_mean(of_exact),
        "cases_with_a_random_placement_that_fits": len(speedups),
        "greedy_over_random_least": min(speedups, default=math.nan),
        "greedy_over_random_geometric_mean": geometric_mean(speedups) if speedups else math.nan,
    }


def all_cases(models: Sequence[str], devices: Sequence[int]) -> Iterator[Case]:
    """Yield every model on every kind of cluster, at 1 and 10 Gb/s."""
    for model, count, limits, rate in product(models, devices, _LIMITS, (1e9, 10e9)):
        yield Case(model, count, limits, rate)


def measure(case: Case, draws: int = _DRAWS) -> Result:
    """Plan the case by each method, with a stage on every device; random has `draws` placements."""
    how = Pipelining("1f1b", MICROBATCHES)
    profile = Profile.read(PROFILES / f"{case.model}.txt")
    cluster = _cluster(case, profile, how)
    greedy = partition(profile, cluster, case.devices, how)
    return Result(
        case=case,
        greedy_bottleneck_s=greedy.bottleneck_s,
        exact_bottleneck_s=exact(profile, cluster, case.devices, how).bottleneck_s,
        greedy_step_s=forecast(greedy, profile, cluster).step_s,
        random_step_s=_random_step_s(profile, cluster, how, draws),
    )


def _cluster(case: Case, profile: Profile, how: Pipelining) -> Cluster:
    speeds, short = _LIMITS[case.limits]
    cluster = equal_cluster(case.devices, Link(LATENCY_S, case.bits_per_s / 8), speeds=speeds)
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
