"""What Linux's /proc says about this host and its processes."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")
_EVERY = 32
# A thread's CPU clock: CPUCLOCK_PERTHREAD_MASK and CPUCLOCK_SCHED of the kernel's posix-timers_types.h.
_OF_A_THREAD = 0b110


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


class ThreadMeter:
    """Measures the cores that the threads of one name in this process keep busy between readings.

    Threads may begin and end. New ones are looked for when one has ended, and at every 32nd reading: to read
    the names of all threads takes some ms.
    """

    def __init__(self, name: str) -> None:
        """Take a name as Linux keeps it, of at most 15 characters."""
        self._name = name
        self._used_s: dict[int, float] = {}
        self._looks = 0
        self._at_s = time.monotonic()

    def look(self) -> float | None:
        """Return the cores busy since the last reading; None if it knew none of the threads."""
        now_s, before_s = time.monotonic(), self._at_s
        used_s = {thread: s for thread in self._used_s if (s := _used_s(thread)) is not None}
        busy_s = sum(s - self._used_s[thread] for thread, s in used_s.items())
        known = bool(used_s) and now_s > before_s
        self._looks += 1
        if len(used_s) < len(self._used_s) or self._looks % _EVERY == 1:
            new = {thread: _used_s(thread) for thread in self._found() if thread not in used_s}
            used_s |= {thread: s for thread, s in new.items() if s is not None}
        self._used_s, self._at_s = used_s, now_s
        return busy_s / (now_s - before_s) if known else None

    def _found(self) -> list[int]:
        """Return the kernel's numbers of all threads of this name."""
        found = []
        with suppress(OSError):  # no /proc, or a thread has ended meanwhile
            for thread in _THREADS.iterdir():
                with suppress(OSError):
                    if (thread / "comm").read_text().strip() == self._name:
                        found.append(int(thread.name))
        return found


def _used_s(thread: int) -> float | None:
    """Return the CPU time of a thread of this process; None if it has ended."""
    try:
        return time.clock_gettime(~thread << 3 | _OF_A_THREAD)
    except OSError:
        return None
