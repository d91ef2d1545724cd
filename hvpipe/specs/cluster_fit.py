"""Fits a cluster to measurements: latency and bandwidth of links, relative speeds of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from hvpipe.errors import HvpipeError
from hvpipe.specs.cluster import Cluster, Device, Host, Link
from hvpipe.specs.profile import Profile

_TOO_LATE = 1.25  # times as long as its link says: so late comes a large message after a burst


@dataclass(frozen=True)
class RankFacts:
    """The facts about a rank's device.

    Attributes:
        host: Its host.
        local_rank: Its number on the host.
        profile: What the rank measured.
        memory_bytes: None: no limit.
        kind: The model of the processor, such as "NVIDIA H100 PCIe".
    """

    host: str
    local_rank: int
    profile: Profile
    memory_bytes: int | None
    kind: str = ""

    @property
    def device(self) -> str:
        return f"{self.host}:{self.local_rank}"


def fit_link(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> Link:
    """Return the latency and bandwidth that best explain the measured times of messages.

    Minimises the squared *relative* errors of latency + bytes / bandwidth (Hockney, 1994), so small messages
    count as much as large ones. Neither figure is below 0. If times do not grow with sizes, the bandwidth is
    unlimited.

    Args:
        sizes_bytes: Message sizes; at least two different ones.
        times_s: The measured seconds of each message, above 0.

    Returns:
        The fitted link.

    Raises:
        HvpipeError: If lengths differ, a time is not above 0, or all sizes are equal.
    """
    sizes = np.asarray(sizes_bytes, np.float64)
    times = np.asarray(times_s, np.float64)
    positive = sizes.shape == times.shape and bool(np.all(np.isfinite(times) & (times > 0)))
    if not positive or len(set(sizes.tolist())) < 2 or sizes.min() < 0:
        raise HvpipeError(
            "A link fit needs times above 0 for messages of at least two sizes. "
            f"Received: sizes_bytes={list(sizes_bytes)}, times_s={list(times_s)}"
        )
    per_time = 1.0 / times
    seconds_per_byte, latency_s = _line(sizes, per_time)
    if latency_s < 0:
        latency_s, seconds_per_byte = 0.0, _multiple(sizes * per_time)
    elif seconds_per_byte < 0:
        latency_s, seconds_per_byte = _multiple(per_time), 0.0
    return Link(latency_s, 1.0 / seconds_per_byte if seconds_per_byte > 0 else math.inf)


def sustained(link: Link, sizes_bytes: tuple[float, float], times_s: tuple[float, float]) -> Link:
    """Return the link with the bandwidth of long transfers, if a burst at full speed has hidden it.

    Some limited links (token buckets) let a burst pass at full speed. No straight line fits their times. So
    if a large message takes over a quarter longer than `link` says, two that are larger than a burst give
    the bandwidth.

    Args:
        link: What `fit_link` returned.
        sizes_bytes: The sizes of two large messages, ascending.
        times_s: Their measured seconds, on ranks that do nothing else.
    """
    (less, more), (sooner_s, later_s) = sizes_bytes, times_s
    if later_s <= _TOO_LATE * link.time_s(more) or later_s <= sooner_s:
        return link
    found = (more - less) / (later_s - sooner_s)
    return replace(link, bandwidth_bytes_per_s=min(link.bandwidth_bytes_per_s, found))


def relative_speeds(profiles: Sequence[Profile]) -> tuple[float, ...]:
    """Return each device's speed relative to the first: the first one's total compute time over its own.

    `profiles` has one profile for each device, all of the same model and batch size.
    """
    first = profiles[0]
    for profile in profiles:
        if profile.fingerprint != first.fingerprint or profile.batch_size != first.batch_size:
            raise HvpipeError(
                "Profiles should be of one model and batch size to compare speeds. Received: "
                f"{first.model or 'unnamed'} ({len(first.layers)} layers, batch {first.batch_size}) and "
                f"{profile.model or 'unnamed'} ({len(profile.layers)} layers, batch {profile.batch_size})"
            )
        if profile.compute_s == 0:
            raise HvpipeError(
                "Profiles should have times above 0 to compare speeds. Received: every layer takes 0 s"
            )
    return tuple(first.compute_s / profile.compute_s for profile in profiles)


def measured_cluster(
    ranks: Sequence[RankFacts], links: Mapping[tuple[int, int], Link], action_s: float = 0.0
) -> Cluster:
    """Return the cluster that the ranks run on, with a device HOST:LOCAL_RANK for each rank.

    Speeds are relative to rank 0; a device of another kind than rank 0's has it as its type. `links` has a
    measured link for each pair of ranks (a, b) with a < b. A host's `inner` and `link` are the worst measured
    inside it and from it to others; they apply to devices added later.
    """
    speeds = relative_speeds([facts.profile for facts in ranks])
    devices = [
        Device(facts.device, speed, facts.memory_bytes, "" if facts.kind == ranks[0].kind else facts.kind)
        for facts, speed in zip(ranks, speeds, strict=True)
    ]
    hosts = []
    for name in dict.fromkeys(facts.host for facts in ranks):
        here = {rank for rank, facts in enumerate(ranks) if facts.host == name}
        inner = _worst([link for pair, link in links.items() if here.issuperset(pair)])
        outer = _worst([link for pair, link in links.items() if len(here.intersection(pair)) == 1])
        hosts.append(Host(name, tuple(devices[rank] for rank in sorted(here)), outer, inner))
    measured = [(ranks[a].device, ranks[b].device, link) for (a, b), link in sorted(links.items())]
    return Cluster(tuple(hosts), tuple(measured), action_s=action_s)


def profile_of_kinds(ranks: Sequence[RankFacts]) -> Profile:
    """Return rank 0's profile, with `time_s` for each other kind of device, by the first rank that has it.

    A device's speed in the cluster says how fast it runs the whole model. So these times are scaled to take
    as long in all as those of rank 0: they say only which layers suit the device.
    """
    mine = ranks[0].profile
    first = {facts.kind: facts.profile for facts in reversed(ranks) if facts.kind != ranks[0].kind}
    speeds = {kind: relative_speeds([mine, profile])[1] for kind, profile in first.items()}
    layers = []
    for place, layer in enumerate(mine.layers):
        there = {kind: profile.layers[place] for kind, profile in sorted(first.items())}
        times_s = {
            kind: (one.forward_s * speeds[kind], one.backward_s * speeds[kind]) for kind, one in there.items()
        }
        layers.append(replace(layer, time_s={**layer.time_s, **times_s}))
    return replace(mine, layers=tuple(layers))


def _worst(links: Sequence[Link]) -> Link:
    return reduce(Link.joined, links, Link())


def _line(sizes: np.ndarray, per_time: np.ndarray) -> tuple[float, float]:
    """Fit a line through (size, time), each point's error divided by its time; return slope and intercept."""
    # Sizes count in units of the largest; otherwise the two columns differ by many orders of magnitude.
    unit = float(sizes.max())
    columns = np.stack([sizes / unit * per_time, per_time], axis=1)
    # Both columns are large where times are small; scaled, the solution stays accurate.
    scale = np.linalg.norm(columns, axis=0)
    (slope, start), *_ = np.linalg.lstsq(columns / scale, np.ones(len(sizes)), rcond=None)
    return float(slope / scale[0] / unit), float(start / scale[1])


def _multiple(column: np.ndarray) -> float:
    """Return the factor that brings a column nearest to ones, by least squares."""
    return math.fsum(column) / math.fsum(column * column)
