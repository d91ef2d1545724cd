"""Tells which ranks of a flight recorder still run on this host."""

from __future__ import annotations

import socket

from hvpipe import proc
from hvpipe.blackbox.files import Flight

_CLOCK_S = 2.0
"""The kernel states the start of the host to a second, and clocks are corrected."""


def runs(flight: Flight) -> bool:
    """Tell whether a rank has not ended, and its process is there. Without /proc, no rank is known to run."""
    if flight.ended_s is not None or flight.host != socket.gethostname()[:63]:
        return False
    started_s = proc.started_s(flight.pid)
    # A process that began later only has the number of the rank's.
    return started_s is not None and started_s < flight.began_s + _CLOCK_S
