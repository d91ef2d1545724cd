"""Which host each process of a round runs on, and the command lines that start it there."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import ROOT
from bench.cluster.virtual_cluster import VirtualCluster
from bench.hosts.hosts import Hosts
from bench.hosts.real_hosts import RealHosts
from bench.launch.processes import Command
from bench.systems.system import System
from hvpipe.commands.launch import exported_names


@dataclass(frozen=True)
class Placement:
    """Ranks on hosts, slot by slot.

    ssh, which reaches real hosts, hands on no environment. So the command line sets what mpirun would hand
    on, and all systems find the same libraries and GPUs.
    """

    cluster: Hosts
    ranks: int

    def commands(self, system: System, python: Sequence[str], directory: Path) -> list[Command]:
        """Return the commands that start a system. With "servers", the first one ends the round."""
        if isinstance(self.cluster, RealHosts):
            handed = {} if system.start == "mpirun" else _handed_on(python[0])
            words = [f"{name}={value}" for name, value in {**handed, "PYTHONPATH": str(ROOT)}.items()]
            python = ["env", *words, *python]
        rank_process = [*python, "bench.rounds.rank_process", str(directory)]
        if system.start == "mpirun":
            return [Command("mpirun", self.cluster.mpirun_command(self.ranks, rank_process))]
        if system.start == "horovodrun":
            return [self._horovodrun(Path(python[0]).with_name("horovodrun"), rank_process)]
        if system.start == "processes":
            workers = {"worker": self.cluster.addresses(self.hosts)}
            return [
                self._told(workers, "worker", rank, host, [*rank_process, str(rank)])
                for rank, host in enumerate(self.hosts)
            ]
        return self._with_servers(
            [*rank_process, "0"], [*python, "bench.systems.parameter_server", str(directory)]
        )

    def _horovodrun(self, program: Path, command: Sequence[str]) -> Command:
        """Return what starts ranks over Gloo. horovodrun hands its environment on to them."""
        first, *_ = hosts = self.cluster.spec.hosts
        names = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        line = [str(program), "--gloo", "-np", str(self.ranks), "-H", names, *command]
        if isinstance(self.cluster, VirtualCluster):
            inside = ["sh", "-c", 'PATH="$0:$PATH" exec "$@"', str(self.cluster.ssh.parent), *line]
            line = self.cluster.host_command(first.name, inside)
        return Command("horovodrun", line)

    @property
    def hosts(self) -> list[int]:
        """The index of the host of each rank."""
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
        addresses = self.cluster.addresses([self.hosts[0], *self.hosts, *servers])
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
        if isinstance(self.cluster, RealHosts):
            command = [shlex.quote(word) for word in ("env", f"TF_CONFIG={told}", *command)]
        line = self.cluster.host_command(self.cluster.spec.hosts[host].name, command)
        return Command(f"{job}-{index}", line, {"TF_CONFIG": told})


# All can read a command line, so it has only what Python and TensorFlow read.
_HANDED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHON", "TF_", "XLA_", "OMP_", "CUDA_", "NCCL_", "MALLOC_")


def _handed_on(program: str) -> dict[str, str]:
    """Return what mpirun hands on to other hosts, with the folder of `program` first in PATH."""
    names = set(exported_names(os.environ)) - {"TF_CONFIG"}
    environment = {name: os.environ[name] for name in sorted(names) if name.startswith(_HANDED_ON)}
    path = environment.get("PATH", os.defpath)
    return {**environment, "PATH": f"{Path(program).parent}{os.pathsep}{path}"}
