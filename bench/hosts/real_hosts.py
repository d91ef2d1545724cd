"""Real hosts, reached over ssh and mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.hosts.hardware import same_and_others
from bench.hosts.hosts import FIRST_PORT, HostList, Hosts
from bench.launch import mpirun, processes
from hvpipe.commands.hosts import HostSlots, parse_hosts
from hvpipe.commands.launch import exported_names
from hvpipe.errors import LaunchError

_ROOT = Path(__file__).parents[2]
_ANSWER_TIMEOUT_S = 60.0
# With a terminal (-tt), a remote process ends when we do. Otherwise a server would run for ever.
_SSH_PLAIN = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
_SSH = (*_SSH_PLAIN, "-tt")


class RealHosts(Hosts):
    """Real hosts, once they have answered."""

    def __init__(self, hosts: str) -> None:
        """Take hosts as in "a:2,b:2"."""
        try:
            slots = parse_hosts(hosts)
        except LaunchError as error:
            raise BenchError(str(error)) from error
        self.spec = HostList(slots, f"hosts {', '.join(f'{host.name}:{host.slots}' for host in slots)}")
        self._cores: dict[str, int] = {}  # the answers of the hosts
        self._machines: dict[str, str] = {}

    def host_command(self, host: str, command: Sequence[str]) -> list[str]:
        return [*_SSH, host, *command]

    def plain_command(self, host: str, command: Sequence[str]) -> list[str]:
        return [*_SSH_PLAIN, host, *command]

    def mpirun_command(self, ranks: int, command: Sequence[str], export: Sequence[str] = ()) -> list[str]:
        names = tuple(dict.fromkeys((*exported_names(os.environ), *export)))
        return mpirun.line(ranks, command, self.spec.hosts, export=names)

    def addresses(self, hosts: Sequence[int]) -> list[str]:
        names = [host.name for host in self.spec.hosts]
        return [f"{names[host]}:{FIRST_PORT + number}" for number, host in enumerate(hosts)]

    @property
    def shared_folder(self) -> Path:
        return Path.cwd()

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
        self.spec = replace(self.spec, described=f"{self.spec.describe()}; {same_and_others(self._machines)}")

    def _ask(self, host: HostSlots, command: Sequence[str], timeout_s: float) -> dict[str, Any]:
        """Return the JSON that a command prints last on a host. BenchError if it does not."""
        line = mpirun.line(1, command, (HostSlots(host.name, 1),), export=tuple(exported_names(os.environ)))
        try:
            done = processes.run(line, timeout_s=timeout_s)
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
        return min(self._cores[host.name] / host.slots for host in self.spec.hosts)


def _end(output: str, lines: int = 3) -> str:
    """Return the last lines that are not blank."""
    said = [line.strip() for line in output.splitlines() if line.strip(" -")]
    return " | ".join(said[-lines:])
