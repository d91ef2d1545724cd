"""Which host each process of a round runs on, and the command lines that start it there."""

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
from bench.errors import BenchError
from bench.hosts.real_hosts import Hosts, RealHosts
from bench.launch import mpirun
from bench.launch.processes import Command
from bench.systems.system import System
from hvpipe.commands.launch import exported_names

ROOT = Path(__file__).parents[2]

_PORT = 20100  # the first port that is used on a host, virtual or real


@dataclass(frozen=True)
class Placement:
    """Ranks on the hosts of a cluster, slot by slot; without a cluster, all on this machine.

    ssh, which reaches real hosts, hands on no environment. So the command line sets what mpirun would hand
    on, and all systems find the same libraries and GPUs.
    """

    cluster: Hosts | None
    ranks: int

    def commands(self, system: System, python: Sequence[str], directory: Path) -> list[Command]:
        """Return the commands that start a system. With "servers", the first one ends the round."""
        if isinstance(self.cluster, RealHosts):
            handed = {} if system.start == "mpirun" else _handed_on(python[0])
            words = [f"{name}={value}" for name, value in {**handed, "PYTHONPATH": str(ROOT)}.items()]
            python = ["env", *words, *python]
        rank_process = [*python, "bench.rounds.rank_process", str(directory)]
        if system.start == "mpirun":
            if self.cluster is None:
                line = mpirun.line(self.ranks, rank_process, yields=mpirun.crowded(self.ranks))
                return [Command("mpirun", line)]
            return [Command("mpirun", self.cluster.mpirun_command(self.ranks, rank_process))]
        if system.start == "horovodrun":
            return [self._horovodrun(Path(python[0]).with_name("horovodrun"), rank_process)]
        if system.start == "processes":
            workers = {"worker": self._addresses(self.hosts)}
            return [
                self._told(workers, "worker", rank, host, [*rank_process, str(rank)])
                for rank, host in enumerate(self.hosts)
            ]
        return self._with_servers(
            [*rank_process, "0"], [*python, "bench.systems.server_process", str(directory)]
        )

    def _horovodrun(self, program: Path, command: Sequence[str]) -> Command:
        """Return what starts ranks over Gloo. horovodrun hands its environment on to them."""
        assert not isinstance(self.cluster, RealHosts)
        spec = None if self.cluster is None else self.cluster.spec
        hosts = (
            f"localhost:{self.ranks}" if spec is None else ",".join(f"{h.name}:{h.slots}" for h in spec.hosts)
        )
        line = [str(program), "--gloo", "-np", str(self.ranks), "-H", hosts, *command]
        if self.cluster is None:
            return Command("horovodrun", line)
        inside = ["sh", "-c", 'PATH="$0:$PATH" exec "$@"', str(self.cluster.ssh.parent), *line]
        return Command("horovodrun", self.cluster.host_command(spec.hosts[0].name, inside))

    @property
    def hosts(self) -> list[int]:
        """The index of the host of each rank."""
        if self.cluster is None:
            return [0] * self.ranks
        slots = [number for number, host in enumerate(self.cluster.spec.hosts) for _ in range(host.slots)]
        return slots[: self.ranks]

    @property
    def local_ranks_and_sizes(self) -> list[tuple[int, int]]:
        """Each rank's number on its host, and the number of ranks there."""
        hosts = self.hosts
        return [(hosts[:rank].count(host), hosts.count(host)) for rank, host in enumerate(hosts)]

    def _with_servers(self, coordinator: list[str], server: list[str]) -> list[Command]:
        """Return a coordinator on the first host, a worker per rank and a parameter server per host."""
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
        """Return a command on its host, with a TF_CONFIG that names the others."""
        told = json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})
        line = command
        if isinstance(self.cluster, RealHosts):
            command = [shlex.quote(word) for word in ("env", f"TF_CONFIG={told}", *command)]
        if self.cluster is not None:
            line = self.cluster.host_command(self.cluster.spec.hosts[host].name, command)
        return Command(f"{job}-{index}", line, {"TF_CONFIG": told})

    def _addresses(self, hosts: Sequence[int]) -> list[str]:
        """Return an address for each process on those hosts."""
        if self.cluster is None:
            return [f"127.0.0.1:{port}" for port in _free_ports(len(hosts))]
        if isinstance(self.cluster, RealHosts):
            names = [host.name for host in self.cluster.spec.hosts]
        else:
            names = [network.address(number) for number in range(len(self.cluster.spec.hosts))]
        return [f"{names[host]}:{_PORT + number}" for number, host in enumerate(hosts)]


def _handed_on(program: str) -> dict[str, str]:
    """Return what mpirun hands on to other hosts, with the folder of `program` first in PATH."""
    names = set(exported_names(os.environ)) - {"TF_CONFIG"}
    environment = {name: os.environ[name] for name in sorted(names)}
    path = environment.get("PATH", os.defpath)
    return {**environment, "PATH": f"{Path(program).parent}{os.pathsep}{path}"}


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
