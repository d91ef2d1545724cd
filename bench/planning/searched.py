"""What the search for plans finds beside PipeDream's rule, and what it costs on large models."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from bench import ROOT
from hvpipe.forecast.pipeline import forecast
from hvpipe.plan.baselines import baseline
from hvpipe.search.choice import choose
from hvpipe.search.options import PipeliningChoice
from hvpipe.search.search import search
from hvpipe.specs.cluster import Cluster, Device, Host, Link, equal_cluster
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile

PROFILES = ROOT / "tests" / "data" / "profiles"
MODELS = ("alexnet", "gnmt", "inception_v3", "resnet50", "vgg16")
LATENCY_S = 1e-4
MICROBATCHES = 8  # of the real models


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


SCALES = {
    "1,000 layers, 128 devices": _Scale(1000, 16, 8, 128),
    "1,000 layers, 1,024 devices": _Scale(1000, 128, 8, 64),
    "the same, links of 1 Gb/s": _Scale(1000, 128, 8, 64, bandwidth_bytes_per_s=1.25e8),
    "the same, little memory": _Scale(1000, 128, 8, 64, weight_bytes=400 * 10**6),
    "10,000 layers, 512 stages": _Scale(10_000, 512, 1, 512, 512),
}


def hosts_with_devices(
    hosts: int, each: int, outer: Link, inner: Link, memory_bytes: int | None = None
) -> Cluster:
    devices = [tuple(Device(f"h{h}:{i}", 1.0, memory_bytes) for i in range(each)) for h in range(hosts)]
    return Cluster(tuple(Host(f"h{h}", of_host, outer, inner) for h, of_host in enumerate(devices)))


def linked(kind: str, devices: int) -> Cluster:
    """Return devices on equal links of 1 or 10 Gb/s, or on hosts of two with fast inner links."""
    if kind != "hosts of 2":
        return equal_cluster(devices, Link(LATENCY_S, float(kind.split()[0]) * 1e9 / 8))
    return hosts_with_devices(devices // 2, 2, Link(LATENCY_S, 1.25e9), Link(1e-5, 12e9))


def against_pipedream() -> Iterator[tuple[str, float, float]]:
    """Yield each case with the steps of PipeDream's rule (1F1B, best number of stages) and of the search."""
    kinds = ("1 Gb/s", "10 Gb/s", "hosts of 2")
    for model, count, kind in product(MODELS, (2, 4, 8, 16), kinds):
        profile, cluster = Profile.read(PROFILES / f"{model}.txt"), linked(kind, count)
        how = PipeliningChoice("1f1b", MICROBATCHES).usual
        most = min(count, MICROBATCHES, len(profile.layers))
        plans = (baseline("pipedream", profile, cluster, stages, how) for stages in range(1, most + 1))
        rule_s = min(forecast(plan, profile, cluster).step_s for plan in plans)
        found_s = choose(profile, cluster, PipeliningChoice(microbatches=MICROBATCHES)).step_s
        yield f"{model}, {count} devices, {kind}", rule_s, found_s


def planning_cost(what: str) -> tuple[float, float]:
    """Return the CPU seconds and peak megabytes of planning a large case in this process."""
    case = SCALES[what]
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
    outer = Link(LATENCY_S, case.bandwidth_bytes_per_s)
    cluster = hosts_with_devices(case.hosts, case.each, outer, Link(1e-5, 5e10), case.memory_bytes)
    start_s = time.process_time()
    modes = ("pipeline",) if case.stages else ("pipeline", "hybrid")
    assert search(profile, cluster, PipeliningChoice(microbatches=case.microbatches), case.stages, modes)
    return time.process_time() - start_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
