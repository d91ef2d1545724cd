"""The description of hosts: their links' rates, CPU time and ranks; of virtual ones, read from TOML."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bench.errors import BenchError
from hvpipe.config_file import Table, read_document

FOLDER = Path(__file__).parents[1] / "clusters"

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(bit|kbit|mbit|gbit)")
_UNIT_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_HOST_NAME = re.compile(r"[a-z][a-z0-9]{0,14}")
_EQUAL = re.compile(r"(\d+)x([\w.]+)")


def parse_rate(text: str) -> float | None:
    """Return bits per second for "300mbit" or "1gbit", and None for "unlimited"."""
    if text == "unlimited":
        return None
    match = _RATE.fullmatch(text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise BenchError(
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


@dataclass(frozen=True)
class ClusterSpec:
    """The hosts. mpirun starts on the first one."""

    hosts: tuple[HostSpec, ...]

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if not 1 <= len(names) <= 200:
            raise BenchError(f"A cluster must have 1 to 200 hosts. Received: hosts={len(names)}")
        if len(set(names)) != len(names):
            raise BenchError(f"Hosts' names must differ. Received: names={names}")

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


def equal_hosts(
    count: int, rate: str = "unlimited", *, cpus: float | None = None, slots: int = 1
) -> ClusterSpec:
    """Return a cluster of `count` equal hosts named h0, h1, ..."""
    bits_per_s = parse_rate(rate)
    return ClusterSpec(tuple(HostSpec(f"h{i}", bits_per_s, cpus, slots) for i in range(count)))


def read_spec(path: Path) -> ClusterSpec:
    """Read a cluster from TOML: an optional table [defaults], and one table [[host]] for each host."""
    whole = read_document(path)
    whole.allow(("defaults", "host"))
    common = {"rate": "unlimited", "slots": 1}
    common |= whole.table("defaults").as_dict() if whole.has("defaults") else {}
    hosts = []
    for index, given in enumerate(whole.tables("host")):
        table = Table({"name": f"h{index}", **common, **given.as_dict()}, given.place)
        table.allow(("name", "rate", "cpus", "slots"))
        cpus = table.number("cpus", above=0) if table.has("cpus") else None
        rate, name = parse_rate(table.text("rate")), table.text("name")
        if not _HOST_NAME.fullmatch(name) or name == "switch":
            raise BenchError(
                "A host's name must be lower-case letters and digits, at most 15, starting with a letter, "
                f"and not 'switch'. Received: name={name!r}"
            )
        hosts.append(HostSpec(name, rate, cpus, table.integer("slots", minimum=1)))
    return ClusterSpec(tuple(hosts))


def cluster_spec(name: str) -> ClusterSpec:
    """Return a virtual cluster by name.

    "2x300mbit" is two equal hosts on links of 300 Mb/s, "4xunlimited" is four hosts without limits. Other
    names are files in bench/clusters/.
    """
    if match := _EQUAL.fullmatch(name):
        return equal_hosts(int(match[1]), match[2])
    files = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
    if name not in files:
        raise BenchError(
            f"A cluster should be as 2x300mbit, one of {', '.join(files)}, or a TOML file, as in mine.toml. "
            f"Received: {name!r}"
        )
    return read_spec(files[name])


def named_cluster(text: str, folder: Path) -> tuple[str, ClusterSpec]:
    """Return a cluster's name in results, and its spec. A TOML file of the user's is relative to `folder`."""
    if text.endswith(".toml"):
        path = folder / text
        return path.name, read_spec(path)
    return text, cluster_spec(text)


def cores_of_rank(spec: ClusterSpec, cores: int) -> float:
    """Return the cores of each rank on the slowest host. Hosts share this machine's `cores`."""
    limits = [host.cpus / host.slots for host in spec.hosts if host.cpus is not None]
    return min([cores / spec.slots, *limits])
