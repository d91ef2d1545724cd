"""What psutil tells about this machine: how busy its processor is, and its network addresses."""

from __future__ import annotations

import socket
from types import ModuleType


class Processor:
    """psutil's counters since the last look; everything is None where psutil is missing."""

    def __init__(self) -> None:
        self._psutil: ModuleType | None
        try:
            import psutil
        except ImportError:
            self._psutil = None
            return
        self._psutil = psutil
        self._process = psutil.Process()
        self._process.cpu_percent(None)  # the first call only starts the clock
        psutil.cpu_percent(None)

    def look(self) -> tuple[float | None, float | None, int | None]:
        """Cores busy with this process, share of all cores busy, resident bytes."""
        if self._psutil is None:
            return None, None, None
        try:
            with self._process.oneshot():
                return (
                    self._process.cpu_percent(None) / 100,
                    self._psutil.cpu_percent(None) / 100,
                    self._process.memory_info().rss,
                )
        except (self._psutil.Error, OSError):
            return None, None, None


def interface_addresses() -> list[tuple[str, str]]:
    """Every IPv4 address of this machine with its netmask, but for loopback; empty without psutil."""
    try:
        import psutil
    except ImportError:
        return []
    return [
        (one.address, one.netmask)
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and one.netmask and not one.address.startswith("127.")
    ]
