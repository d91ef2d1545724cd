"""Baselines to compare the greedy partitioner with: random, even and published placements, by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.plan.chain_cuts import ChainCutter
from hvpipe.plan.greedy import check_stages
from hvpipe.plan.pipelining import DEFAULT_PIPELINING, Pipelining
from hvpipe.plan.placement_cost import Placement, fits_memory
from hvpipe.plan.span_costs import Spans
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Cluster, Device
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile

# The most draws of random placements, to find one that fits the memory, and to find many.
_DRAWS, _MANY_DRAWS = 1000, 2000


def baseline(
    name: str,
    profile: Profile,
    cluster: Cluster,
    stages: int,
    pipelining: Pipelining = DEFAULT_PIPELINING,
    *,
    seed: int = 0,
) -> Plan:
    """Place a model with a baseline on the cluster's first devices, in their order.

    No baseline handles chunks: with "interleaved", the plan is for 1F1B on as many devices. `random` and
    `random_cuts` draw again until memory suffices. The others respect memory only as far as their authors
    define, so the plan may exceed it: see `Plan.shortages`.

    Args:
        name: One of `BASELINES`: "random", "random_cuts", "round_robin", "even", "pipedream",
            "m_topo" or "m_etf" (Jeon et al., SoCC 2020).
        profile: The model, with costs of one micro-batch.
        cluster: The devices and links.
        stages: Number of stages, as `partition` takes it.
        pipelining: Schedule and micro-batches.
        seed: Seed of the random baselines.

    Returns:
        The plan, with the baseline's name as its method.

    Raises:
        HvpipeError: If there is no such baseline, or `stages` is out of range.
        PlanError: If no random placement drawn fits the memory.

    Example:
        ```python
        even = forecast(baseline("even", profile, cluster, stages=4), profile, cluster)
        ```
    """
    devices, pipelining = _setting(name, profile, cluster, stages, pipelining)
    if not is_random(name):
        placement = BASELINES[name](profile, cluster, devices, random.Random(seed))
        used = [(devices, layers) for devices, layers in placement if layers]
        return Plan.of(profile, cluster, used, pipelining, name)
    for plan in _drawn(name, profile, cluster, devices, pipelining, random.Random(seed), _DRAWS):
        if plan is not None:
            return plan
    raise PlanError(
        f"None of {_DRAWS} random placements fits the memory of the devices; use another method. "
        f"Received: name={name!r}, stages={stages}, seed={seed}"
    )


def random_plans(
    name: str, profile: Profile, cluster: Cluster, stages: int, pipelining: Pipelining, seeds: range
) -> list[Plan]:
    """Return the plan of a random baseline for each seed, or for fewer if few placements fit the memory.

    All seeds together share a limited number of draws, so this ends soon even if hardly any placement fits.
    """
    devices, pipelining = _setting(name, profile, cluster, stages, pipelining)
    found: list[Plan] = []
    draws = _MANY_DRAWS
    for seed in seeds:
        for plan in _drawn(name, profile, cluster, devices, pipelining, random.Random(seed), draws):
            draws -= 1
            if plan is not None:
                found.append(plan)
                break
    return found


def is_random(name: str) -> bool:
    """Tell whether a baseline is random."""
    return name.startswith("random")


def _setting(
    name: str, profile: Profile, cluster: Cluster, stages: int, pipelining: Pipelining
) -> tuple[list[Device], Pipelining]:
    """Return a baseline's devices and pipelining; raise HvpipeError if it does not exist."""
    check_stages(profile, cluster, stages, pipelining)
    if name not in BASELINES:
        raise HvpipeError(f"A baseline should be one of {', '.join(BASELINES)}. Received: name={name!r}")
    if pipelining.chunks > 1:
        stages //= pipelining.chunks
        pipelining = replace(pipelining, schedule="1f1b", chunks=1)
    return list(cluster.devices[:stages]), pipelining


def _drawn(
    name: str,
    profile: Profile,
    cluster: Cluster,
    devices: list[Device],
    pipelining: Pipelining,
    generator: random.Random,
    draws: int,
) -> Iterator[Plan | None]:
    """Yield `draws` random plans, None for each that does not fit."""
    for _ in range(draws):
        placement = BASELINES[name](profile, cluster, devices, generator)
        used = [(names, layers) for names, layers in placement if layers]
        fits = fits_memory(profile, cluster, used, pipelining)
        yield Plan.of(profile, cluster, used, pipelining, name) if fits else None


def _random(profile: Profile, cluster: Cluster, devices: list[Device], generator: random.Random) -> Placement:
    """Place each layer on a random device, like placement by hand without a plan."""
    layers_of: list[list[int]] = [[] for _ in devices]
    for place in range(len(profile.layers)):
        layers_of[generator.randrange(len(devices))].append(place)
    return _named(devices, layers_of)


