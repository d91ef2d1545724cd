"""The searched plans: against PipeDream's rule on real models, and the time and memory of large plans.

``python -m bench.planning.searched --only pipedream|scale``.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import geometric_mean

from hvpipe.forecast.pipeline import forecast
from hvpipe.plan.baselines import baseline
from hvpipe.search.choice import choose
from hvpipe.search.options import PipeliningChoice
from hvpipe.search.search import search
from hvpipe.specs.cluster import Cluster, Device, Host, Link, equal_cluster
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile

_PROFILES = Path(__file__).parents[2] / "tests" / "data" / "profiles"
_MODELS = ("alexnet", "gnmt", "inception_v3", "resnet50", "vgg16")
_LATENCY_S = 1e-4
_MICROBATCHES = 8  # of the real models


@dataclass(frozen=True)
class _Scale:
    """A large case. Weights are those of a layer, on the mean; memory is a device's."""

    layers: int
    hosts: int
    each: int  # devices of a host
    microbatches: int
    stages: int | None = None
    weight_bytes: int = 2 * 10**6
    memory_bytes: int = 16 * 10**9
    bandwidth_bytes_per_s: float = 1.25e9  # of a host


_SCALES = {
    "1,000 layers, 128 devices": _Scale(1000, 16, 8, 128),
    "1,000 layers, 1,024 devices": _Scale(1000, 128, 8, 64),
    "the same, links of 1 Gb/s": _Scale(1000, 128, 8, 64, bandwidth_bytes_per_s=1.25e8),
    "the same, little memory": _Scale(1000, 128, 8, 64, weight_bytes=400 * 10**6),
    "10,000 layers, 512 stages": _Scale(10_000, 512, 1, 512, 512),
}


def linked(kind: str, devices: int) -> Cluster:
    """Return devices on equal links of 1 or 10 Gb/s, or on hosts of two with fast inner links."""
    if kind != "hosts of 2":
        return equal_cluster(devices, Link(_LATENCY_S, float(kind.split()[0]) * 1e9 / 8))
    return Cluster(
        tuple(
            Host(
                f"h{host}",
                tuple(Device(f"h{host}:{i}") for i in range(2)),
                Link(_LATENCY_S, 1.25e9),
                Link(1e-5, 12e9),
            )
            for host in range(devices // 2)
        )
    )


def against_pipedream() -> Iterator[tuple[str, float, float]]:
    """Yield each case with the steps of PipeDream's rule (1F1B, best number of stages) and of the search."""
    kinds = ("1 Gb/s", "10 Gb/s", "hosts of 2")
    for model, count, kind in product(_MODELS, (2, 4, 8, 16), kinds):
        profile, cluster = Profile.read(_PROFILES / f"{model}.txt"), linked(kind, count)
        how = PipeliningChoice("1f1b", _MICROBATCHES).usual
        most = min(count, _MICROBATCHES, len(profile.layers))
        plans = (baseline("pipedream", profile, cluster, stages, how) for stages in range(1, most + 1))
        rule_s = min(forecast(plan, profile, cluster).step_s for plan in plans)
        found_s = choose(profile, cluster, PipeliningChoice(microbatches=_MICROBATCHES)).step_s
        yield f"{model}, {count} devices, {kind}", rule_s, found_s


def planning_cost(what: str) -> tuple[float, float]:
    """Return the CPU seconds and peak megabytes of planning a large case in this process."""
    case = _SCALES[what]
    costs = (
        LayerCost(
            f"l{i}",
            (1 + i % 7) / 1e3,
            (2 + i % 5) / 1e3,
            (i % 11) * 10**5,
            0,
            (1 + i % 3) * case.weight_bytes // 2,
            10**6,
        )
        for i in range(case.layers)
    )
    profile = Profile(tuple(costs), tuple((i, i + 1) for i in range(case.layers - 1)))
    cluster = Cluster(
        tuple(
            Host(
                f"h{host}",
                tuple(Device(f"h{host}:{i}", 1.0, case.memory_bytes) for i in range(case.each)),
                Link(_LATENCY_S, case.bandwidth_bytes_per_s),
                Link(1e-5, 5e10),
            )
            for host in range(case.hosts)
        )
    )
    start_s = time.process_time()
    modes = ("pipeline",) if case.stages else ("pipeline", "hybrid")
    assert search(profile, cluster, PipeliningChoice(microbatches=case.microbatches), case.stages, modes)
    return time.process_time() - start_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if PipeDream's rule is faster anywhere."""
    parser = argparse.ArgumentParser(prog="python -m bench.planning.searched", description=__doc__)
    parser.add_argument("--only", choices=("pipedream", "scale"), help="one half (default: both)")
    parser.add_argument("--case", choices=tuple(_SCALES), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.case:
        print(*planning_cost(options.case))
        return 0
    ratios = []
    if options.only != "scale":
        for what, rule_s, found_s in against_pipedream():
            ratios.append(found_s / rule_s)
            print(f"{what:40} {rule_s:9.4f} s {found_s:9.4f} s {ratios[-1]:6.3f}x", flush=True)
        mean = geometric_mean(ratios)
        print(
            f"{len(ratios)} cases: worst {max(ratios):.3f}x, geometric mean {mean:.3f}x of PipeDream's step"
        )
    if options.only != "pipedream":
        for what in _SCALES:  # a process each, for its memory
            command = [sys.executable, "-m", "bench.planning.searched", "--case", what]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seconds, megabytes = map(float, printed.split())
            print(f"{what:30} {seconds:6.1f} s of CPU time {megabytes:6.0f} MB", flush=True)
    return int(any(ratio > 1 + 1e-9 for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
