"""The links between hosts: latency and bandwidth of a message, and the rate with both directions busy.

`measure` runs in the evaluation. Each rank runs ``python -m bench.hosts.links --result FILE``.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bench.cluster.link_rate import measure_two_way
from bench.cluster.spec import format_rate
from bench.cluster.virtual_cluster import VirtualCluster
from bench.errors import ClusterError
from bench.hosts.real_hosts import Hosts, RealHosts

_START_S = 120.0  # timeout for the ranks to meet
_UNKNOWN_BITS_PER_S = 100e6  # the least that a link without a limit is assumed to carry
# Small messages show the latency, large ones the bandwidth. A token bucket lets 256 KB pass at once: a
# message of a few KB takes time on a real link but none here, and would make the link look too fast.
_SIZES_BYTES = (1, 1 << 8, 2 << 20, 8 << 20)
_REPEATS = 3
_NEAR = 0.15  # by which a measured rate may differ from the set one
_MESSAGES = 2 * (2 + _REPEATS)  # of each size, there and back, including warm-up


@dataclass(frozen=True)
class LinkFacts:
    """One link. None means not measured, see `why`. n bytes take latency_s + 8 n / bits_per_s."""

    cluster: str
    first: str
    second: str
    set_bits_per_s: float | None  # its limit
    latency_s: float | None = None
    bits_per_s: float | None = None
    two_way_bits_per_s: float | None = None  # each way, with both directions busy
    why: str = ""

    @staticmethod
    def from_dict(data: dict[str, Any]) -> LinkFacts:
        """Read what asdict returned, perhaps through JSON. Older results have more keys."""
        names = {field.name for field in fields(LinkFacts)}
        return LinkFacts(**{key: value for key, value in data.items() if key in names})

    @property
    def keeps_its_limit(self) -> bool:
        """Whether the two-way rate is near the set one; True if one of them is unknown."""
        if self.set_bits_per_s is None or self.two_way_bits_per_s is None:
            return True
        return abs(self.two_way_bits_per_s / self.set_bits_per_s - 1) <= _NEAR


def measure(hosts: Hosts, cluster: str, seconds: float = 2.0) -> list[LinkFacts]:
    """Measure the links from the first host to every other one. ClusterError if ranks cannot meet.

    A host that accepts no other connections has no two-way rate.
    """
    named = hosts.spec.hosts
    ranks = [host for host in named for _ in range(host.slots)]
    firsts = [ranks.index(host) for host in named[1:]]
    fits = _ping_pongs(hosts, firsts)
    found = []
    for host, first in zip(named[1:], firsts, strict=True):
        latency_s, bits_per_s = fits[first]
        found.append(
            LinkFacts(
                cluster,
                named[0].name,
                host.name,
                _slower(hosts, host.name),
                latency_s,
                bits_per_s,
                _two_way(hosts, named[0].name, host.name, seconds),
            )
        )
    for link in found:
        if not link.keeps_its_limit:
            print(
                f"WARNING: {cluster}: the link from {link.first} to {link.second} is set to "
                f"{format_rate(link.set_bits_per_s)}, and carries {format_rate(link.two_way_bits_per_s)}. "
                "Results on this link do not reflect the stated rate.",
                file=sys.stderr,
            )
    return found


def _two_way(hosts: Hosts, first: str, second: str, seconds: float) -> float | None:
    try:
        return measure_two_way(hosts, first, second, seconds=seconds).bits_per_s
    except (ClusterError, OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"{first} to {second}: both ways at once not measured, {error}", file=sys.stderr)
        return None


def not_measured(hosts: Hosts, cluster: str, why: str) -> list[LinkFacts]:
    """Return the same links as not measured, so that they are not tried again for every group."""
    first, *others = hosts.spec.hosts
    return [LinkFacts(cluster, first.name, host.name, _slower(hosts, host.name), why=why) for host in others]


def _slower(hosts: Hosts, second: str) -> float | None:
    """Return the lower of the set rates at the two ends of the link to a host."""
    if not isinstance(hosts, VirtualCluster):
        return None
    ends = [host for host in hosts.spec.hosts if host.name in (hosts.spec.hosts[0].name, second)]
    return min((host.rate_bits_per_s for host in ends if host.rate_bits_per_s is not None), default=None)


def _ping_pongs(hosts: Hosts, peers: Sequence[int]) -> dict[int, tuple[float, float | None]]:
    """Return latency and bits per second between rank 0 and each peer, one after the other."""
    rate = hosts.spec.slowest_rate_bits_per_s or _UNKNOWN_BITS_PER_S
    timeout_s = _START_S + 2 * len(peers) * _MESSAGES * sum(_SIZES_BYTES) * 8 / rate
    # Rank 0 may be on another host, which shares the current folder.
    shared = Path.cwd() if isinstance(hosts, RealHosts) else None
    with tempfile.TemporaryDirectory(prefix="hvpipe-links-", dir=shared) as directory:
        result = Path(directory) / "links.json"
        command = [
            sys.executable,
            "-m",
            "bench.hosts.links",
            "--peers",
            *map(str, peers),
            "--result",
            str(result),
        ]
        env = {"PYTHONPATH": str(Path(__file__).parents[2])}
        done = hosts.run(hosts.spec.slots, command, timeout_s=timeout_s, env=env)
        if done.returncode != 0 or not result.exists():
            raise ClusterError(f"Links could not be measured: {(done.stderr or done.stdout)[-500:]}")
        return {int(rank): (fit[0], fit[1]) for rank, fit in json.loads(result.read_text()).items()}


def _bits_per_s(bytes_per_s: float) -> float | None:
    return bytes_per_s * 8 if math.isfinite(bytes_per_s) else None


def main() -> None:
    """Do a rank's part: rank 0 and each peer exchange messages of several sizes; rank 0 writes the fits."""
    import hvpipe
    from hvpipe.comm.link_probe import measure_links
    from hvpipe.session import current

    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=int, nargs="+", required=True, help="ranks that rank 0 is linked to")
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    hvpipe.init()
    pairs = [(0, peer) for peer in arguments.peers]
    links = measure_links(current().engine, sizes_bytes=_SIZES_BYTES, repeats=_REPEATS, pairs=pairs)
    if hvpipe.rank() == 0:
        fits = {
            second: (link.latency_s, _bits_per_s(link.bandwidth_bytes_per_s))
            for (_, second), link in links.items()
        }
        arguments.result.write_text(json.dumps(fits))
    hvpipe.shutdown()


if __name__ == "__main__":
    main()
