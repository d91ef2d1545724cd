"""The state of a virtual cluster on disk, so that another process can enter it or clean it up."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cluster.spec import ClusterSpec
from bench.errors import BenchError
from hvpipe.atomic_file import atomic_file

STATE = Path("/run/hvpipe-cluster")
_FILE = "state.json"

# One script enters a host, so that launchers, `exec` and a person's shell get the same host: its CPU
# time, network, name, /etc/hosts, and a /sys of its network. That /sys keeps the cgroups, because entering
# another host from inside this one needs them.
_ENTER = """#!/bin/sh
# Run a command inside a host of the virtual cluster {name}: enter HOST COMMAND [ARGUMENT...]
host=$1
shift
[ -e /run/netns/{name}-"$host" ] || {{ echo "cluster {name} has no host $host" >&2; exit 2; }}
quota={cpu_group}/$host/cgroup.procs
[ ! -e "$quota" ] || echo $$ > "$quota" || exit 1
exec nsenter --net=/run/netns/{name}-"$host" unshare --uts --mount sh -c '
  host=$1
  shift
  echo "$host" > /proc/sys/kernel/hostname
  mount --bind /etc/netns/{name}-"$host"/hosts /etc/hosts
  if [ -d /sys/fs/cgroup ]; then
    mount --rbind /sys/fs/cgroup {directory}/cgroup
    mount -t sysfs sysfs /sys
    mount --rbind {directory}/cgroup /sys/fs/cgroup
  fi
  exec "$@"' sh "$host" "$@"
"""

_SSH = """#!/bin/sh
# What launchers run instead of ssh: ssh [OPTION...] HOST [OPTION...] COMMAND-LINE
while [ "${{1#-}}" != "$1" ]; do
  [ "$1" = -x ] || shift
  shift
done
host=$1
shift
while [ "${{1#-}}" != "$1" ]; do
  [ "$1" = -x ] || shift
  shift
done
exec {directory}/enter "$host" sh -c "$*"
"""


@dataclass(frozen=True)
class ClusterState:
    """A cluster's name and spec, and the process that it ends with; owner_pid 0 if it stays until `down`."""

    name: str
    spec: ClusterSpec
    owner_pid: int
    owner_started: int

    @property
    def directory(self) -> Path:
        """The folder of this state and the enter script."""
        return STATE / self.name

    @property
    def ssh(self) -> Path:
        """The script that stands in for ssh, alone in its folder, which PATH can name."""
        return self.directory / "bin" / "ssh"

    @property
    def owner_alive(self) -> bool:
        """Whether the owner still runs. Another process that reuses its pid does not count."""
        return self.owner_pid != 0 and process_started(self.owner_pid) == self.owner_started

    @property
    def stale(self) -> bool:
        """Whether its owner ended without taking it down."""
        return self.owner_pid != 0 and not self.owner_alive

    def write(self, cpu_group: Path | None) -> None:
        """Write state and scripts. `cpu_group` holds the hosts' cgroups, if there is a cpu controller."""
        (self.directory / "cgroup").mkdir(parents=True, exist_ok=True)
        data = {
            "name": self.name,
            "owner_pid": self.owner_pid,
            "owner_started": self.owner_started,
            "spec": self.spec.to_json(),
        }
        with atomic_file(self.directory / _FILE) as file:  # another process may read it
            file.write(json.dumps(data, indent=1).encode())
        fields = {"name": self.name, "directory": self.directory, "cpu_group": cpu_group or "/nonexistent"}
        self.ssh.parent.mkdir(exist_ok=True)
        for path, text in ((self.directory / "enter", _ENTER), (self.ssh, _SSH)):
            path.write_text(text.format(**fields))
            path.chmod(0o755)

    def delete(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        with suppress(OSError):  # another cluster has a state there, or another process was first
            STATE.rmdir()


def process_started(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def read_state(name: str) -> ClusterState:
    try:
        return _read(STATE / name / _FILE)
    except OSError as error:
        known = ", ".join(path.parent.name for path in _files()) or "none"
        raise BenchError(
            f"The cluster must be up: `python -m bench.cluster up`. Received: name={name!r}; up: {known}"
        ) from error


def _read(path: Path) -> ClusterState:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise BenchError(f"A cluster's state must be JSON: delete {path}. Received: {error}") from error
    return ClusterState(
        data["name"], ClusterSpec.from_json(data["spec"]), data["owner_pid"], data["owner_started"]
    )


def all_states() -> list[ClusterState]:
    """Return every cluster on this machine, including stale ones."""
    found = []
    for path in _files():
        with suppress(FileNotFoundError):  # taken down meanwhile
            found.append(_read(path))
    return found


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other process is in such a block."""
    folder = os.open(STATE.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _files() -> list[Path]:
    return sorted(STATE.glob(f"*/{_FILE}"))
