"""A cluster on one machine, as a context manager.

    with VirtualCluster(equal_hosts(4, "300mbit")) as cluster:
        cluster.run(4, ["python", "train.py"])

``python -m bench.cluster`` offers the same as a command. Linux and root only.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from bench.cluster import cpu, network
from bench.cluster.spec import ClusterSpec, equal_hosts, read_spec
from bench.cluster.state import ClusterState, all_states, alone, process_started, read_state
from bench.errors import BenchError
from bench.launch import mpirun
from bench.launch.termination import ended_by_exception, undisturbed

__all__ = ["BenchError", "ClusterSpec", "VirtualCluster", "clean_up", "equal_hosts", "read_spec"]

_NAME = re.compile(r"[a-z][a-z0-9]{0,19}")


class VirtualCluster:
    """A virtual cluster that is up inside its `with` block.

    Leaving the block by return, exception, Ctrl-C or SIGTERM takes everything down. After SIGKILL, the next
    cluster on this machine (or ``python -m bench.cluster down``) does.
    """

    def __init__(self, spec: ClusterSpec, name: str | None = None) -> None:
        self.spec = spec
        self.name = f"hv{os.getpid()}" if name is None else name
        self._signals = ExitStack()
        if not _NAME.fullmatch(self.name):
            raise BenchError(
                "A cluster's name must be lower-case letters and digits, at most 20, starting with a letter. "
                f"Received: name={self.name!r}"
            )

    @staticmethod
    def attach(name: str) -> VirtualCluster:
        """Return the cluster of that name, which is up already and stays up."""
        return VirtualCluster(read_state(name).spec, name)

    def __enter__(self) -> VirtualCluster:
        with ExitStack() as signals:
            signals.enter_context(ended_by_exception())
            self.up(owner_pid=os.getpid())
            self._signals = signals.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._signals:
            self.down()

    def up(self, owner_pid: int = 0) -> None:
        """Build the cluster, in place of an idle one of the same name. With owner_pid 0 it stays up until
        `down`.
        """
        network.require_privileges()
        clean_up()
        if network.existing_namespaces(self.name):
            self._require_idle()
            self.down()
        # Until it is complete it belongs to this process: if this one is killed, the next one removes it.
        building = ClusterState(self.name, self.spec, os.getpid(), process_started(os.getpid()))
        building.write(cpu.group(self.name))
        try:
            cpu.build(self.name, self.spec)
            network.build(self.name, self.spec)
        except BaseException:
            self.down()
            raise
        if owner_pid != os.getpid():
            ClusterState(self.name, self.spec, owner_pid, process_started(owner_pid)).write(
                cpu.group(self.name)
            )

    def down(self) -> None:
        """End the processes inside and remove everything. A second Ctrl-C waits until that is done."""
        with undisturbed():
            network.remove(self.name)
            cpu.remove(self.name)
            ClusterState(self.name, self.spec, 0, 0).delete()

    def _require_idle(self) -> None:
        state = next((state for state in all_states() if state.name == self.name), None)
        running = network.processes(self.name)
        if (state is not None and state.owner_alive) or running:
            owner = (
                f"process {state.owner_pid} holds it"
                if state is not None and state.owner_alive
                else "no owner"
            )
            raise BenchError(
                f"The cluster must not be in use: end its processes or `python -m bench.cluster down --name "
                f"{self.name}`. Received: name={self.name!r}, {owner}, {len(running)} processes inside"
            )

    @property
    def directory(self) -> Path:
        """The folder of the enter script while the cluster is up."""
        return ClusterState(self.name, self.spec, 0, 0).directory

    @property
    def ssh(self) -> Path:
        """A script that stands in for ssh, as launchers call it, while the cluster is up."""
        return ClusterState(self.name, self.spec, 0, 0).ssh

    def host_command(self, host: str, command: Sequence[str]) -> list[str]:
        names = [each.name for each in self.spec.hosts]
        if host not in names:
            raise BenchError(f"The host must be one of {', '.join(names)}. Received: host={host!r}")
        return [str(self.directory / "enter"), host, *command]

    def mpirun_command(self, ranks: int, command: Sequence[str]) -> list[str]:
        """Return the line by which mpirun starts `command` on `ranks` ranks, from inside the first host."""
        limited = any(host.cpus is not None for host in self.spec.hosts)
        line = mpirun.line(
            ranks,
            command,
            self.spec.hosts,
            yields=limited or mpirun.crowded(ranks),
            rsh_agent=str(self.ssh),
            network=network.SUBNET,
        )
        return self.host_command(self.spec.hosts[0].name, line)

    def execute(
        self, host: str, command: Sequence[str], *, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside a host to its end and return its output as text."""
        return mpirun.run(self.host_command(host, command), timeout_s=timeout_s)

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
        return mpirun.run(self.mpirun_command(ranks, command), timeout_s=timeout_s, env=env, capture=capture)


def clean_up() -> list[str]:
    """Take down every cluster whose owner is gone. Return their names."""
    with alone():  # two would remove the same things
        stale = [state for state in all_states() if state.stale]
        for state in stale:
            VirtualCluster(state.spec, state.name).down()
    return [state.name for state in stale]
