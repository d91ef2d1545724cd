"""Measured rounds with known figures, as systems return them, for tests of what reads them later."""

from __future__ import annotations

from collections.abc import Sequence

from bench.evaluation.outcome import ClusterFacts, EvaluationOutcome, Setting
from bench.hosts.hardware import HostHardware
from bench.rounds.record import Case, RankRound, Round, Task

MACHINE = HostHardware("A CPU", 2, 4 << 30, "Linux 6.1", "3.11.2", "0.1.0")
TASK = Task("resnet50", 8)
CLUSTER = ClusterFacts("2x1gbit", "2 hosts: h0 1gbit, h1 1gbit", 2, 1e9)


def case(system: str, cluster: str = "2x1gbit", ranks: int = 2, task: Task = TASK) -> Case:
    return Case(system, cluster, ranks, task)


def rank(step_s: Sequence[float], **more: object) -> RankRound:
    values: dict[str, object] = {"cpu_share": 0.9, "peak_bytes": 600 << 20, "gradient_bytes": 95_200_000}
    return RankRound(list(step_s), wall_s=sum(step_s) / len(step_s), **{**values, **more})  # type: ignore[arg-type]


def finished(of: Case, *step_s: float, number: int = 0, **more: object) -> Round:
    """Return a round in which every rank took these steps."""
    ranks = tuple(rank(step_s, **more) for _ in range(of.ranks))
    return Round(of, number, ranks, taken_s=30.0, versions="TensorFlow 2.18.1")


def outcome(
    *rounds: Round, clusters: tuple[ClusterFacts, ...] = (CLUSTER,), **more: object
) -> EvaluationOutcome:
    setting = Setting("quick", "Quick", "2026-11-21T22:00:00+00:00", MACHINE, clusters, {})
    return EvaluationOutcome(setting, rounds, **more)  # type: ignore[arg-type]
