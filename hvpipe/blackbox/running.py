"""Tells which ranks of a flight recorder still run on this host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from hvpipe.blackbox.files import Flight

_CLOCK_S = 2.0
"""The kernel states the start of the host to a second, and clocks are corrected."""


def runs(flight: Flight) -> bool:
    """Tell whether a rank has not ended, and its process is there. Without /proc, no rank is known to run."""
    if flight.ended_s is not None or flight.host != socket.gethostname()[:63]:
        return False
    started_s = _started_s(flight.pid)
    # A process that began later only has the number of the rank's.
    return started_s is not None and started_s < flight.began_s + _CLOCK_S


def _started_s(pid: int) -> float | None:
    """Return when a process began, as Unix time; None if it is not there, or has ended already."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        booted = Path("/proc/stat").read_text().partition("\nbtime ")[2].split()[0]
        started_s = int(booted) + int(fields[18]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return None if state in "ZX" else started_s
