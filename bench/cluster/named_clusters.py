"""Virtual clusters by name.

"2x300mbit" is two equal hosts on links of 300 Mb/s, "4xunlimited" is four hosts without limits. Other names
are files in bench/clusters/. A name such as "mine.toml" is a file of the user's own.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench.cluster.spec import ClusterSpec, equal_hosts, read_spec
from bench.errors import ClusterError

FOLDER = Path(__file__).parents[1] / "clusters"
_EQUAL = re.compile(r"(\d+)x([\w.]+)")


def cluster_spec(name: str) -> ClusterSpec:
    """Return the virtual cluster of that name."""
    if match := _EQUAL.fullmatch(name):
        return equal_hosts(int(match[1]), match[2])
    files = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
    if name not in files:
        raise ClusterError(
            f"A cluster should be as 2x300mbit, one of {', '.join(files)}, or a TOML file, as in mine.toml. "
            f"Received: {name!r}"
        )
    return read_spec(files[name])


def named_cluster(text: str, folder: Path) -> tuple[str, ClusterSpec]:
    """Return a cluster's name in results, and its spec. A TOML file is relative to `folder`."""
    if text.endswith(".toml"):
        path = folder / text
        return path.name, read_spec(path)
    return text, cluster_spec(text)


def cores_of_rank(spec: ClusterSpec, cores: int) -> float:
    """Return the cores of each rank on the slowest host. Hosts share this machine's `cores`."""
    limits = [host.cpus / host.slots for host in spec.hosts if host.cpus is not None]
    return min([cores / spec.slots, *limits])
