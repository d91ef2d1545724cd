"""What a process has used so far: CPU time, memory, bytes that its host sent. Read alike for every system."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_FACTS = Path("/sys/class/net")


@dataclass(frozen=True)
class Reading:
    """Totals of this process since it began. `sent_bytes` left its host over TCP/IP."""

    at_s: float  # time.time(), to compare with other processes
    cpu_s: float
    peak_bytes: int
    sent_bytes: int


def read(helper: int | None = None) -> Reading:
    """Read the totals now, with the CPU time of a `helper` process.

    The peak is the kernel's; bytes are those of our network namespace.
    """
    cpu_s = time.process_time()
    if helper is not None:
        used = psutil.Process(helper).cpu_times()
        cpu_s += used.user + used.system
    return Reading(time.time(), cpu_s, peak_bytes(), sent_bytes())


def peak_bytes() -> int:
    """Return the peak of resident memory since this program began; 0 without /proc."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def sent_bytes(facts: Path = _FACTS) -> int:
    """Return the bytes that left this host since it started, with protocol headers.

    These are bytes over TCP/IP. The kernel does not count InfiniBand or shared memory. Where there are
    network adapters only they count, because bonds, bridges and tunnels send through them.
    """
    counted = psutil.net_io_counters(pernic=True, nowrap=False)
    sent = {name: each.bytes_sent for name, each in counted.items() if name != "lo"}
    adapters = [name for name in sent if (facts / name / "device").exists()]
    return sum(sent[name] for name in adapters or sent)


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
