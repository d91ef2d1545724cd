"""A cluster on one machine, as a context manager.

    with VirtualCluster(equal_hosts(4, "300mbit")) as cluster:
        cluster.run(4, ["python", "train.py"])

``python -m bench.cluster 4x300mbit`` offers the same as a command. Linux and root only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.cluster import cpu, network, state
from bench.cluster.spec import ClusterSpec, equal_hosts
from bench.errors import BenchError
from bench.hosts.hosts import Hosts
from bench.launch import mpirun
from bench.launch.termination import ended_by_exception, undisturbed

__all__ = ["VirtualCluster", "clean_up", "equal_hosts"]


class VirtualCluster(Hosts):
    """A virtual cluster that is up inside its `with` block.

    Leaving the block by return, exception, Ctrl-C or SIGTERM takes everything down. After SIGKILL, the next
    cluster on this machine does.
    """

    def __init__(self, spec: ClusterSpec, name: str | None = None) -> None:
        self.spec = spec
        self.name = f"hv{os.getpid()}" if name is None else name
        self._signals = ExitStack()

    def __enter__(self) -> VirtualCluster:
        with ExitStack() as signals:
            signals.enter_context(ended_by_exception())
            self.up()
            self._signals = signals.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        with self._signals:
            self.down()

    def up(self) -> None:
        """Build the cluster. BenchError if another one of its name is up."""
        network.require_privileges()
        clean_up()
        with state.alone():
            if self.name in state.names():
                raise BenchError(f"A cluster's name must not be in use. Received: name={self.name!r}")
            self._lock = state.make(self.name, cpu.group(self.name))
        try:
            cpu.build(self.name, self.spec)
            network.build(self.name, self.spec)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End the processes inside and remove everything. A second Ctrl-C waits until that is done."""
        with undisturbed():
            _remove(self.name)
            os.close(self._lock)

    @property
    def ssh(self) -> Path:
        """A script that stands in for ssh, as launchers call it, while the cluster is up."""
        return state.ssh_script(self.name)

    def host_command(self, host: str, command: Sequence[str]) -> list[str]:
        names = [each.name for each in self.spec.hosts]
        if host not in names:
            raise BenchError(f"The host must be one of {', '.join(names)}. Received: host={host!r}")
        return [str(state.enter_script(self.name)), host, *command]

    def mpirun_command(self, ranks: int, command: Sequence[str], export: Sequence[str] = ()) -> list[str]:
        """Return the line by which mpirun starts `command` on `ranks` ranks, from inside the first host."""
        limited = any(host.cpus is not None for host in self.spec.hosts)
        line = mpirun.line(
            ranks,
            command,
            self.spec.hosts,
            yields=limited or mpirun.crowded(ranks),
            rsh_agent=str(self.ssh),
            network=network.INTERFACE,
        )
        return self.host_command(self.spec.hosts[0].name, line)

    def address(self, host: int) -> str:
        return network.address(host)


def clean_up() -> None:
    """Take down every cluster whose process has ended."""
    with state.alone():  # two would remove the same things
        for name in state.names():
            if not state.is_held(name):
                _remove(name)


def _remove(name: str) -> None:
    network.remove(name)
    cpu.remove(name)
    state.delete(name)
