"""What a process has used so far: CPU time, memory, bytes that its host sent. Read alike for every system."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_FACTS = Path("/sys/class/net")


@dataclass(frozen=True)
class Reading:
    """Totals of this process since it began. `sent_bytes` left its host over TCP/IP."""

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
    return Reading(cpu_s, peak_bytes(), sent_bytes())


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
