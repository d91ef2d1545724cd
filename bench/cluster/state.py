"""The folder of a virtual cluster: the scripts that enter its hosts, and a lock of the process that holds it.

The kernel opens the lock when that process ends, however it ends. So an unlocked folder is of a cluster that
nobody took down.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDERS = Path("/run/hvpipe-cluster")

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


def folder(name: str) -> Path:
    return FOLDERS / name


def enter_script(name: str) -> Path:
    """Return the script that runs a command inside a host: enter HOST COMMAND [ARGUMENT...]."""
    return folder(name) / "enter"


def ssh_script(name: str) -> Path:
    """Return the script that stands in for ssh, alone in its folder, which PATH can name."""
    return folder(name) / "bin" / "ssh"


def make(name: str, cpu_group: Path | None) -> int:
    """Make a cluster's folder and scripts. Return the lock, which the caller closes after `delete`.

    `cpu_group` holds the hosts' cgroups, if there is a cpu controller.
    """
    (folder(name) / "cgroup").mkdir(parents=True)
    lock = _lock(folder(name))
    assert lock is not None  # a folder that is new
    fields = {"name": name, "directory": folder(name), "cpu_group": cpu_group or "/nonexistent"}
    ssh_script(name).parent.mkdir()
    for path, text in ((enter_script(name), _ENTER), (ssh_script(name), _SSH)):
        path.write_text(text.format(**fields))
        path.chmod(0o755)
    return lock


def delete(name: str) -> None:
    shutil.rmtree(folder(name), ignore_errors=True)
    with suppress(OSError):  # another cluster has a folder there, or another process was first
        FOLDERS.rmdir()


def names() -> list[str]:
    """Return the names of all clusters of this machine."""
    return sorted(path.name for path in FOLDERS.glob("*"))


def is_held(name: str) -> bool:
    """Return whether a process, perhaps this one, holds the cluster."""
    with suppress(FileNotFoundError):  # taken down meanwhile
        lock = _lock(folder(name))
        if lock is None:
            return True
        os.close(lock)
    return False


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other process is in such a block."""
    handle = os.open(FOLDERS.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _lock(path: Path) -> int | None:
    """Lock a folder. Return the handle, whose closing unlocks it; None if it is locked already."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
