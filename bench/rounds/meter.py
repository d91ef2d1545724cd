"""What a process has used so far: CPU time, memory, bytes that its host sent. Read alike for every system."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_DEVICES = Path("/proc/self/net/dev")
_FACTS = Path("/sys/class/net")


@dataclass(frozen=True)
class Reading:
    """Totals of this process since it began. `sent_bytes` left its host over TCP/IP."""

    at_s: float  # time.time(), to compare with other processes
    cpu_s: float
    peak_bytes: int
    sent_bytes: int


def read() -> Reading:
    """Read the totals now. The peak is the kernel's; bytes are those of our network namespace."""
    return Reading(time.time(), time.process_time(), peak_bytes(), sent_bytes())


def peak_bytes() -> int:
    """Return the peak of resident memory since this program began; 0 without /proc."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def sent_bytes(devices: Path = _DEVICES, facts: Path = _FACTS) -> int:
    """Return the bytes that left this host since it started, with protocol headers; 0 without /proc.

    These are bytes over TCP/IP. The kernel does not count InfiniBand or shared memory.
    """
    lines = devices.read_text().splitlines()[2:] if devices.exists() else []
    sent = {name.strip(): int(numbers.split()[8]) for name, _, numbers in (li.partition(":") for li in lines)}
    return sum(sent[name] for name in leaving(list(sent), facts))


def leaving(names: Sequence[str], facts: Path = _FACTS) -> list[str]:
    """Return the interfaces through which bytes leave this host, each counted once.

    On hosts with network adapters these are the adapters, because bonds, bridges, tunnels and VLANs send
    through them. A network namespace has no adapters: there, they are all interfaces that send through no
    other and are no ports of a bridge.
    """
    others = [name for name in names if name != "lo"]
    known = {name: facts / name for name in others if _is_ours(name, facts / name)}
    adapters = [name for name, about in known.items() if (about / "device").exists()]
    return adapters or [name for name in others if name not in known or not _stacked(known[name])]


def _is_ours(name: str, about: Path) -> bool:
    """Return whether /sys describes the interface of our namespace. /sys may belong to another one."""
    try:
        return int((about / "ifindex").read_text()) == socket.if_nametoindex(name)
    except (OSError, ValueError):
        return False


def _stacked(about: Path) -> bool:
    """Return whether it is a bridge, a port of a bridge or bond, or sends through another interface."""
    return any((about / what).exists() for what in ("bridge", "master")) or any(about.glob("lower_*"))


def at(readings: Sequence[Reading], at_s: float) -> Reading:
    """Return the totals at a moment, interpolated between the readings around it."""
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