def _random_cuts(
    profile: Profile, cluster: Cluster, devices: list[Device], generator: random.Random
) -> Placement:
    """Cut consecutive layers at random places: a random pipeline."""
    count = len(profile.layers)
    ends = [0, *sorted(generator.sample(range(1, count), len(devices) - 1)), count]
    return _named(devices, [list(range(a, b)) for a, b in pairwise(ends)])


def _round_robin(
    profile: Profile, cluster: Cluster, devices: list[Device], generator: random.Random
) -> Placement:
    """Place layer i on device i modulo the number of devices."""
    count = len(profile.layers)
    return _named(devices, [list(range(first, count, len(devices))) for first in range(len(devices))])


def _even(profile: Profile, cluster: Cluster, devices: list[Device], generator: random.Random) -> Placement:
    """Place the same number of consecutive layers on each device, whatever they cost."""
    count = len(profile.layers)
    ends = [count * stage // len(devices) for stage in range(len(devices) + 1)]
    return _named(devices, [list(range(a, b)) for a, b in pairwise(ends)])


def _m_topo(profile: Profile, cluster: Cluster, devices: list[Device], generator: random.Random) -> Placement:
    """Fill the devices one after the other in topological order: m-TOPO of Baechi (Jeon et al., SoCC 2020).

    A device takes up to an even share of all layers' memory plus the largest layer's, within its own memory.
    The last device takes the rest. Trailing devices may stay empty.
    """
    sizes = [_resident_bytes(layer) for layer in profile.layers]
    share_bytes = sum(sizes) / len(devices) + max(sizes)
    layers_of: list[list[int]] = [[] for _ in devices]
    at, used_bytes = 0, 0
    for place, size in enumerate(sizes):
        if at + 1 < len(devices) and used_bytes + size > min(share_bytes, devices[at].room_bytes):
            at, used_bytes = at + 1, 0
        layers_of[at].append(place)
        used_bytes += size
    return _named(devices, layers_of)


def _m_etf(profile: Profile, cluster: Cluster, devices: list[Device], generator: random.Random) -> Placement:
    """Place the layer that can start earliest next: m-ETF of Baechi (Jeon et al., SoCC 2020).

    It follows ETF (Hwang et al., SIAM J. Computing, 1989). Of all layers with placed inputs and all devices
    with memory for them, it picks the pair whose forward starts earliest. The backward goes with the forward.
    If no device has memory, the one with the most left takes the layer.
    """
    waiting = [len(makers) for makers in profile.makers]
    ready = [place for place, count in enumerate(waiting) if count == 0]
    free_s, left_bytes = [0.0] * len(devices), [device.room_bytes for device in devices]
    home, done_s = [0] * len(waiting), [0.0] * len(waiting)

    def start_s(place: int, at: int) -> float:
        arrivals = (
            done_s[maker]
            + cluster.link(devices[home[maker]].name, devices[at].name).time_s(
                profile.edge_bytes[maker, place][0]
            )
            for maker in profile.makers[place]
        )
        return max(free_s[at], max(arrivals, default=0.0))

    while ready:
        choices = [
            (left_bytes[at] < _resident_bytes(profile.layers[place]), start_s(place, at), place, at)
            for place in ready
            for at in range(len(devices))
        ]
        full, begin_s, place, at = min(choices)
        if full:
            at = max(range(len(devices)), key=lambda at: left_bytes[at])
            begin_s = start_s(place, at)
        layer = profile.on(devices[at].type).layers[place]
        home[place] = at
        done_s[place] = free_s[at] = begin_s + layer.forward_s / devices[at].speed
        left_bytes[at] -= _resident_bytes(layer)
        ready.remove(place)
        for user in profile.users[place]:
            waiting[user] -= 1
            if waiting[user] == 0:
                ready.append(user)
    layers_of = [[place for place, where in enumerate(home) if where == at] for at in range(len(devices))]
    return _named(devices, layers_of)


def _pipedream(
    profile: Profile, cluster: Cluster, devices: list[Device], generator: random.Random
) -> Placement:
    """Minimise the largest of computing and sending of all stages: PipeDream (Narayanan et al., SOSP 2019).

    Devices stay in their order, and stages have no replicas. As in the paper, memory does not count.
    """
    groups = [(device.name,) for device in devices]
    ends = ChainCutter(profile, Spans(profile), cluster).cut(groups, None, "send")
    assert ends is not None
    return _named(devices, [list(range(*span)) for span in pairwise((0, *ends))])


BASELINES: dict[str, Callable[[Profile, Cluster, list[Device], random.Random], Placement]] = {
    "random": _random,
    "random_cuts": _random_cuts,
    "round_robin": _round_robin,
    "even": _even,
    "pipedream": _pipedream,
    "m_topo": _m_topo,
    "m_etf": _m_etf,
}
"""Every baseline by name."""


def _named(devices: list[Device], layers_of: list[list[int]]) -> Placement:
    return [((device.name,), layers) for device, layers in zip(devices, layers_of, strict=True)]


def _resident_bytes(layer: LayerCost) -> int:
    return layer.state_bytes + layer.saved_bytes
