"""`hvpipe join`: let a running job go on with more ranks, or with hosts that have been repaired.

hvpipe run ...        says in its job folder which ranks it has started
hvpipe join b:2       leaves the new hosts there, and asks the ranks to stop
the ranks             finish the step, write a checkpoint and exit with 75, as after SIGTERM
hvpipe run ...        starts the ranks again, on the new hosts; they resume from the checkpoint
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvpipe.atomic_file import atomic_file
from hvpipe.commands import lost_hosts, stop
from hvpipe.commands.hosts import HostSlots, parse_hosts
from hvpipe.commands.launch import LaunchSpec
from hvpipe.environment.job_folder import PREFIX, any_listens, ask_to_stop, is_running
from hvpipe.errors import HvpipeError
from hvpipe.own_folder import is_own

_RUNNING, _WANTED = "running.json", "wanted.json"


@dataclass(frozen=True)
class Places:
    """The ranks of a job, and the hosts that they run on; no hosts: all on this one."""

    ranks: int
    hosts: tuple[HostSlots, ...] = ()

    def with_more(self, hosts: Sequence[HostSlots], ranks: int | None) -> Places:
        """Return the places after some hosts were added, or given other slots.

        Raises:
            HvpipeError: For hosts where the job has none, or a number of ranks that the slots do not allow.
        """
        if hosts and not self.hosts:
            raise HvpipeError(
                "The job runs on one host, or on those of a batch system: use -np, or start it with --hosts. "
                f"Received: {_listed(hosts)}"
            )
        merged = {host.name: host for host in (*self.hosts, *hosts)}
        slots = sum(host.slots for host in merged.values())
        if ranks is None:
            ranks = slots
        if ranks < 1 or (merged and ranks > slots):
            most = f"1 to {slots}, the number of slots" if merged else "at least 1"
            raise HvpipeError(f"-np should be {most}. Received: -np {ranks}")
        return Places(ranks, tuple(merged.values()))

    def without(self, lost: Sequence[int]) -> Places:
        """Return the places after these ranks were lost. Ranks fill the slots of one host after the other."""
        hosts, first = [], 0
        for host in self.hosts:
            mine = range(first, min(first + host.slots, self.ranks))
            gone = sum(rank in mine for rank in lost)
            if gone < max(1, len(mine)):
                hosts.append(HostSlots(host.name, host.slots - gone))
            first += host.slots
        return Places(self.ranks - len(lost), tuple(hosts))

    def without_hosts(self, names: Sequence[str]) -> Places:
        """Return the places after these hosts were lost."""
        hosts = tuple(host for host in self.hosts if host.name not in names)
        return Places(min(self.ranks, sum(host.slots for host in hosts)), hosts)

    def of(self, spec: LaunchSpec) -> LaunchSpec:
        """Return the launch with these ranks and hosts."""
        return replace(spec, ranks=self.ranks, hosts=self.hosts)

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}" + (
            f" on {_listed(self.hosts)}" if self.hosts else ""
        )


def _listed(hosts: Sequence[HostSlots]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe join`."""
    parser.add_argument(
        "hosts", nargs="?", metavar="HOSTS", help="hosts that join, or have other slots now, as in b:2,c:2"
    )
    parser.add_argument(
        "-np",
        dest="ranks",
        type=int,
        metavar="N",
        help="the number of ranks from now on (default: all slots)",
    )
    parser.add_argument(
        "--job", type=int, metavar="PID", help="of the `hvpipe run` (default: the only one on this host)"
    )


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Ask a job to go on with other ranks. Returns 0 before it does; raises HvpipeError if it cannot."""
    if options.hosts is None and options.ranks is None:
        raise HvpipeError("Give the hosts that join, or -np for more ranks on the same hosts")
    folder, places = _choose(dict(_jobs()), options.job)
    hosts = parse_hosts(options.hosts) if options.hosts is not None else ()
    wanted = places.with_more(hosts, options.ranks)
    if wanted == places:
        raise HvpipeError(f"The job should get other ranks or hosts. Received: {places}, as it has")
    told = json.loads((folder / _RUNNING).read_text())
    if wanted.ranks < told["least"]:
        raise HvpipeError(
            f"The job should have at least {told['least']} ranks (--min-np). Received: {wanted.ranks}"
        )
    if not places.hosts and wanted.ranks > (told.get("most") or wanted.ranks):
        raise HvpipeError(
            f"-np should be at most {told['most']}, the number of tasks of the Slurm allocation. "
            f"Received: -np {wanted.ranks}; the job goes on as it is"
        )
    if gone := lost_hosts.unreachable(hosts, told["agent"]):
        raise HvpipeError(
            "Hosts that join should run commands without asking for a password, as in `ssh HOST true`. "
            f"Received: {', '.join(gone)}, which cannot be reached; the job goes on as it is"
        )
    _write(folder / _WANTED, wanted)
    try:
        if any_listens(folder):
            ask_to_stop(folder)
        elif (
            elsewhere := stop.of_hosts(places.hosts, told["agent"], folder, environ)
        ) is None or not elsewhere():
            raise HvpipeError(
                "No rank of the job is in `fit` with hk.Checkpoint, from which the job would go on. "
                "If the job has just started, try again later"
            )
    except BaseException:
        (folder / _WANTED).unlink(missing_ok=True)
        raise
    print(f"hvpipe join: the job writes a checkpoint, and goes on from it with {wanted} (it had {places})")
    return 0


def register(folder: Path, places: Places, agent: str | None, least: int, most: int | None = None) -> None:
    """Say in the job folder what is running.

    Args:
        folder: The job folder.
        places: The ranks and hosts.
        agent: The program that reaches other hosts; None: ssh.
        least: The least number of ranks.
        most: The largest number of ranks that Slurm lets run; None if it does not say.
    """
    _write(folder / _RUNNING, places, agent=agent, least=least, most=most)


def wanted(folder: Path) -> Places | None:
    """Return the places that `hvpipe join` has asked for in this job folder; None if it has not."""
    path = folder / _WANTED
    return _read(path)[1] if is_own(folder) and path.exists() else None


def _jobs() -> Iterator[tuple[int, tuple[Path, Places]]]:
    """Yield this user's jobs on this host, by the PID of `hvpipe run`."""
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        # Another user's could name any command.
        if is_own(folder) and (folder / _RUNNING).exists() and is_running(folder):
            with contextlib.suppress(OSError, ValueError):
                pid, places = _read(folder / _RUNNING)
                yield pid, (folder, places)


def _choose(jobs: Mapping[int, tuple[Path, Places]], pid: int | None) -> tuple[Path, Places]:
    running = ", ".join(f"{each} ({places})" for each, (_, places) in jobs.items()) or "none"
    if pid is not None and pid not in jobs:
        raise HvpipeError(
            f"--job should be the PID of an `hvpipe run` on this host. Received: {pid}; running: {running}"
        )
    if pid is None and len(jobs) != 1:
        raise HvpipeError(
            f"One `hvpipe run` should run on this host; with several, --job chooses one. Running: {running}"
        )
    return jobs[pid] if pid is not None else next(iter(jobs.values()))


def _write(path: Path, places: Places, **more: str | int | None) -> None:
    hosts = [[host.name, host.slots] for host in places.hosts]
    told = {"pid": os.getpid(), "ranks": places.ranks, "hosts": hosts, **more}
    with atomic_file(path) as file:
        file.write(json.dumps(told).encode())


def _read(path: Path) -> tuple[int, Places]:
    found = json.loads(path.read_text())
    return found["pid"], Places(found["ranks"], tuple(HostSlots(*host) for host in found["hosts"]))
