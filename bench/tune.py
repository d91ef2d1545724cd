"""`hvpipe bench tune`: which settings of a tunable system it tries, and where it keeps the fastest."""

from __future__ import annotations

import itertools

from bench.report.figures import CaseFigures
from bench.systems import SYSTEMS, System
from bench.systems.system import keep_tuned

# Values around the defaults (1 ms and 128 MiB; one pack) and the examples of the documentation (3.5 ms and
# 32 MiB; 50 MiB).
VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    "horovod-tuned": {
        "HOROVOD_CYCLE_TIME": ("1", "3.5", "10", "30"),
        "HOROVOD_FUSION_THRESHOLD": tuple(str(mib << 20) for mib in (8, 32, 128)),
    },
    "tf-mwms-tuned": {"bytes_per_pack": tuple(str(kib << 10) for kib in (256, 1024, 4096, 16384, 51200))},
}


def combinations(system: str) -> dict[str, dict[str, str]]:
    """Return all combinations of a system's values, by a name that tells them."""
    values = VALUES[system]
    every = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    return {" ".join(f"{name}={value}" for name, value in each.items()): each for each in every}


def variants(system: str) -> dict[str, System]:
    """Return the system with each combination, by the same names."""
    return {name: SYSTEMS[system].tuned(values) for name, values in combinations(system).items()}


def keep(system: str, fastest: CaseFigures, place: str, rounds: int) -> None:
    """Store the values of the fastest variant, and in words for a report where they come from."""
    every = combinations(system)
    task = fastest.case.task
    source = f"the fastest of {len(every)} by `hvpipe bench tune`: {task.workload}, {place}, "
    keep_tuned(system, every[fastest.case.system], source + task.describe([rounds]))
