"""The description of a virtual cluster: its hosts, the rates of their links and their CPU time; read from
TOML.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from bench.errors import ClusterError

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(bit|kbit|mbit|gbit)")
_UNIT_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_HOST_NAME = re.compile(r"[a-z][a-z0-9]{0,14}")
_HOST_KEYS = {"name", "rate", "cpus", "slots"}


def parse_rate(text: str) -> float | None:
    """Return bits per second for "300mbit" or "1gbit", and None for "unlimited"."""
    if text == "unlimited":
        return None
    match = _RATE.fullmatch(text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ClusterError(
            "A link rate must be a number above 0 with kbit, mbit or gbit, or 'unlimited'. "
            f"Received: rate={text!r}"
        )
    return float(match[1]) * _UNIT_BITS[match[2]]


def format_rate(bits_per_s: float | None) -> str:
    """Return the text that parse_rate reads, in the largest unit that keeps it at 1 or more."""
    if bits_per_s is None:
        return "unlimited"
    for unit in ("gbit", "mbit", "kbit"):
        if bits_per_s >= _UNIT_BITS[unit]:
            return f"{bits_per_s / _UNIT_BITS[unit]:g}{unit}"
    return f"{bits_per_s:g}bit"


@dataclass(frozen=True)
class HostSpec:
    """One host: its link's rate each way, its CPU time in cores and its ranks. None: no limit."""

    name: str
    rate_bits_per_s: float | None = None
    cpus: float | None = None
    slots: int = 1

    def __post_init__(self) -> None:
        if not _HOST_NAME.fullmatch(self.name) or self.name == "switch":
            raise ClusterError(
                "A host's name must be lower-case letters and digits, at most 15, starting with a letter, "
                f"and not 'switch'. Received: name={self.name!r}"
            )
        if self.cpus is not None and not self.cpus > 0:
            raise ClusterError(f"A host's CPU time must be above 0 cores. Received: cpus={self.cpus!r}")
        if self.slots < 1:
            raise ClusterError(f"A host must have at least one slot. Received: slots={self.slots!r}")


@dataclass(frozen=True)
class ClusterSpec:
    """The hosts of a virtual cluster. mpirun starts on the first one."""

    hosts: tuple[HostSpec, ...]

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not 1 <= len(names) <= 200:
            raise ClusterError(f"A cluster must have 1 to 200 hosts. Received: hosts={len(names)}")
        if len(set(names)) != len(names):
            raise ClusterError(f"Hosts' names must differ. Received: names={names}")

    @property
    def slots(self) -> int:
        """How many ranks fit."""
        return sum(host.slots for host in self.hosts)

    @property
    def slowest_rate_bits_per_s(self) -> float | None:
        """The rate that limits a ring through all hosts; None if no link is limited."""
        rates = [host.rate_bits_per_s for host in self.hosts if host.rate_bits_per_s is not None]
        return min(rates, default=None)

    def describe(self) -> str:
        """Describe the cluster in one line: 2 hosts: h0 300mbit, h1 300mbit 0.5 cpus."""
        parts = []
        for host in self.hosts:
            cpus = "" if host.cpus is None else f" {host.cpus:g} cpus"
            slots = "" if host.slots == 1 else f" {host.slots} slots"
            parts.append(f"{host.name} {format_rate(host.rate_bits_per_s)}{cpus}{slots}")
        return f"{len(self.hosts)} host{'s' if len(self.hosts) > 1 else ''}: {', '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """Return the spec as plain JSON types."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> ClusterSpec:
        """Return the spec that to_json wrote."""
        return ClusterSpec(tuple(HostSpec(**host) for host in data["hosts"]))


def equal_hosts(
    count: int, rate: str = "unlimited", *, cpus: float | None = None, slots: int = 1
) -> ClusterSpec:
    """Return a cluster of `count` equal hosts named h0, h1, ..."""
    bits_per_s = parse_rate(rate)
    return ClusterSpec(tuple(HostSpec(f"h{i}", bits_per_s, cpus, slots) for i in range(count)))


def read_spec(path: Path) -> ClusterSpec:
    """Read a cluster from TOML: an optional table [defaults], and one table [[host]] for each host."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ClusterError(
            f"A cluster's TOML file must be readable. Received: {path} ({error.strerror})"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{path} must be TOML. Received: {error}") from error
    defaults, tables = data.pop("defaults", {}), data.pop("host", [])
    if data or not isinstance(tables, list) or not tables:
        raise ClusterError(
            f"{path} must hold [[host]] tables and at most one [defaults]. "
            f"Received: keys={sorted(data) or tables}"
        )
    return ClusterSpec(tuple(_host(path, index, {**defaults, **table}) for index, table in enumerate(tables)))


def _host(path: Path, index: int, table: dict[str, Any]) -> HostSpec:
    unknown = sorted(set(table) - _HOST_KEYS)
    if unknown:
        raise ClusterError(
            f"{path}: a host has the keys {sorted(_HOST_KEYS)}. Received: {', '.join(unknown)}"
        )
    name, rate = table.get("name", f"h{index}"), table.get("rate", "unlimited")
    cpus, slots = table.get("cpus"), table.get("slots", 1)
    if not isinstance(name, str) or not isinstance(rate, str):
        raise ClusterError(f"{path}: name and rate must be text. Received: name={name!r}, rate={rate!r}")
    if not isinstance(slots, int) or not (cpus is None or isinstance(cpus, (int, float))):
        raise ClusterError(
            f"{path}: cpus and slots must be numbers. Received: cpus={cpus!r}, slots={slots!r}"
        )
    return HostSpec(name, parse_rate(rate), None if cpus is None else float(cpus), slots)


def add_spec_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a cluster, for every command that can bring one up."""
    parser.add_argument("--hosts", type=int, help="number of equal hosts, h0, h1, ...")
    parser.add_argument(
        "--rate", default="unlimited", help="rate of each link, e.g. 300mbit (default: unlimited)"
    )
    parser.add_argument(
        "--cpus", type=float, help="CPU time of each host in cores, e.g. 0.5 (default: no limit)"
    )
    parser.add_argument("--slots", type=int, default=1, help="ranks for each host (default: 1)")
    parser.add_argument(
        "--spec", type=Path, help="instead of --hosts: a TOML file with a [[host]] table for each host"
    )


def spec_from_arguments(arguments: argparse.Namespace) -> ClusterSpec:
    """Return the cluster that --spec or --hosts describes."""
    if arguments.spec is not None:
        if arguments.hosts is not None:
            raise ClusterError(
                f"Give --spec or --hosts. Received: spec={arguments.spec}, hosts={arguments.hosts}"
            )
        return read_spec(arguments.spec)
    return equal_hosts(
        2 if arguments.hosts is None else arguments.hosts,
        arguments.rate,
        cpus=arguments.cpus,
        slots=arguments.slots,
    )
