"""The memory and CPU limits of this process, from control groups and ulimit."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def usable_bytes(processes: int) -> int:
    """Return how many bytes this process may still allocate.

    This is an equal share of the host's memory, or of the smallest limit of the control groups around this
    process, or what `ulimit -v` or `-d` allows, whichever is less. Memory that the process has already taken,
    such as Python and TensorFlow themselves, is subtracted. It is at most an equal share of what all
    processes have left free.

    Args:
        processes: How many processes share the host and its limits.
    """
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group_bytes = cgroup_limit_bytes(_read(_OWN_GROUPS), _CGROUPS)
    taken = memory_figures(_read(Path("/proc/self/status")))
    left = [min(machine_bytes, group_bytes or machine_bytes) // processes - taken.get("VmRSS", 0)]
    free = memory_figures(_read(Path("/proc/meminfo"))).get("MemAvailable")
    left += [] if free is None else [free // processes]
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft_bytes = resource.getrlimit(limit)[0]
        if soft_bytes != resource.RLIM_INFINITY:
            left.append(soft_bytes - taken.get(name, 0))
    return max(0, min(left))


def cgroup_limit_bytes(groups: str, root: Path) -> int | None:
    """Return the smallest memory limit of a process's control groups and their parents; None without a limit.

    Args:
        groups: The text of /proc/PID/cgroup, of version 1 or 2.
        root: Where the control groups are mounted.
    """
    found = []
    for version, folder in _groups_around(groups, root, "memory"):
        text = _read(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).strip()
        found += [int(text)] if text.isdecimal() else []  # otherwise "max", or no such file
    return min(found, default=None)


def cgroup_cores(groups: str, root: Path) -> float | None:
    """Return the smallest CPU limit, in cores, as `docker run --cpus` sets; see `cgroup_limit_bytes`."""
    found = []
    for version, folder in _groups_around(groups, root, "cpu"):
        if version == 1:
            words = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        else:
            words = _read(folder / "cpu.max").split()
        # Otherwise "max", -1, or no such file.
        if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def cores_allowed() -> float | None:
    """Return `cgroup_cores` of this process."""
    return cgroup_cores(_read(_OWN_GROUPS), _CGROUPS)


def _groups_around(groups: str, root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield the version and folder of each control group of a process and their parents."""
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


def memory_figures(text: str) -> dict[str, int]:
    """Return the figures of /proc/PID/status or /proc/meminfo by name, in bytes."""
    return {name: 1024 * int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
