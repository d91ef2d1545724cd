"""Rough durations of rounds, so that a suite can be planned before anything has been measured."""

from __future__ import annotations

import os
from dataclasses import dataclass

from bench.cluster.named_clusters import cluster_spec
from bench.errors import ClusterError
from bench.evaluation.suite import Group, Suite
from bench.metrics import communication_bound_s
from bench.training.workloads import trained_examples

GROUP_S = 15.0  # to build a cluster, measure its links and take it down
_PROCESS_S = 9.0  # of each process, to import TensorFlow


@dataclass(frozen=True)
class _Cost:
    """Seconds of one core to build and trace, and for a sample at `pixels`; bytes of one all-reduce."""

    trace_s: float
    sample_s: float
    gradient_bytes: float
    pixels: int = 64
    power: int = 2  # the time of a sample grows with this power of pixels or tokens


_COSTS = {
    "resnet50": _Cost(20, 0.05, 95e6),
    "vgg16": _Cost(10, 0.1, 160e6),
    "inceptionv3": _Cost(20, 0.05, 88e6, 96),
    "mobilenetv2": _Cost(15, 0.01, 9.5e6),
    "lstm": _Cost(8, 0.02, 10e6, 32, 1),
    "transformer": _Cost(12, 0.03, 20e6, 64, 1),
    "text": _Cost(6, 0.008, 12e6, 64, 1),
    "digits": _Cost(6, 0.001, 0.5e6, 8),
    "prose": _Cost(10, 0.003, 1.7e6, 64, 1),
    "table": _Cost(4, 0.0002, 0.4e6, 8, 0),
}
_UNKNOWN = _Cost(25, 0.2, 100e6)


def round_s(group: Group) -> float:
    """Return the seconds of a round of one system: start, trace, warm up, steps without any overlap."""
    task, cost = group.task, _COSTS.get(group.task.workload, _UNKNOWN)
    hosts, rate, slowest = _cluster_facts(group)
    # Ranks share the cores of this machine; a host with half a core takes twice as long.
    crowd = max(group.ranks / (os.cpu_count() or 1), 1 / slowest, 1.0)
    batch = max(task.shares, default=task.batch)
    computing_s = cost.sample_s * batch * (task.pixels / cost.pixels) ** cost.power * crowd
    step_s = computing_s + communication_bound_s(round(cost.gradient_bytes), hosts, rate)
    steps = task.warm_up + task.steps
    if task.epochs:
        steps = task.epochs * (trained_examples(task.workload) // (task.batch * group.ranks) + 1)
    return (_PROCESS_S + cost.trace_s) * crowd + steps * step_s


def suite_s(suite: Suite) -> float:
    """Return the seconds of the whole suite."""
    return sum(GROUP_S + len(group.turns()) * round_s(group) for group in suite.groups)


def _cluster_facts(group: Group) -> tuple[int, float | None, float]:
    """Return the hosts, the slowest link's bits per second and the slowest host's cores (at most 1)."""
    try:
        spec = cluster_spec(group.cluster) if group.spec is None else group.spec
    except ClusterError:
        return group.ranks, None, 1.0
    cpus = [host.cpus for host in spec.hosts if host.cpus is not None]
    return len(spec.hosts), spec.slowest_rate_bits_per_s, min([1.0, *cpus])
