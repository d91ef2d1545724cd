"""Where the ranks of an evaluation run: a virtual cluster, or hosts that exist; None is this host alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

from bench.cluster.virtual_cluster import VirtualCluster
from bench.errors import ClusterError
from bench.hosts.hardware import same_and_others
from bench.launch import mpirun
from hvpipe.commands.launch import (
    HostSlots,
    LaunchSpec,
    exported_names,
    identify,
    mpirun_command,
    parse_hosts,
)
from hvpipe.errors import LaunchError

_ROOT = Path(__file__).parents[2]
_ANSWER_TIMEOUT_S = 60.0
# With a terminal of its own (-tt), what runs there ends when we do: a server would serve for ever.
_SSH = ("ssh", "-tt", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
_SSH_PLAIN = ("ssh", "-n", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")  # its output and errors apart


@dataclass(frozen=True)
class HostList:
    """Hosts that exist, in the form of a ClusterSpec; nobody limits their links.

    `machines` says by name what they are, where they told.
    """

    hosts: tuple[HostSlots, ...]
    machines: tuple[tuple[str, str], ...] = ()
    slowest_rate_bits_per_s: None = None

    @property
    def slots(self) -> int:
        """How many ranks fit."""
        return sum(host.slots for host in self.hosts)

    def describe(self) -> str:
        """One line for people."""
        names = f"hosts {', '.join(f'{host.name}:{host.slots}' for host in self.hosts)}"
        mine = {host.name for host in self.hosts}
        machines = same_and_others({name: said for name, said in self.machines if name in mine})
        return f"{names}; {machines}" if machines else names


class RealHosts:
    """Starts ranks and commands on hosts that exist, as a VirtualCluster does inside its own."""

    def __init__(self, hosts: str) -> None:
        """Hosts as in "a:2,b:2"."""
        try:
            self.spec = HostList(parse_hosts(hosts))
        except LaunchError as error:
            raise ClusterError(str(error)) from error
        self._cores: dict[str, str] = {}  # what each host said

    def first(self, count: int) -> RealHosts:
        """The first so many of them."""
        part = copy(self)
        part.spec = replace(self.spec, hosts=self.spec.hosts[:count])
        return part

    def host_command(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host, over ssh."""
        return [*_SSH, host, *command]

    def execute(
        self, host: str, command: Sequence[str], *, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end; its output comes back as text."""
        return mpirun.run([*_SSH_PLAIN, host, *command], timeout_s=timeout_s)

    def mpirun_command(self, ranks: int, command: Sequence[str]) -> list[str]:
        """The command line that starts `command` on `ranks` ranks, hosts filled in turn."""
        return self._mpirun(self.spec.hosts, ranks, command, os.environ)

    def run(
        self,
        ranks: int,
        command: Sequence[str],
        *,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        capture: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on `ranks` ranks to its end; `env` reaches every rank."""
        line = self._mpirun(self.spec.hosts, ranks, command, {**os.environ, **(env or {})}, tuple(env or ()))
        return mpirun.run(line, timeout_s=timeout_s, env=env, capture=capture)

    def require_answers(self, timeout_s: float = _ANSWER_TIMEOUT_S) -> None:
        """Ask each host in turn for its cores and for a file of the current folder, which all should share.

        ClusterError names the one that does not answer, or does not see it.
        """
        with tempfile.NamedTemporaryFile(prefix="hvpipe-shared-", dir=Path.cwd()) as file:
            for host in self.spec.hosts:
                said, why = self._ask(host, ["getconf", "_NPROCESSORS_ONLN"], timeout_s)
                if why:
                    raise ClusterError(
                        "Every host should answer mpirun (over ssh, without a password). "
                        f"Received: host={host.name!r}, {why}"
                    )
                self._cores[host.name] = _end(said, lines=1)
                _, why = self._ask(host, ["ls", file.name], timeout_s)
                if why:
                    raise ClusterError(
                        "Every host should share the current folder, where ranks leave what they measured. "
                        f"Received: host={host.name!r}, which does not see {file.name}: {why}"
                    )

    def ask_machines(self, timeout_s: float = _ANSWER_TIMEOUT_S) -> None:
        """Have each host say what it is; one that does not has no part in the description."""
        told = {}
        command = ["env", f"PYTHONPATH={_ROOT}", sys.executable, "-m", "bench.hosts.hardware"]
        for host in self.spec.hosts:
            said, why = self._ask(host, command, timeout_s)
            if not why and (machine := _end(said, lines=1)):
                told[host.name] = machine
        self.spec = replace(self.spec, machines=tuple(told.items()))

    def _ask(self, host: HostSlots, command: Sequence[str], timeout_s: float) -> tuple[str, str]:
        """What a command prints on a host; and why it failed there, "" where it did not."""
        line = self._mpirun((HostSlots(host.name, 1),), 1, command, os.environ)
        try:
            done = mpirun.run(line, timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            return "", f"nothing within {timeout_s:g} s"
        if done.returncode != 0:
            return "", _end(done.stderr or done.stdout) or f"status {done.returncode}"
        return done.stdout, ""

    def cores_of_rank(self) -> float:
        """Cores that each rank has where it has fewest, as the hosts said when they answered."""
        found = []
        for host in self.spec.hosts:
            said = self._cores.get(host.name, "")
            if not said.isdecimal():
                raise ClusterError(
                    "Every host should say how many cores it has (getconf _NPROCESSORS_ONLN), so that all "
                    f"are used; or give --threads. Received: host={host.name!r}, {said!r}"
                )
            found.append(int(said) / host.slots)
        return min(found)

    def _mpirun(
        self,
        hosts: tuple[HostSlots, ...],
        ranks: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        also: tuple[str, ...] = (),
    ) -> list[str]:
        spec = LaunchSpec(
            identify(mpirun.find_mpirun(_program(command))),
            ranks,
            tuple(command),
            hosts=hosts,
            as_root=os.geteuid() == 0,
            export=tuple(dict.fromkeys((*exported_names(environ), *also))),
        )
        return mpirun_command(spec)


Hosts = VirtualCluster | RealHosts


def _program(command: Sequence[str]) -> str:
    """What a command line starts, after `env` and what it sets: its MPI may be another than ours."""
    return next(word for word in command if word != "env" and "=" not in word)


def _end(output: str, lines: int = 3) -> str:
    """The last lines that say something."""
    said = [line.strip() for line in output.splitlines() if line.strip(" -")]
    return " | ".join(said[-lines:])
