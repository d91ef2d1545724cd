"""Real hosts, reached over ssh and mpirun, with the interface of a virtual cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.cluster.virtual_cluster import VirtualCluster
from bench.errors import BenchError
from bench.hosts.hardware import same_and_others
from bench.launch import mpirun
from hvpipe.commands.hosts import HostSlots, parse_hosts
from hvpipe.commands.launch import exported_names
from hvpipe.errors import LaunchError

_ROOT = Path(__file__).parents[2]
_ANSWER_TIMEOUT_S = 60.0
# With a terminal (-tt), a remote process ends when we do. Otherwise a server would run for ever.
_SSH = ("ssh", "-tt", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
_SSH_PLAIN = ("ssh", "-n", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")  # keeps output and errors apart


@dataclass(frozen=True)
class HostList:
    """Real hosts in the form of a ClusterSpec. Their links have no set limit.

    `machines` describes their hardware, once they have answered.
    """

    hosts: tuple[HostSlots, ...]
    machines: str = ""
    slowest_rate_bits_per_s: None = None

    @property
    def slots(self) -> int:
        return sum(host.slots for host in self.hosts)

    def describe(self) -> str:
        names = f"hosts {', '.join(f'{host.name}:{host.slots}' for host in self.hosts)}"
        return f"{names}; {self.machines}" if self.machines else names


class RealHosts:
    """Starts ranks and commands on real hosts, as a VirtualCluster does on its own."""

    def __init__(self, hosts: str) -> None:
        """Take hosts as in "a:2,b:2"."""
        try:
            self.spec = HostList(parse_hosts(hosts))
        except LaunchError as error:
            raise BenchError(str(error)) from error
        self._cores: dict[str, int] = {}  # the answers of the hosts
        self._machines: dict[str, str] = {}

    def host_command(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on a host over ssh."""
        return [*_SSH, host, *command]

    def execute(
        self, host: str, command: Sequence[str], *, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end and return its output as text."""
        return mpirun.run([*_SSH_PLAIN, host, *command], timeout_s=timeout_s)

    def mpirun_command(self, ranks: int, command: Sequence[str]) -> list[str]:
        """Return the command line that starts `command` on `ranks` ranks, filling the hosts in turn."""
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
        """Run a command on `ranks` ranks to its end. Every rank gets `env`."""
        line = self._mpirun(self.spec.hosts, ranks, command, {**os.environ, **(env or {})}, tuple(env or ()))
        return mpirun.run(line, timeout_s=timeout_s, env=env, capture=capture)

    def require_answers(self, timeout_s: float = _ANSWER_TIMEOUT_S) -> None:
        """Ask each host for its hardware, and for a file of the current folder, which all should share.

        BenchError names the host that does not answer, or does not see the file.
        """
        with tempfile.NamedTemporaryFile(prefix="hvpipe-shared-", dir=Path.cwd()) as file:
            command = ["env", f"PYTHONPATH={_ROOT}", sys.executable, "-m", "bench.hosts.hardware", file.name]
            for host in self.spec.hosts:
                answer = self._ask(host, command, timeout_s)
                if not answer["sees"]:
                    raise BenchError(
                        "Every host should share the current folder, into which ranks write their results. "
                        f"Received: host={host.name!r}, which does not see {file.name}"
                    )
                self._cores[host.name] = answer["cores"]
                self._machines[host.name] = answer["machine"]
        self.spec = replace(self.spec, machines=same_and_others(self._machines))

    def _ask(self, host: HostSlots, command: Sequence[str], timeout_s: float) -> dict[str, Any]:
        """Return the JSON that a command prints last on a host. BenchError if it does not."""
        line = self._mpirun((HostSlots(host.name, 1),), 1, command, os.environ)
        try:
            done = mpirun.run(line, timeout_s=timeout_s)
            if done.returncode == 0:
                found: dict[str, Any] = json.loads(_end(done.stdout, lines=1))
                return found
            why = _end(done.stderr or done.stdout) or f"status {done.returncode}"
        except subprocess.TimeoutExpired:
            why = f"nothing within {timeout_s:g} s"
        except ValueError:
            why = f"{_end(done.stdout)!r}"
        raise BenchError(
            "Every host should answer mpirun (over ssh, without a password), and have this Python. "
            f"Received: host={host.name!r}, {why}"
        )

    def cores_of_rank(self) -> float:
        """Return the cores of each rank on the host that has fewest, once all hosts have answered."""
        return min(self._cores[host.name] / host.slots for host in self.spec.hosts)

    def _mpirun(
        self,
        hosts: tuple[HostSlots, ...],
        ranks: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        also: tuple[str, ...] = (),
    ) -> list[str]:
        export = tuple(dict.fromkeys((*exported_names(environ), *also)))
        return mpirun.line(ranks, command, hosts, export=export)


Hosts = VirtualCluster | RealHosts


def _end(output: str, lines: int = 3) -> str:
    """Return the last lines that are not blank."""
    said = [line.strip() for line in output.splitlines() if line.strip(" -")]
    return " | ".join(said[-lines:])
