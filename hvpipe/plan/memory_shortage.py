"""Explains a lack of memory: how much is missing on which device, and what would make the model fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from hvpipe.errors import listed
from hvpipe.plan.device_orders import DeviceOrders
from hvpipe.plan.greedy_fill import BeamWidth, Cut, fill
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.placement_cost import fits_memory
from hvpipe.plan.span_costs import Spans
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile

_BREADTH = BeamWidth(sets=32, ends=3)


def any_fit(spans: Spans, orders: DeviceOrders) -> list[Cut] | None:
    """Return cuts whose memory suffices, however long they take; None if none are found."""
    for choices in orders.to_fit():
        if cuts := fill(spans, choices, math.inf, _BREADTH):
            return cuts
    return None


def least_memory_bytes(profile: Profile, cluster: Cluster, stages: int, pipelining: Pipelining) -> int:
    """Return the least memory that devices need for some plan of `stages` stages, whatever they have now.

    Greedy filling finds it, to 1 %. This is not a proof: a plan that needs less may exist.
    """
    without = (
        replace(host, devices=tuple(replace(device, memory_bytes=0) for device in host.devices))
        for host in cluster.hosts
    )
    plan = least_short(profile, replace(cluster, hosts=tuple(without)), stages, pipelining)
    return max(plan.memory_bytes.values())


def explain_shortage(plan: Plan, profile: Profile, cluster: Cluster) -> str:
    """Return the error message for a plan that does not fit: what is missing, where, and tried remedies."""
    stages, pipelining = len(plan.stages), plan.pipelining
    missing = say_missing(plan.shortages(cluster), plan.memory_bytes)
    remedies = list(_remedies(profile, cluster, stages, pipelining))
    return (
        f"The memory of every device should hold its stage. Received: stages={stages}, "
        f"schedule={pipelining.schedule!r}, microbatches={pipelining.microbatches} "
        f"of {profile.batch_size} samples; {missing}. "
        + (f"It would fit with {', or '.join(remedies)}." if remedies else "No remedy tried makes it fit.")
    )


def _fits(profile: Profile, cluster: Cluster, stages: int, pipelining: Pipelining) -> bool:
    orders = DeviceOrders(cluster, stages, pipelining)
    cuts = any_fit(Spans(profile), orders)
    return cuts is not None and fits_memory(profile, cluster, orders.placement(cuts), pipelining)


def least_short(profile: Profile, cluster: Cluster, stages: int, pipelining: Pipelining) -> Plan:
    """Return the plan that fits once every device has the same extra memory, as little as possible (to 1 %).

    It may even fit as it is: filling keeps only some of what it finds, and may find more with more memory.
    """
    spans = Spans(profile)
    names = [device.name for device in cluster.devices]

    def cuts_with(more_bytes: int) -> tuple[DeviceOrders, list[Cut] | None]:
        orders = DeviceOrders(with_more(cluster, dict.fromkeys(names, more_bytes)), stages, pipelining)
        return orders, any_fit(spans, orders)

    # Start at a thousandth of the memory: from a byte on, gigabytes would take dozens of fillings.
    low, high = 0, max(1, max(d.memory_bytes or 0 for d in cluster.devices) // 1000)
    while cuts_with(high)[1] is None:
        low, high = high, 2 * high
    while high - low > max(1, high // 100):
        middle = (low + high) // 2
        low, high = (middle, high) if cuts_with(middle)[1] is None else (low, middle)
    orders, cuts = cuts_with(high)
    assert cuts is not None
    return Plan.of(profile, cluster, orders.placement(cuts), pipelining, "greedy")


def with_more(cluster: Cluster, more_bytes: Mapping[str, int]) -> Cluster:
    """Return the cluster with more memory on devices that have a limit, by name; never below 0 bytes."""
    hosts = (
        replace(
            host,
            devices=tuple(
                d
                if d.memory_bytes is None
                else replace(d, memory_bytes=max(0, d.memory_bytes + more_bytes.get(d.name, 0)))
                for d in host.devices
            ),
        )
        for host in cluster.hosts
    )
    return replace(cluster, hosts=tuple(hosts))


def _remedies(profile: Profile, cluster: Cluster, stages: int, pipelining: Pipelining) -> Iterator[str]:
    """Yield remedies that make the model fit. Each was tried, with at least one micro-batch per device."""
    chunks = pipelining.chunks
    used, most = stages // chunks, min(len(cluster.devices), len(profile.layers) // chunks)

    def fits_on(more: int) -> bool:
        return _fits(profile, cluster, (used + more) * chunks, _enough(pipelining, used + more))

    if more := _least(most - used, fits_on):
        yield _stages_on(used + more, pipelining)
    else:
        yield from _more_devices(profile, cluster, pipelining)
    one_f = replace(pipelining, schedule="1f1b") if chunks == 1 else pipelining
    if pipelining.schedule == "gpipe" and _fits(profile, cluster, stages, one_f):
        yield 'schedule="1f1b"'
    for split in (2, 4, 8, 16, 32):
        if profile.batch_size % split == 0:
            count = pipelining.microbatches * split
            finer = replace(one_f, microbatches=count)
            if _fits(profile.at_batch(profile.batch_size // split), cluster, stages, finer):
                size = profile.batch_size // split
                yield f'{count} smaller micro-batches of {size} with schedule="{one_f.schedule}"'
                break
    again = replace(pipelining, recompute=True)
    if pipelining != again and _fits(profile, cluster, stages, again):
        yield "recompute=True"


def _more_devices(profile: Profile, cluster: Cluster, pipelining: Pipelining) -> Iterator[str]:
    """Yield how many devices like the largest would have to join; tries up to the present number, and 8."""
    roomiest = max(cluster.devices, key=lambda device: device.room_bytes)
    host = cluster.host_of(roomiest.name)
    now = len(cluster.devices)

    def fits_with(more: int) -> bool:
        joined = tuple(
            replace(host, name=f"+{i}", devices=(replace(roomiest, name=f"+{i}"),)) for i in range(more)
        )
        larger, devices = replace(cluster, hosts=cluster.hosts + joined), now + more
        return _fits(profile, larger, devices * pipelining.chunks, _enough(pipelining, devices))

    if more := _least(min(now + 8, len(profile.layers) // pipelining.chunks - now), fits_with):
        devices_more = f"{more} more device{'s' if more > 1 else ''}"
        yield f"{_stages_on(now + more, pipelining)} on {devices_more} like {roomiest.name}"


def _least(most: int, fits: Callable[[int], bool]) -> int | None:
    """Return the least number from 1 to `most` that fits, by doubling and bisecting; None if none does."""
    low, high = 0, 1
    while high < most and not fits(high):
        low, high = high, 2 * high
    high = min(high, most)
    if high <= low or not fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _enough(pipelining: Pipelining, devices: int) -> Pipelining:
    """Return the pipelining with at least as many micro-batches as devices: fewer are refused."""
    return replace(pipelining, microbatches=max(pipelining.microbatches, devices))


def _stages_on(devices: int, pipelining: Pipelining) -> str:
    more = f" and {devices} micro-batches" if devices > pipelining.microbatches else ""
    return f"{devices * pipelining.chunks} stages{more}"


def say_missing(missing_bytes: Mapping[str, int], needed_bytes: Mapping[str, int]) -> str:
    """Say how much memory each device that lacks some needs, and how much it may use."""

    def lack(name: str) -> str:
        needed, limit = needed_bytes[name], needed_bytes[name] - missing_bytes[name]
        needs, has = amount(needed), amount(limit)
        if needs == has:  # rounded, they would look equal
            needs, has = f"{needed:,} bytes", f"{limit:,} bytes"
        return f"{name}: needs {needs}, may use {has}"

    return listed(map(lack, missing_bytes), "; ")


def amount(size_bytes: int) -> str:
    """Format a size in bytes for a message, with 4 digits and the unit that fits."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= 10 * unit or (unit > 1e3 and size_bytes >= unit):
            scaled = size_bytes / unit
            return f"{scaled:,.0f} {name}" if scaled >= 1000 else f"{scaled:.4g} {name}"
    return f"{size_bytes:,} bytes"
