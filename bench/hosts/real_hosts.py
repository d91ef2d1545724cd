"""Real hosts, reached over ssh and mpirun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.cluster.spec import ClusterSpec, HostSpec
from bench.errors import BenchError
from bench.hosts.hosts import Hosts
from bench.launch import mpirun, processes
from hvpipe.commands.hosts import HostSlots, parse_hosts
from hvpipe.commands.launch import exported_names
from hvpipe.errors import LaunchError

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
        self.spec = ClusterSpec(tuple(HostSpec(host.name, slots=host.slots) for host in slots))
        self.shared_folder = Path.cwd()
        self._answers: dict[
            str, dict[str, Any]
        ] = {}  # of the hosts: their "cores", and their "machine" in words

    def describe(self) -> str:
        parts = [f"hosts {', '.join(f'{host.name}:{host.slots}' for host in self.spec.hosts)}"]
        alike: dict[str, list[str]] = defaultdict(list)
        for host, answer in self._answers.items():
            alike[answer["machine"]].append(host)
        return "; ".join([*parts, *(f"{', '.join(names)}: {machine}" for machine, names in alike.items())])

    def host_command(self, host: str, command: Sequence[str]) -> list[str]:
        return [*_SSH, host, *command]

    def plain_command(self, host: str, command: Sequence[str]) -> list[str]:
        return [*_SSH_PLAIN, host, *command]

    def mpirun_command(self, ranks: int, command: Sequence[str], export: Sequence[str] = ()) -> list[str]:
        names = tuple(dict.fromkeys((*exported_names(os.environ), *export)))
        return mpirun.line(ranks, command, self.spec.hosts, export=names)

    def cores_of_rank(self) -> float:
        return min(self._answers[host.name]["cores"] / host.slots for host in self.spec.hosts)

    def require_answers(self) -> None:
        """Ask each host for its hardware, and for a file of the current folder, which all should share.

        BenchError names the host that does not answer, or does not see the file.
        """
        with tempfile.NamedTemporaryFile(prefix="hvpipe-shared-", dir=self.shared_folder) as file:
            command = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "bench.hosts.hardware", file.name]
            for host in self.spec.hosts:
                answer = self._ask(host.name, command)
                if not answer["sees"]:
                    raise BenchError(
                        "Every host should share the current folder, into which ranks write their results. "
                        f"Received: host={host.name!r}, which does not see {file.name}"
                    )
                self._answers[host.name] = answer

    def _ask(self, host: str, command: Sequence[str]) -> dict[str, Any]:
        """Return the JSON that a command prints last on a host. BenchError if it does not."""
        line = mpirun.line(1, command, (HostSlots(host, 1),), export=tuple(exported_names(os.environ)))
        try:
            done = processes.run(line, timeout_s=_ANSWER_TIMEOUT_S)
            if done.returncode == 0:
                found: dict[str, Any] = json.loads(_end(done.stdout, lines=1))
                return found
            why = _end(done.stderr or done.stdout) or f"status {done.returncode}"
        except subprocess.TimeoutExpired:
            why = f"nothing within {_ANSWER_TIMEOUT_S:g} s"
        except ValueError:
            why = f"{_end(done.stdout)!r}"
        raise BenchError(
            "Every host should answer mpirun (over ssh, without a password), and have this Python. "
            f"Received: host={host!r}, {why}"
        )


def _end(output: str, lines: int = 3) -> str:
    """Return the last lines that are not blank."""
    said = [line.strip() for line in output.splitlines() if line.strip(" -")]
    return " | ".join(said[-lines:])
