"""mpirun: where it is, and its command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvpipe.commands.hosts import HostSlots
from hvpipe.commands.launch import LaunchSpec, mpirun_command
from hvpipe.commands.mpirun import Mpirun, find_mpirun


def mpirun_of(program: str) -> Mpirun:
    """Return the mpirun beside a program, else the one beside this Python, else the one on PATH."""
    folders = [Path(python).parent for python in (program, sys.executable) if "/" in python]
    return find_mpirun(folders, os.environ.get("PATH"))


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
    mpirun = mpirun_of(next(word for word in command if word != "env" and "=" not in word))
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
