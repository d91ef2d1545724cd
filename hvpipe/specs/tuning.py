"""Which all-reduce is the fastest, by size: what `hvpipe tune` writes, and HVPIPE_ALL_REDUCE reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvpipe.config_file import Document, Table
from hvpipe.errors import HvpipeError

ALGORITHMS = ("doubling", "halving", "ring", "mpi")
"""Of all-reduces over the network: csrc/collectives/algorithm.h."""

_CLOSE = 1.05
"""Another algorithm than at the size before must be faster by this factor."""


@dataclass(frozen=True)
class Tuning(Document):
    """The measurements of one cluster.

    Args:
        ranks: How many summed.
        network: What carried their data, as `carrier` names it.
        seconds: The median time of one all-reduce on the slowest rank, by its bytes and by algorithm.
    """

    ranks: int
    network: str
    seconds: Mapping[int, Mapping[str, float]]

    @property
    def algorithms(self) -> tuple[tuple[str, int], ...]:
        """The fastest algorithms, each with its largest array in bytes; 0 for the last one."""
        return fastest(self.seconds)

    def to_json(self) -> dict[str, Any]:
        rows = [{"bytes": size, "seconds": dict(each)} for size, each in sorted(self.seconds.items())]
        head = {"format": "hvpipe-tuning", "version": 1, "ranks": self.ranks, "network": self.network}
        return {**head, "all_reduce": rows}

    @staticmethod
    def from_json(document: Mapping[str, Any] | Table) -> Tuning:
        table = document if isinstance(document, Table) else Table(document, "a tuning")
        table.check_format("hvpipe-tuning", 1)
        table.allow(("format", "version", "ranks", "network", "all_reduce"))
        seconds: dict[int, dict[str, float]] = {}
        for row in table.tables("all_reduce"):
            row.allow(("bytes", "seconds"))
            times = row.table("seconds")
            times.allow(ALGORITHMS)
            size = row.integer("bytes", minimum=1)
            if size in seconds:
                raise HvpipeError(f"{table.place} should have each size once. Received: bytes={size} twice")
            seconds[size] = {name: times.number(name, above=0) for name in sorted(times.as_dict())}
        if not seconds or not all(seconds.values()):
            raise HvpipeError(f"{table.place} should have a time for each size, and at least one size")
        return Tuning(table.integer("ranks", minimum=2), table.name("network"), seconds)


def carrier(network: str, messages: str, hosts: int) -> str:
    """Return what carries data between ranks, from a World's `network` and `messages`, and if on one host."""
    by = f" ({messages})" if messages else ""
    return network.partition(",")[0] + by + (" on one host" if hosts == 1 else "")


def fastest(seconds: Mapping[int, Mapping[str, float]]) -> tuple[tuple[str, int], ...]:
    """Return the fastest algorithms by growing size, each with its largest array in bytes; 0 for the last."""
    found: list[tuple[str, int]] = []
    for size in sorted(seconds):
        each = seconds[size]
        best = min(each, key=each.__getitem__)
        if found and each.get(found[-1][0], float("inf")) <= _CLOSE * each[best]:
            best = found.pop()[0]
        found.append((best, size))
    return (*found[:-1], *((name, 0) for name, _ in found[-1:]))


def setting(algorithms: tuple[tuple[str, int], ...]) -> str:
    """Return algorithms as HVPIPE_ALL_REDUCE has them."""
    return ",".join(f"{name}:{size}" if size else name for name, size in algorithms)
