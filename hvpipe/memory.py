"""How much memory this process may use: what the machine has, what control groups and ulimit leave of it."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_bytes(processes: int) -> int:
    """What this process may still take, in bytes, where so many share the host and what limits it.

    The machine's memory, or the smallest limit of the control groups around this process, in equal shares; or
    what `ulimit -v` or `-d` allows this process alone, if that is less. What the process has already taken is
    not part of it: Python and TensorFlow themselves.
    """
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    own = Path("/proc/self/cgroup")
    group_bytes = cgroup_limit_bytes(own.read_text(), _CGROUPS) if own.exists() else None
    taken = taken_bytes(_read(Path("/proc/self/status")))
    left = [min(machine_bytes, group_bytes or machine_bytes) // processes - taken.get("VmRSS", 0)]
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft_bytes = resource.getrlimit(limit)[0]
        if soft_bytes != resource.RLIM_INFINITY:
            left.append(soft_bytes - taken.get(name, 0))
    return max(0, min(left))


def cgroup_limit_bytes(groups: str, root: Path) -> int | None:
    """The smallest memory limit of a process's control groups and those around them; None where none is set.

    `groups` is the text of /proc/PID/cgroup, `root` where the groups are mounted; versions 1 and 2.
    """
    found = []
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder == top or top in folder.parents:
                text = _read(folder / name).strip()
                found += [int(text)] if text.isdecimal() else []  # else "max", or no such file
    return min(found, default=None)


def taken_bytes(status: str) -> dict[str, int]:
    """The memory figures of /proc/PID/status, by name, in bytes."""
    return {name: 1024 * int(kib) for name, kib in re.findall(r"^(Vm\w+):\s+(\d+) kB", status, re.MULTILINE)}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
