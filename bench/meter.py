"""What a process has used so far, read the same way for every system: CPU time, memory, bytes of its host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reading:
    """Totals of this process since it began; `sent_bytes` of all its host's interfaces but loopback."""

    at_s: float  # time.time(), for comparing with other processes
    cpu_s: float
    peak_bytes: int
    sent_bytes: int


def read() -> Reading:
    """Look now. The high-water mark is the kernel's; bytes are those of the network namespace we are in."""
    return Reading(time.time(), time.process_time(), peak_bytes(), sent_bytes())


def peak_bytes() -> int:
    """Resident memory, the most since this program began; 0 where /proc does not say."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def sent_bytes() -> int:
    """Bytes that left this host since it is up, protocol headers included; 0 where /proc does not say."""
    devices = Path("/proc/self/net/dev")
    total = 0
    for line in devices.read_text().splitlines()[2:] if devices.exists() else ():
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            total += int(numbers.split()[8])
    return total


def at(readings: Sequence[Reading], at_s: float) -> Reading:
    """The totals at a moment, on the line between the readings around it."""
    if not readings:
        raise ValueError("Totals at a moment need readings. Received: none")
    before = max((r for r in readings if r.at_s <= at_s), key=lambda r: r.at_s, default=readings[0])
    after = min((r for r in readings if r.at_s >= at_s), key=lambda r: r.at_s, default=readings[-1])
    span_s = after.at_s - before.at_s
    part = (at_s - before.at_s) / span_s if span_s > 0 else 0.0
    return Reading(
        at_s,
        before.cpu_s + part * (after.cpu_s - before.cpu_s),
        after.peak_bytes,
        round(before.sent_bytes + part * (after.sent_bytes - before.sent_bytes)),
    )
