"""How much memory and processor time this process may use: what control groups and ulimit leave of it."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def usable_bytes(processes: int) -> int:
    """What this process may still take, in bytes, where so many share the host and what limits it.

    The machine's memory, or the smallest limit of the control groups around this process, in equal shares; or
    what `ulimit -v` or `-d` allows this process alone, if that is less. What the process has already taken is
    not part of it: Python and TensorFlow themselves.
    """
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group_bytes = cgroup_limit_bytes(_read(_OWN_GROUPS), _CGROUPS)
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
    for version, folder in _groups_around(groups, root, "memory"):
        text = _read(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).strip()
        found += [int(text)] if text.isdecimal() else []  # else "max", or no such file
    return min(found, default=None)


def cgroup_cores(groups: str, root: Path) -> float | None:
    """The smallest limit of processor time, in cores, as `docker run --cpus` sets one; else as above."""
    found = []
    for version, folder in _groups_around(groups, root, "cpu"):
        if version == 1:
            words = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        else:
            words = _read(folder / "cpu.max").split()
        # Else "max", -1, or no such file.
        if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def cores_allowed() -> float | None:
    """`cgroup_cores` of this process."""
    return cgroup_cores(_read(_OWN_GROUPS), _CGROUPS)


def _groups_around(groups: str, root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Version and folder of the control groups that may limit a process, and of those around them."""
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder == top or top in folder.parents:
                yield (1 if controllers else 2), folder


def taken_bytes(status: str) -> dict[str, int]:
    """The memory figures of /proc/PID/status, by name, in bytes."""
    return {name: 1024 * int(kib) for name, kib in re.findall(r"^(Vm\w+):\s+(\d+) kB", status, re.MULTILINE)}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
