"""CPU, its use, memory and network interfaces of this host, read with psutil."""

from __future__ import annotations

import ipaddress
import platform
import socket
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

# Classes in /sys/class. Omni-Path, RoCE and EFA cards are in "infiniband", Slingshot's in "cxi".
_FAST_NETWORKS = ("infiniband", "cxi")


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


def cpu_name() -> str:
    """Return the model of this host's CPU, as Linux names it, or its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.machine())


@dataclass(frozen=True)
class Interface:
    """An IPv4 address of a network interface.

    Args:
        name: Of the interface, such as "eth0".
        address: The address and its network, such as "10.0.0.1/24".
        up: Whether the interface is switched on.
        speed_mbit: What the driver says, in Mb/s; 0: unknown.
        between_two: Whether it leads to one other host, as tunnels do.
        physical: Whether it is a card, or several in a bond, and no bridge for containers.
    """

    name: str
    address: str
    up: bool = True
    speed_mbit: int = 0
    between_two: bool = False
    physical: bool = True

    @property
    def ip(self) -> str:
        """The address alone."""
        return str(ipaddress.ip_interface(self.address).ip)

    @property
    def network(self) -> str:
        """The network alone, such as "10.0.0.0/24"."""
        return str(ipaddress.ip_interface(self.address).network)


def interfaces() -> list[Interface]:
    """Return the IPv4 interfaces of this host, without loopback; [] without psutil."""
    try:
        import psutil
    except ImportError:
        return []
    try:
        states = psutil.net_if_stats()
    except OSError:  # a kernel that does not answer, as under some emulators
        states = {}
    found = []
    for label, addresses in psutil.net_if_addrs().items():
        name = label.partition(":")[0]  # of eth0:1
        state = states.get(name)
        for one in addresses:
            if one.family != socket.AF_INET or not one.netmask or one.address.startswith("127."):
                continue
            found.append(
                Interface(
                    name,
                    str(ipaddress.ip_interface(f"{one.address}/{one.netmask}")),
                    state is None or state.isup,
                    0 if state is None else state.speed,
                    "pointopoint" in getattr(state, "flags", ""),  # which psutil has from 5.9.3 on
                    any(Path("/sys/class/net", name, kind).exists() for kind in ("device", "bonding")),
                )
            )
    return found


def fast_network() -> str:
    """Return the name of a card of this host with which MPI is faster than TCP, or "" without one."""
    for kind in _FAST_NETWORKS:
        for card in sorted(Path("/sys/class", kind).glob("*")):
            return card.name
    return ""
