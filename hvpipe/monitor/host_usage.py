"""CPU use, memory and network addresses of this host, read with psutil."""

from __future__ import annotations

import socket
from types import ModuleType


class CpuMeter:
    """Measures CPU use between readings. Without psutil every reading is None."""

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
        """Return the cores that this process keeps busy, the busy share of all cores, and resident bytes."""
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
    """Return the IPv4 addresses of this host with their netmasks, without loopback; [] without psutil."""
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
