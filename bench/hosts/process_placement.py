"""Where the processes of a round run, and the command lines that start them there."""

from __future__ import annotations

import json
import os
import random
import shlex
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.cluster import network
from bench.errors import ClusterError
from bench.hosts.real_hosts import Hosts, RealHosts
from bench.launch import mpirun
from bench.launch.processes import Command
from bench.systems.system import System
from hvpipe.commands.launch import exported_names

ROOT = Path(__file__).parents[2]

_PORT = 20100  # the first that is used on a virtual host, which has them all to itself, and on a real one


@dataclass(frozen=True)
class Placement:
    """Ranks on the hosts of a cluster, slot by slot; without one, all on this machine.

    Hosts that exist are reached over ssh, which hands on no environment: what mpirun hands on
    stands on the command line, so that all systems find the same libraries and GPUs.
    """

    cluster: Hosts | None
    ranks: int

    def __post_init__(self) -> None:
        slots = self.ranks if self.cluster is None else self.cluster.spec.slots
        if not 1 <= self.ranks <= slots:
            raise ClusterError(
                f"Ranks must be 1 to the cluster's {slots} slots. Received: ranks={self.ranks}"
            )

    def commands(self, system: System, python: Sequence[str], directory: Path) -> list[Command]:
        """What to start for a system; in case of "servers" the first is the one that ends."""
        if isinstance(self.cluster, RealHosts):
            handed = {} if system.start == "mpirun" else _handed_on(python[0])
            words = [f"{name}={value}" for name, value in {**handed, "PYTHONPATH": str(ROOT)}.items()]
            python = ["env", *words, *python]
        rank_process = [*python, "bench.rounds.rank_process", str(directory)]
        if system.start == "mpirun":
            if self.cluster is None:
                return [Command("mpirun", mpirun.one_host(self.ranks, rank_process))]
            return [Command("mpirun", self.cluster.mpirun_command(self.ranks, rank_process))]
        if system.start == "processes":
            workers = {"worker": self._addresses(self.hosts)}
            return [
                self._told(workers, "worker", rank, host, [*rank_process, str(rank)])
                for rank, host in enumerate(self.hosts)
            ]
        return self._with_servers(
            [*rank_process, "0"], [*python, "bench.systems.server_process", str(directory)]
        )

    @property
    def hosts(self) -> list[int]:
        """The host of each rank, by its number."""
        if self.cluster is None:
            return [0] * self.ranks
        slots = [number for number, host in enumerate(self.cluster.spec.hosts) for _ in range(host.slots)]
        return slots[: self.ranks]

    @property
    def local_ranks_and_sizes(self) -> list[tuple[int, int]]:
        """Of each rank, its number on its host and how many are there."""
        hosts = self.hosts
        return [(hosts[:rank].count(host), hosts.count(host)) for rank, host in enumerate(hosts)]

    def _with_servers(self, coordinator: list[str], server: list[str]) -> list[Command]:
        """The coordinator on the first host, a worker for each rank, a parameter server on each host."""
        servers = sorted(set(self.hosts))
        addresses = self._addresses([self.hosts[0], *self.hosts, *servers])
        jobs = {
            "chief": addresses[:1],
            "worker": addresses[1 : 1 + self.ranks],
            "ps": addresses[1 + self.ranks :],
        }
        commands = [self._told(jobs, "chief", 0, self.hosts[0], coordinator)]
        for job, hosts in (("worker", self.hosts), ("ps", servers)):
            commands += [
                self._told(jobs, job, index, host, [*server, job, str(index)])
                for index, host in enumerate(hosts)
            ]
        return commands

    def _told(
        self, jobs: dict[str, list[str]], job: str, index: int, host: int, command: list[str]
    ) -> Command:
        """A command in its host, told by TF_CONFIG of the others."""
        told = json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})
        line = command
        if isinstance(self.cluster, RealHosts):
            command = [shlex.quote(word) for word in ("env", f"TF_CONFIG={told}", *command)]
        if self.cluster is not None:
            line = self.cluster.host_command(self.cluster.spec.hosts[host].name, command)
        return Command(f"{job}-{index}", line, {"TF_CONFIG": told})

    def _addresses(self, hosts: Sequence[int]) -> list[str]:
        """An address for each process on those hosts."""
        if self.cluster is None:
            return [f"127.0.0.1:{port}" for port in _free_ports(len(hosts))]
        if isinstance(self.cluster, RealHosts):
            names = [host.name for host in self.cluster.spec.hosts]
        else:
            names = [network.address(number) for number in range(len(self.cluster.spec.hosts))]
        return [f"{names[host]}:{_PORT + number}" for number, host in enumerate(hosts)]


def _handed_on(program: str) -> dict[str, str]:
    """What mpirun hands on to other hosts, which finds what `program` needs first."""
    names = set(exported_names(os.environ)) - {"TF_CONFIG"}
    environment = {name: os.environ[name] for name in sorted(names)}
    path = environment.get("PATH", os.defpath)
    return {**environment, "PATH": f"{Path(program).parent}{os.pathsep}{path}"}


def _free_ports(count: int) -> list[int]:
    """Ports below those that the kernel hands out by itself, so that they are free until they are used."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise ClusterError(f"There must be {count} free ports from 20000 to 32000. Received: {len(found)}")
