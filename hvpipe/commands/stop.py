"""`hvpipe stop`: let the ranks on this host write a checkpoint and end, as SIGTERM to `hvpipe run` does.

It is for hosts that are about to go, such as an evicted pod of Kubernetes, and for a launcher without ranks:
that runs it by ssh where the ranks are.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from hvpipe.commands import lost_hosts
from hvpipe.commands.hosts import HostSlots
from hvpipe.environment.job_folder import (
    PREFIX,
    any_joined,
    any_listens,
    ask_to_stop,
    away_folder,
    is_running,
    listeners,
)
from hvpipe.errors import HvpipeError
from hvpipe.own_folder import is_own
from hvpipe.proc import started_s

_LIMIT_S = 20.0  # for ssh, and for the start of a Python there
_POLL_S = 0.1
_NOBODY, _LATE = 1, (124, 137)  # exit codes of `hvpipe stop`, and of `timeout` around it
_FINDING_PACKAGES = ("PYTHONPATH", "LD_LIBRARY_PATH")
# Of Open MPI 5 and 4, and of MPICH and Intel MPI: on other hosts, and on the launcher's.
_DAEMONS = ("prted", "prterun", "orted", "mpirun", "hydra_pmi_proxy", "mpiexec.hydra")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe stop`."""
    parser.add_argument(
        "--job",
        metavar="NAME",
        help="the name or path of one job's folder, as in HVPIPE_JOB_FOLDER (default: all jobs of this user)",
    )
    parser.add_argument(
        "--wait",
        type=float,
        metavar="S",
        help="return when the ranks here, and MPI's daemon, have ended; wait S seconds at most",
    )


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Ask the ranks of this host to stop. Returns 0 if one listens; raises HvpipeError otherwise."""
    if options.wait is not None and not (math.isfinite(options.wait) and options.wait >= 0):
        raise HvpipeError(f"--wait should be a number of seconds. Received: --wait {options.wait}")
    found = [folder for folder in _folders(options.job) if any_listens(folder)]
    if not found:
        raise HvpipeError(
            "No rank of yours on this host is in `fit` with hk.Checkpoint, started by `hvpipe run`"
            + (f". Received: --job {options.job}" if options.job is not None else "")
        )
    ranks = [pid for folder in found for pid in listeners(folder)]
    awaited = {*ranks, *filter(None, map(_daemon, ranks))}
    for folder in found:
        ask_to_stop(folder)
    do = "rank writes a checkpoint and ends" if len(ranks) == 1 else "ranks write a checkpoint and end"
    print(f"hvpipe stop: {len(ranks)} {do}, and with them all ranks of their job")
    if options.wait is not None and (left := _still_there(awaited, options.wait)):
        raise HvpipeError(
            f"After --wait {options.wait:g} seconds, these ranks, or daemons of MPI, are still there: {left}"
        )
    return 0


def of_hosts(
    hosts: Sequence[HostSlots], agent: str | None, folder: Path, environ: Mapping[str, str]
) -> Callable[[], bool] | None:
    """Return the function that asks a job's ranks on other hosts, and tells whether one of them listens.

    It asks nobody if ranks of the job have joined on this host: these know whether they listen. A host that
    does not answer in time may be asked all the same, so it counts as one that listens.

    Args:
        hosts: The hosts of the job; without hosts there is no such function.
        agent: The program that reaches them; None for ssh.
        folder: The job folder, on this host.
        environ: The variables that ranks have from here.
    """
    finds = [f"{name}={environ[name]}" for name in _FINDING_PACKAGES if name in environ]
    command = ["env", *finds, sys.executable, "-m", "hvpipe", "stop", "--job", folder.name]

    def ask() -> bool:
        if any_joined(folder):
            return False
        codes = lost_hosts.on_hosts(hosts, agent, command, _LIMIT_S)
        for name, code in codes.items():
            if code not in (0, _NOBODY):
                print(
                    f"hvpipe: ranks on {name} may not write a checkpoint: `hvpipe stop` there, by "
                    f"{agent or 'ssh'}, ended with exit code {code}{' (no answer)' if code in _LATE else ''}",
                    file=sys.stderr,
                    flush=True,
                )
        return any(code in (0, *_LATE) for code in codes.values())

    return ask if hosts else None


def _folders(job: str | None) -> list[Path]:
    """Return the folders of the jobs that have ranks here."""
    if job is not None:
        place = Path(tempfile.gettempdir()) / Path(job).name
        folders = [place, away_folder(job)]
    else:
        folders = sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    return [folder for folder in folders if is_own(folder) and is_running(folder)]


def _daemon(rank: int) -> int | None:
    """Return the process of MPI that has started a rank; None if another has.

    It ends once the launcher knows how its ranks have ended. If the host goes before that, the job fails.
    """
    with contextlib.suppress(OSError):
        parent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        if Path(f"/proc/{parent}/comm").read_text().strip() in _DAEMONS:
            return parent
    return None


def _still_there(pids: Collection[int], limit_s: float) -> list[int]:
    """Wait for the end of processes; return those that have not ended in time."""
    deadline_s = time.monotonic() + limit_s
    while left := [pid for pid in pids if started_s(pid) is not None]:
        if time.monotonic() >= deadline_s:
            return left
        time.sleep(_POLL_S)
    return []
