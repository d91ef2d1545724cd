"""From measurements to figures: a link's latency and bandwidth, devices' speeds, and their cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from hvpipe.errors import HvpipeError
from hvpipe.specs.cluster import Cluster, Device, Host, Link
from hvpipe.specs.profile import Profile


@dataclass(frozen=True)
class RankFacts:
    """What a rank knows of its device: where it is, what the model took there, and its memory (None: any)."""

    host: str
    local_rank: int
    profile: Profile
    memory_bytes: int | None

    @property
    def device(self) -> str:
        return f"{self.host}:{self.local_rank}"


def fit_link(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> Link:
    """The latency and bandwidth that explain the times of messages of these sizes best.

    Least squares of the *relative* errors of latency + bytes / bandwidth (Hockney, 1994), so that small
    messages count as much as large ones. Neither figure is below 0; the bandwidth is unlimited where times do
    not grow with sizes. Times in seconds, above 0; at least two different sizes.
    """
    sizes = np.asarray(sizes_bytes, np.float64)
    times = np.asarray(times_s, np.float64)
    positive = sizes.shape == times.shape and bool(np.all(np.isfinite(times) & (times > 0)))
    if not positive or len(set(sizes.tolist())) < 2 or sizes.min() < 0:
        raise HvpipeError(
            "A link is fitted to times above 0 of messages of at least two sizes. "
            f"Received: sizes_bytes={list(sizes_bytes)}, times_s={list(times_s)}"
        )
    per_time = 1.0 / times
    seconds_per_byte, latency_s = _line(sizes, per_time)
    if latency_s < 0:
        latency_s, seconds_per_byte = 0.0, _multiple(sizes * per_time)
    elif seconds_per_byte < 0:
        latency_s, seconds_per_byte = _multiple(per_time), 0.0
    return Link(latency_s, 1.0 / seconds_per_byte if seconds_per_byte > 0 else math.inf)


def relative_speeds(profiles: Sequence[Profile]) -> tuple[float, ...]:
    """How fast each device ran the model, as multiples of the first: its total time over theirs.

    Layers count by the time that they take. The profiles are of one model, a device each.
    """
    first = profiles[0]
    for profile in profiles:
        if profile.fingerprint != first.fingerprint or profile.batch_size != first.batch_size:
            raise HvpipeError(
                "Speeds are compared on one model and batch size. Received: "
                f"{first.model or 'unnamed'} ({len(first.layers)} layers, batch {first.batch_size}) and "
                f"{profile.model or 'unnamed'} ({len(profile.layers)} layers, batch {profile.batch_size})"
            )
        if profile.compute_s == 0:
            raise HvpipeError(
                "Speeds are compared by times above 0. Received: a profile in which every layer takes 0 s"
            )
    return tuple(first.compute_s / profile.compute_s for profile in profiles)


def measured_cluster(ranks: Sequence[RankFacts], links: Mapping[tuple[int, int], Link]) -> Cluster:
    """The cluster that the ranks run on: a device HOST:LOCAL_RANK for each, of rank 0's speed or a multiple.

    `links` has one for every two ranks (a, b), a < b. A host's own `inner` and `link` are the worst measured
    on it and from it to others, for devices that somebody adds.
    """
    speeds = relative_speeds([facts.profile for facts in ranks])
    devices = [
        Device(facts.device, speed, facts.memory_bytes) for facts, speed in zip(ranks, speeds, strict=True)
    ]
    hosts = []
    for name in dict.fromkeys(facts.host for facts in ranks):
        here = {rank for rank, facts in enumerate(ranks) if facts.host == name}
        inner = _worst([link for pair, link in links.items() if here.issuperset(pair)])
        outer = _worst([link for pair, link in links.items() if len(here.intersection(pair)) == 1])
        hosts.append(Host(name, tuple(devices[rank] for rank in sorted(here)), outer, inner))
    measured = [(ranks[a].device, ranks[b].device, link) for (a, b), link in sorted(links.items())]
    return Cluster(tuple(hosts), tuple(measured))


def _worst(links: Sequence[Link]) -> Link:
    return reduce(Link.joined, links, Link())


def _line(sizes: np.ndarray, per_time: np.ndarray) -> tuple[float, float]:
    """Slope and start of the line through (size, time) with each point's error divided by its time."""
    # In units of the largest size, or the two columns differ by many orders of magnitude.
    unit = float(sizes.max())
    columns = np.stack([sizes / unit * per_time, per_time], axis=1)
    # Both columns are large where times are small; scaled, the solution stays accurate.
    scale = np.linalg.norm(columns, axis=0)
    (slope, start), *_ = np.linalg.lstsq(columns / scale, np.ones(len(sizes)), rcond=None)
    return float(slope / scale[0] / unit), float(start / scale[1])


def _multiple(column: np.ndarray) -> float:
    """The factor by which a column comes nearest to ones."""
    return math.fsum(column) / math.fsum(column * column)
