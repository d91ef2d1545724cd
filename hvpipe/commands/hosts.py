"""The hosts of a job and their slots, from --hosts or a hostfile."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hvpipe.errors import LaunchError

# Programs take a name that begins with a dash for an option, and some options of ssh run a command.
_NAME = re.compile(r"(?:[a-zA-Z0-9_][\w.-]*@)?[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,252}", re.ASCII)


@dataclass(frozen=True)
class HostSlots:
    """A host and the number of ranks that it takes."""

    name: str
    slots: int

    def __post_init__(self) -> None:
        """Refuse a name that ssh or mpirun would take for an option, or for more than a name."""
        if not _NAME.fullmatch(self.name):
            raise LaunchError(
                "A host should be a name or an address, of letters, digits, dots, dashes and underscores. It "
                f"begins with no dash, as in node-1.example or user@node-1. Received: {self.name!r}"
            )


def parse_hosts(text: str) -> tuple[HostSlots, ...]:
    """Parse --hosts, such as "a:2,b:2". A host without a number takes one rank."""
    hosts = []
    for item in text.split(","):
        name, colon, count = item.strip().partition(":")
        if not name or not re.fullmatch(r"[1-9]\d*", count if colon else "1"):
            raise LaunchError(
                f"--hosts should be host:slots,host:slots, as in a:2,b:2. Received: --hosts {text!r}"
            )
        hosts.append(HostSlots(name, int(count or 1)))
    if len({host.name for host in hosts}) < len(hosts):
        raise LaunchError(f"--hosts should name each host once. Received: --hosts {text!r}")
    return tuple(hosts)


def parse_hostfile(text: str, name: str) -> tuple[HostSlots, ...]:
    """Parse a hostfile of mpirun: one host per line, as "a slots=2", "a:2" or "a". `#` starts a comment.

    A host without a number takes one rank. Lines of the same host, as batch systems write, add up.

    Args:
        text: The content of the file.
        name: The name of the file, for messages.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        host = line.partition("#")[0].strip()
        if not host:
            continue
        # Open MPI's max_slots is never less than slots, and hvpipe starts no more ranks than slots.
        found = re.fullmatch(
            r"([^\s:=,]+)(?:(?::|\s+slots\s*=\s*)([1-9]\d*))?(?:\s+max[-_]slots\s*=\s*\d+)?", host
        )
        if found is None:
            raise LaunchError(
                "Each line of --hostfile should be a host, host:slots or host slots=N. "
                f"Received: {line.strip()!r} on line {number} of {name}"
            )
        slots[found[1]] = slots.get(found[1], 0) + int(found[2] or 1)
    if not slots:
        raise LaunchError(f"--hostfile names no host: {name} should have one per line")
    return tuple(HostSlots(*both) for both in slots.items())
