"""Finds hosts that cannot be reached any more. Open MPI ends a job that loses a host, even with ULFM."""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hvpipe.commands.hosts import HostSlots
from hvpipe.environment.this_host import interfaces

_LIMIT_S = 10.0
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=8"


def is_this_host(name: str) -> bool:
    """Tell whether a name or an address is one of this machine."""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:  # a name that nobody resolves here: only the domain may differ from this host's
        return name.partition(".")[0] == socket.gethostname().partition(".")[0]
    own = {each.ip for each in interfaces()} if _binds_any_address() else None
    for family, kind, protocol, _, address in found:
        if own is not None and not (str(address[0]) in own or str(address[0]).startswith("127.")):
            continue
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)  # usually only an own address can be bound
            return True
    return False


def _binds_any_address() -> bool:
    """Tell whether sockets can be bound to addresses of other hosts, as hosts of keepalived allow it."""
    try:
        return Path("/proc/sys/net/ipv4/ip_nonlocal_bind").read_text().strip() != "0"
    except OSError:
        return False


def unreachable(hosts: Sequence[HostSlots], agent: str | None, limit_s: float = _LIMIT_S) -> list[str]:
    """Return the names of the hosts on which `true` does not run within `limit_s`. This host is not asked."""
    others = [host for host in hosts if not is_this_host(host.name)]
    return [name for name, code in on_hosts(others, agent, ["true"], limit_s).items() if code != 0]


def on_hosts(
    hosts: Sequence[HostSlots], agent: str | None, command: Sequence[str], limit_s: float
) -> dict[str, int]:
    """Run a command on hosts, all at once; return its exit codes by their names.

    Args:
        hosts: The hosts.
        agent: The program that reaches hosts; None for ssh.
        command: What runs there, with output that nobody reads.
        limit_s: The time limit.
    """
    asked = {
        host.name: subprocess.Popen(
            [
                "timeout",
                "-k",
                "1",
                f"{limit_s:g}",
                *shlex.split(agent or _SSH),
                host.name,
                shlex.join(command),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for host in hosts
    }
    return {name: process.wait() for name, process in asked.items()}
