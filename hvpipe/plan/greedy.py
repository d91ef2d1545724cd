"""The greedy partitioner: finds by bisection the shortest stage time in which the devices can be filled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.plan.device_orders import DeviceOrders, Order
from hvpipe.plan.greedy_fill import BeamWidth, Cut, DeviceChoices, fill
from hvpipe.plan.memory_shortage import any_fit, explain_shortage, least_short, with_more
from hvpipe.plan.pipelining import DEFAULT_PIPELINING, Pipelining
from hvpipe.plan.span_costs import Spans
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile

# The relative precision of the bottleneck, and the most halvings to find it.
_TOLERANCE, _HALVINGS = 5e-4, 64
# Beam widths: narrow ones get near the best T fast, broader ones improve it. The last is for a fixed order.
_BROADER = (BeamWidth(sets=4, ends=2), BeamWidth(sets=8, ends=4), BeamWidth(sets=48, ends=3))
_IN_ORDER = BeamWidth(sets=1, ends=8)
# The most layers by which repairing moves a boundary.
_MOST_SHIFT = 48
# With mixed links, all orders are tried if there are no more.
_FEW_ORDERS = 720
# With more orders, some are tried by exchanging devices: how many stages are filled before the search ends (a
# filling takes time in proportion to its stages), and how many fillings refining a better order costs.
_STAGES_FILLED, _REFINING = 4000, 24
# How often a plan that lacks memory for what spans leave out is made anew with less memory.
_TRIES = 6
# Links that differ by less than this share count as equal: measured links vary as much.
_ALIKE = 0.05


def partition(
    profile: Profile, cluster: Cluster, stages: int | None = None, pipelining: Pipelining = DEFAULT_PIPELINING
) -> Plan:
    """Cut a model into stages for a cluster, so that the busiest stage takes little time.

    Every stage is a run of consecutive layers on one device. The greedy method bisects the time T of the
    busiest stage. For each T a beam search fills device after device, and prefers the longest run of layers
    that a device finishes in T (greedy_fill.py). Equal arguments give equal plans.

    Args:
        profile: The model, with costs of one micro-batch.
        cluster: The devices and links.
        stages: Number of stages; with "interleaved", a multiple of the chunks, and the stages go round the
            devices in a circle. None takes the number with the smallest predicted step, and leaves out
            numbers of devices that compute for longer.
        pipelining: Schedule, micro-batches, recomputation, chunks.

    Returns:
        The plan, with method "greedy".

    Raises:
        HvpipeError: If the model or the cluster does not have as many stages.
        PlanError: If memory does not suffice; the message says how much is missing, where, and what would
            fit.

    Example:
        ```python
        profile, cluster = Profile.read("profile.json"), Cluster.read("cluster.toml")
        plan = partition(profile, cluster, stages=4, pipelining=Pipelining("1f1b", microbatches=16))
        plan.write("plan.json")
        ```
    """
    chunks = pipelining.chunks
    most = min(len(cluster.devices), len(profile.layers) // chunks) * chunks
    if chunks > 1:
        most = min(most, pipelining.microbatches * chunks)
    least = -(-pipelining.least_stages // chunks) * chunks
    if stages is not None or least > most:
        check_stages(profile, cluster, least if stages is None else stages, pipelining)
    spans = Spans(profile)
    counts = range(least, most + 1, chunks) if stages is None else (stages,)
    best: Plan | None = None
    for count in reversed(counts):
        if best is not None and _least_step_s(spans, cluster, count // chunks, pipelining) > best.step_s:
            break  # fewer stages take longer still
        plan = fitting(profile, cluster, count, pipelining, spans)
        if plan is not None and (best is None or plan.step_s <= best.step_s):
            best = plan
    if best is None:
        best = least_short(profile, cluster, stages or most, pipelining)
        if best.shortages(cluster):
            raise PlanError(explain_shortage(best, profile, cluster))
    return best


def _least_step_s(spans: Spans, cluster: Cluster, devices: int, pipelining: Pipelining) -> float:
    """Return a bound on `Plan.step_s` on `devices` devices: if they compute alike, without transfers."""
    if any(device.type for device in cluster.devices):
        return 0.0
    speeds = sorted((device.speed for device in cluster.devices), reverse=True)[:devices]
    least_s = 1 / speeds[0] + (pipelining.microbatches - 1) / sum(speeds)
    return float(spans.compute_s[-1]) * least_s * (1 - 1e-9)


def fitting(
    profile: Profile, cluster: Cluster, stages: int, pipelining: Pipelining, spans: Spans | None = None
) -> Plan | None:
    """Return the greedy plan of `stages` stages, which `check_stages` accepts; None if no plan found fits.

    Use it to try many numbers of stages: `partition` takes far longer when nothing fits, to explain why.
    `spans` are the profile's, if the caller has them.
    """
    spans, usable = spans or Spans(profile), profile.levelled(cluster)
    for _ in range(_TRIES):
        orders = DeviceOrders(usable, stages, pipelining, _ALIKE)
        cuts = _search(spans, orders)
        if cuts is None:
            return None
        plan = Plan.of(profile, cluster, orders.placement(cuts), pipelining, "greedy")
        missing_bytes = plan.shortages(cluster)
        if not missing_bytes:
            return plan
        # Spans leave out what waits for tensors that skip stages: leave room for it.
        usable = with_more(usable, {name: -size for name, size in missing_bytes.items()})
    return None


def check_stages(
    profile: Profile, cluster: Cluster, stages: int, pipelining: Pipelining = DEFAULT_PIPELINING
) -> None:
    """Refuse a number of stages that the model, the cluster or the schedule does not allow."""
    if not 1 <= stages <= len(profile.layers):
        raise HvpipeError(
            "stages should be at least 1 and at most the number of layers, "
            f"{len(profile.layers)}. Received: stages={stages}"
        )
    if stages < pipelining.least_stages:
        raise PlanError(
            f"recompute should name stages from 0 to {stages - 1}. Received: recompute={pipelining.recompute}"
        )
    chunks = pipelining.chunks
    if chunks > 1 and stages % chunks == 0 and stages // chunks > pipelining.microbatches:
        raise HvpipeError(
            "With schedule='interleaved', microbatches should be at least the number of ranks, "
            f"{stages // chunks}. Received: microbatches={pipelining.microbatches}"
        )
    if chunks > 1 and stages % chunks:
        raise HvpipeError(
            "With schedule='interleaved', stages should be a multiple of chunks. "
            f"Received: stages={stages}, chunks={chunks}"
        )
    if chunks > 1 and stages > len(cluster.devices) * chunks:
        raise HvpipeError(
            f"stages should be at most {chunks} for each of {len(cluster.devices)} devices. "
            f"Received: stages={stages}"
        )
    if chunks == 1 and stages > len(cluster.devices):
        raise HvpipeError(
            f"stages should be at most the number of devices, {len(cluster.devices)}. "
            f"Received: stages={stages}"
        )


def bottleneck_s(spans: Spans, cuts: list[Cut]) -> float:
    """Return the seconds of the busiest stage."""
    return max(_times_s(spans, cuts))


def _busiest(spans: Spans, cuts: list[Cut]) -> int:
    """Return the number of the busiest stage."""
    return int(np.argmax(_times_s(spans, cuts)))


def _times_s(spans: Spans, cuts: list[Cut]) -> list[float]:
    """Return the seconds of each stage."""
    starts = [0, *(end for _, end in cuts)]
    return [spans.cost_s(start, end, device) for start, (device, end) in zip(starts, cuts, strict=False)]


def _search(spans: Spans, orders: DeviceOrders) -> list[Cut] | None:
    """Return the best cuts found over all orders of the devices; None if memory suffices in none."""
    cuts = any_fit(spans, orders)
    if cuts is None:
        return None
    if not orders.circle:
        for breadth in _BROADER[: 2 if orders.mixed else 3]:
            cuts = _improve(spans, orders.in_any_order, cuts, breadth)
    return _search_orders(spans, orders, cuts) if orders.mixed or orders.circle else cuts


def _improve(spans: Spans, choices: DeviceChoices, cuts: list[Cut], breadth: BeamWidth) -> list[Cut]:
    """Bisect T below the bottleneck of `cuts`, then repair the boundaries.

    Greedy filling may fail at one T and work at a smaller one, so bisect a second time from a little below
    the best.
    """
    least_s = spans.compute_s[-1] / choices.fastest((0,) * len(choices.counts), choices.stages)
    for share in (1 - _TOLERANCE, 0.97):
        high_s = bottleneck_s(spans, cuts)
        found = fill(spans, choices, share * high_s, breadth)
        if found is None:
            continue
        cuts, low_s, high_s = found, least_s, bottleneck_s(spans, found)
        for _ in range(_HALVINGS):
            if high_s <= low_s * (1 + _TOLERANCE):
                break
            # If layers take no time, the geometric mean with 0 would stay 0.
            middle_s = math.sqrt(low_s) * math.sqrt(high_s) or high_s / 2
            found = fill(spans, choices, middle_s, breadth)
            if found is None:
                low_s = middle_s
            else:
                cuts, high_s = found, bottleneck_s(spans, found)
    return _repair(spans, choices.devices, cuts)


def _repair(spans: Spans, devices: int, cuts: list[Cut]) -> list[Cut]:
    """Move a boundary of the busiest stage as long as that reduces the bottleneck."""
    ends = [0, *(end for _, end in cuts)]
    stage_devices = [device for device, _ in cuts]
    while True:
        if devices:
            cuts = _with_the_rest(spans, devices, list(zip(stage_devices, ends[1:], strict=True)))
        costs = [spans.cost_s(ends[s], ends[s + 1], device) for s, device in enumerate(stage_devices)]
        busiest = int(np.argmax(costs))
        moves = [
            (worst_s, boundary, end)
            for boundary in (busiest, busiest + 1)
            if 0 < boundary < len(stage_devices)
            for worst_s, end in [_best_boundary(spans, cuts, ends, boundary)]
        ]
        # Sums of different lengths round differently. Such a difference is no gain, and would repeat forever.
        if not moves or min(moves)[0] >= costs[busiest] * (1 - 1e-9):
            return list(zip(stage_devices, ends[1:], strict=True))
        _, boundary, ends[boundary] = min(moves)


def _with_the_rest(spans: Spans, devices: int, cuts: list[Cut]) -> list[Cut]:
    """Return the cuts of a circle, where each stage has the memory that other stages of its device leave."""
    starts = [0, *(end for _, end in cuts)]
    sizes = [
        spans.memory_bytes(start, end, device) for start, (device, end) in zip(starts, cuts, strict=False)
    ]
    held_bytes = [sum(sizes[first::devices]) for first in range(devices)]
    return [
        (replace(device, memory_bytes=device.memory_bytes - held_bytes[s % devices] + sizes[s]), end)
        for s, (device, end) in enumerate(cuts)
    ]


def _best_boundary(spans: Spans, cuts: list[Cut], ends: list[int], boundary: int) -> tuple[float, int]:
    """Return the best end of a boundary between its neighbours, after the time of its busier stage."""
    before, here, behind = ends[boundary - 1 : boundary + 2]
    left, right = cuts[boundary - 1][0], cuts[boundary][0]
    first, last = max(before + 1, here - _MOST_SHIFT), min(behind - 1, here + _MOST_SHIFT)
    left_s = spans.costs_s(before, last, left)
    return min(
        (max(float(left_s[end - before - 1]), spans.cost_s(end, behind, right)), end)
        for end in range(first, last + 1)
    )


def _search_orders(spans: Spans, orders: DeviceOrders, cuts: list[Cut]) -> list[Cut]:
    """Try orders of the devices: all if they are few, otherwise good ones and orders near them.

    If links differ, `cuts` were found with every device charged its slowest link; neighbours on one host may
    do better. In a circle, a device has several stages, which filling without an order does not know.
    """
    order = orders.order_of(cuts)
    cuts = _in_order(orders, order, cuts)
    for share in orders.shares:
        cuts = _improve(spans, orders.in_order(order, share), cuts, _IN_ORDER)
    every = orders.all(_FEW_ORDERS)
    for candidate in every if every is not None else [*orders.by_host(order), orders.by_memory()]:
        order, cuts = _better(spans, orders, candidate, order, cuts)
    return cuts if every is not None else _rearrange(spans, orders, order, cuts)


def _rearrange(spans: Spans, orders: DeviceOrders, order: Order, cuts: list[Cut]) -> list[Cut]:
    """Exchange two devices, or move one, as long as that helps and the budget of fillings lasts."""
    left = _STAGES_FILLED // orders.stages
    improved = True
    while improved:
        improved = False
        for candidate in _neighbours(order, _busiest(spans, cuts) % len(order)):
            if left <= 0:
                return cuts
            found, cuts = _better(spans, orders, candidate, order, cuts)
            left -= 1 if found == order else 1 + _REFINING
            if found != order:
                improved, order = True, found
                break
    return cuts


def _neighbours(order: Order, busiest: int) -> Iterator[Order]:
    """Yield the order with two devices exchanged, those near the busiest first; then with one moved."""
    tried = {order}
    places = sorted(range(len(order)), key=lambda place: abs(place - busiest))
    for one, other in combinations(places, 2):
        exchanged = list(order)
        exchanged[one], exchanged[other] = order[other], order[one]
        if tuple(exchanged) not in tried:
            tried.add(tuple(exchanged))
            yield tuple(exchanged)
    for one, other in permutations(places, 2):
        moved = [*order[:one], *order[one + 1 :]]
        moved.insert(other, order[one])
        if tuple(moved) not in tried:
            tried.add(tuple(moved))
            yield tuple(moved)


def _better(
    spans: Spans, orders: DeviceOrders, candidate: Order, order: Order, cuts: list[Cut]
) -> tuple[Order, list[Cut]]:
    """Return the candidate and its cuts if filling in that order beats `cuts`, else `order` and `cuts`."""
    limit_s = bottleneck_s(spans, cuts) * (1 - _TOLERANCE)
    if candidate == order or limit_s == 0:
        return order, cuts
    for share in sorted({orders.shares[0], 1.0}, reverse=True):
        choices = orders.in_order(candidate, share)
        if found := fill(spans, choices, limit_s, _IN_ORDER):
            return candidate, _improve(spans, choices, found, _IN_ORDER)
    return order, cuts


def _in_order(orders: DeviceOrders, order: Order, cuts: list[Cut]) -> list[Cut]:
    """Return the cuts with their devices charged the links of this order."""
    levels = orders.in_order(order).levels
    return [(level[0], end) for level, (_, end) in zip(levels, cuts, strict=True)]
