"""What Slurm says of the allocation that `hvpipe run` is in."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress

_LIMIT_S = 30.0


@dataclass(frozen=True)
class Smaller:
    """An allocation that has lost hosts, as `sbatch --no-kill` allows.

    Attributes:
        lost: The names of these hosts.
        slots: The number of tasks on the others.
        environ: Variables that describe the allocation to a launcher.
    """

    lost: tuple[str, ...]
    slots: int
    environ: Mapping[str, str]


def slots(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the number of tasks of each host, as in SLURM_TASKS_PER_NODE=2(x3),1; () outside of Slurm."""
    return _each_host(environ.get("SLURM_TASKS_PER_NODE", ""))


def smaller(environ: Mapping[str, str]) -> Smaller | None:
    """Return what is left of this allocation if it has lost hosts; None if it has not, or nobody knows."""
    job, tasks = _number(environ), slots(environ)
    if job is None or not tasks:
        return None
    cpus = _each_host(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    before = _ask("scontrol", "show", "hostnames", environ.get("SLURM_JOB_NODELIST", ""))
    left = _ask("squeue", "--noheader", f"--jobs={job}", "--format=%N")
    now = _ask("scontrol", "show", "hostnames", left[0]) if left else []
    stays = [name in now for name in before]
    if len(before) != len(tasks) or all(stays) or not any(stays):
        return None
    tasks = tuple(compress(tasks, stays))
    names = ",".join(compress(before, stays))
    told = {
        **dict.fromkeys(("SLURM_JOB_NUM_NODES", "SLURM_NNODES"), str(len(tasks))),
        **dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), names),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(sum(tasks))),
        "SLURM_TASKS_PER_NODE": ",".join(map(str, tasks)),
    }
    if len(cpus) == len(before):
        told["SLURM_JOB_CPUS_PER_NODE"] = ",".join(map(str, compress(cpus, stays)))
    return Smaller(tuple(name for name in before if name not in now), sum(tasks), told)


def _number(environ: Mapping[str, str]) -> str | None:
    """Return the number of this job. In an array SLURM_JOB_ID may name the whole array."""
    array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environ.get("SLURM_JOB_ID")


def _each_host(text: str) -> tuple[int, ...]:
    """Read 2(x3),1 as (2, 2, 2, 1)."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return ()
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def _ask(*command: str) -> list[str]:
    """Return the words that a command of Slurm prints; [] if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split()
