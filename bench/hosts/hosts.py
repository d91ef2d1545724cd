"""Hosts on which benchmarks start ranks and commands: what all kinds have in common, and this host alone."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bench.cluster.spec import ClusterSpec, HostSpec, cores_of_rank
from bench.errors import BenchError
from bench.launch import mpirun, processes

_FIRST_PORT = 20100  # of those that are used on a host, virtual or real


class Hosts(ABC):
    """Starts ranks and commands on hosts, which are up inside its `with` block."""

    spec: ClusterSpec
    shared_folder: Path | None = None  # that all hosts see; None if any folder of this machine is one

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def describe(self) -> str:
        return self.spec.describe()

    @abstractmethod
    def host_command(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the line that runs a command on a host."""

    @abstractmethod
    def mpirun_command(self, ranks: int, command: Sequence[str], export: Sequence[str] = ()) -> list[str]:
        """Return the line that starts a command on ranks, slot by slot. They get the variables `export`."""

    def address(self, host: int) -> str:
        """Return the name or address of the host with this number."""
        return self.spec.hosts[host].name

    def addresses(self, hosts: Sequence[int]) -> list[str]:
        """Return "host:port" for each process on the hosts of these numbers."""
        return [f"{self.address(host)}:{_FIRST_PORT + number}" for number, host in enumerate(hosts)]

    def cores_of_rank(self) -> float:
        """Return the cores of each rank on the host that has fewest."""
        return cores_of_rank(self.spec, os.cpu_count() or 1)

    def plain_command(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the line that runs a command on a host, which keeps input, output and errors as they are."""
        return self.host_command(host, command)

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
        line = self.mpirun_command(ranks, command, tuple(env or ()))
        return processes.run(line, timeout_s=timeout_s, env=env, capture=capture)


class ThisHost(Hosts):
    """This host alone, without limits."""

    def __init__(self, ranks: int = 2) -> None:
        self.spec = ClusterSpec((HostSpec("localhost", slots=ranks),))

    def describe(self) -> str:
        return "plain loopback, links without limit"

    def host_command(self, host: str, command: Sequence[str]) -> list[str]:
        return list(command)

    def mpirun_command(self, ranks: int, command: Sequence[str], export: Sequence[str] = ()) -> list[str]:
        return mpirun.line(ranks, command, yields=mpirun.crowded(ranks))

    def addresses(self, hosts: Sequence[int]) -> list[str]:
        return [f"127.0.0.1:{port}" for port in _free_ports(len(hosts))]


def _free_ports(count: int) -> list[int]:
    """Return free ports below the range that the kernel assigns, so that they stay free until used."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise BenchError(f"There must be {count} free ports from 20000 to 32000. Received: {len(found)}")
