"""What the links of a place do: latency and bandwidth of a message, and the rate with both ways busy.

`measure` runs in the evaluation; each rank runs ``python -m bench.links --result FILE``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.cluster import Cluster
from bench.cluster_spec import ClusterError
from bench.link_rate import measure_two_way
from bench.places import Place, RealHosts

_TIMEOUT_S = 180.0
# Small ones tell the latency; large ones the bandwidth: a token bucket lets 256 KB pass at once.
_SIZES_BYTES = (1, 1 << 8, 1 << 12, 2 << 20, 8 << 20)


@dataclass(frozen=True)
class LinkFacts:
    """One link; None: not measured. A message of n bytes takes latency_s + 8 n / bits_per_s."""

    cluster: str
    first: str
    second: str
    set_bits_per_s: float | None  # what it was limited to
    latency_s: float | None = None
    bits_per_s: float | None = None
    two_way_bits_per_s: float | None = None  # each way, both ways busy
    tool: str = ""


def measure(place: Place, cluster: str, seconds: float = 2.0) -> list[LinkFacts]:
    """The links from the first host to every other one. ClusterError where ranks cannot meet."""
    hosts = place.spec.hosts
    fits = _ping_pongs(place)
    ranks = [host for host in hosts for _ in range(host.slots)]
    found = []
    for host in hosts[1:]:
        latency_s, bits_per_s = fits[ranks.index(host)]
        two_way = None
        if isinstance(place, Cluster):
            two_way = measure_two_way(place, hosts[0].name, host.name, seconds=seconds)
        found.append(
            LinkFacts(
                cluster,
                hosts[0].name,
                host.name,
                _slower(place, host.name),
                latency_s,
                bits_per_s,
                None if two_way is None else two_way.bits_per_s,
                "" if two_way is None else two_way.tool,
            )
        )
    return found


def _slower(place: Place, second: str) -> float | None:
    """The rate that the two ends of the link to that host are limited to."""
    if not isinstance(place, Cluster):
        return None
    ends = [host for host in place.spec.hosts if host.name in (place.spec.hosts[0].name, second)]
    return min((host.rate_bits_per_s for host in ends if host.rate_bits_per_s is not None), default=None)


def _ping_pongs(place: Place) -> dict[int, tuple[float, float | None]]:
    """Latency and bits per second between rank 0 and each other rank."""
    # Rank 0 may be on another host, which shares the current folder.
    shared = Path.cwd() if isinstance(place, RealHosts) else None
    with tempfile.TemporaryDirectory(prefix="hvpipe-links-", dir=shared) as directory:
        result = Path(directory) / "links.json"
        command = [sys.executable, "-m", "bench.links", "--result", str(result)]
        env = {"PYTHONPATH": str(Path(__file__).parents[1])}
        done = place.run(place.spec.slots, command, timeout_s=_TIMEOUT_S, env=env)
        if done.returncode != 0 or not result.exists():
            raise ClusterError(f"Links could not be measured: {(done.stderr or done.stdout)[-500:]}")
        return {int(rank): (fit[0], fit[1]) for rank, fit in json.loads(result.read_text()).items()}


def _bits_per_s(bytes_per_s: float) -> float | None:
    return bytes_per_s * 8 if math.isfinite(bytes_per_s) else None


def main() -> None:
    """A rank's part: every two ranks send each other messages of several sizes; rank 0 writes the fits."""
    import hvpipe
    from hvpipe.links import measure_links
    from hvpipe.session import current

    parser = argparse.ArgumentParser()
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    hvpipe.init()
    links = measure_links(current().engine, sizes_bytes=_SIZES_BYTES, repeats=3)
    if hvpipe.rank() == 0:
        fits = {
            second: (link.latency_s, _bits_per_s(link.bandwidth_bytes_per_s))
            for (first, second), link in links.items()
            if first == 0
        }
        arguments.result.write_text(json.dumps(fits))
    hvpipe.shutdown()


if __name__ == "__main__":
    main()
