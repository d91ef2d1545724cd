"""What Linux's /proc says about this host and its processes."""

from __future__ import annotations

import os
from pathlib import Path


def boot_id() -> str:
    """Return the host's identity since its boot, which differs if another has its name; "" unknown.

    A pod of Kubernetes that is made again has its old name, often on another machine.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def started_s(pid: int) -> float | None:
    """Return when a process began, as Unix time; None if it is not there, or has ended already."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        booted = Path("/proc/stat").read_text().partition("\nbtime ")[2].split()[0]
        started_s = int(booted) + int(fields[18]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return None if state in "ZX" else started_s
