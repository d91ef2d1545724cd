"""Runs one round of a case in fresh processes, on a cluster or on this machine."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.hosts.hosts import Hosts
from bench.hosts.process_placement import Placement
from bench.hosts.real_hosts import RealHosts
from bench.launch import mpirun
from bench.launch.processes import run_together
from bench.rounds.record import Case, RankRound, Round, from_dict
from bench.systems import SYSTEMS, System
from hvpipe.errors import HvpipeError


def run_round(
    case: Case,
    number: int,
    cluster: Hosts,
    timeout_s: float,
    *,
    python: str = sys.executable,
    systems: Mapping[str, System] = SYSTEMS,
) -> Round:
    """Run one round of a case in fresh processes under `python`, and end everything it started.

    `cluster` is up. Real hosts must share the current folder. The round records failures instead of raising
    them: a system that is not installed (`skipped`), or a crash or a hang (`error`, with the end of the
    output). `systems` has the case's system by name.
    """
    began_s, system = time.monotonic(), systems[case.system]
    round_ = Round(case, number, notes=system.notes)
    if why := _unfit(case, system, cluster) or system.missing(python):
        return replace(round_, skipped=f"{system.title}: {why}")
    python = system.python(python)
    with tempfile.TemporaryDirectory(
        prefix="hvpipe-round-",
        dir=cluster.shared_folder,
        ignore_cleanup_errors=True,  # NFS keeps files that another host has open
    ) as name:
        try:
            round_ = _run(round_, system, cluster, Path(name), timeout_s, python)
        except (HvpipeError, ValueError) as error:
            round_ = replace(round_, error=str(error))
    return replace(round_, taken_s=time.monotonic() - began_s)


def _run(
    round_: Round, system: System, cluster: Hosts, directory: Path, timeout_s: float, python: str
) -> Round:
    case = round_.case
    placement = Placement(cluster, case.ranks)
    # Rounds repeat a time, but of a training by epochs they repeat what is learned with other seeds.
    task = replace(case.task, seed=case.task.seed + (round_.number if case.task.epochs else 0))
    job = {
        "task": asdict(task),
        "size": case.ranks,
        "local_ranks_and_sizes": placement.local_ranks_and_sizes,
        "adapter": system.adapter,
        "options": dict(system.options),
        "environment": {
            "OMP_NUM_THREADS": str(task.threads),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **system.environment,
        },
    }
    (directory / "job.json").write_text(json.dumps(job))
    commands = placement.commands(system, [python, "-m"], directory)
    path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    commands = [
        replace(c, environment={**c.environment, "PYTHONPATH": str(ROOT), "PATH": path}) for c in commands
    ]
    decides = 0 if system.start == "servers" else None
    ended = run_together(commands, directory, timeout_s=timeout_s, decides=decides)
    files = [directory / f"rank-{rank}.json" for rank in range(case.ranks)]
    if ended.why or not all(file.exists() for file in files):
        why = ended.why or "no figures were written"
        return replace(round_, error=f"{system.title}: {why}\n{ended.output}".rstrip())
    found: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    versions = [f"{what} {version}" for what, version in found[0]["versions"].items()]
    if system.start == "mpirun":
        versions.append(mpirun.mpirun_of(python).name)
    ranks = tuple(from_dict(RankRound, each["rank"]) for each in found)
    return replace(round_, ranks=ranks, versions=", ".join(versions))


def _unfit(case: Case, system: System, cluster: Hosts) -> str:
    """Return why a system cannot run a case that others can, or ""."""
    if system.start == "horovodrun" and isinstance(cluster, RealHosts):
        return "runs on virtual hosts, or on this one"
    if system.own_environment and case.task.epochs:
        return "wants steps, not epochs"
    if "beside_tcp" in system.options and (case.task.epochs or len(cluster.spec.hosts) < 2):
        return "wants steps, not epochs, and several hosts"
    return ""
