"""The greedy partitioner: the smallest bottleneck for which filling the devices in some order works."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.plan.device_orders import Order, Orders
from hvpipe.plan.greedy_fill import Breadth, Cut, Seats, fill
from hvpipe.plan.memory_shortage import any_fit, explain_shortage, least_short
from hvpipe.plan.pipelining import DEFAULT_PIPELINING, Pipelining
from hvpipe.plan.span_costs import Spans
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile

# The bottleneck is found to this precision, in at most so many halvings.
_TOLERANCE, _HALVINGS = 5e-4, 64
# What filling keeps: first to come near T quickly, then to improve on it; and where the order is fixed.
_BROADER = (Breadth(sets=4, ends=2), Breadth(sets=8, ends=4), Breadth(sets=48, ends=3))
_IN_ORDER = Breadth(sets=1, ends=8)
# A boundary is repaired by moving it by up to so many layers.
_REACH = 48
# With mixed links so many orders are all looked at.
_FEW_ORDERS = 720
# Of more, some are tried by exchanging devices, until so many stages were filled: filling takes as long as it
# has stages, and coming to the end with a better order takes so many fillings more.
_STAGES_FILLED, _REFINING = 4000, 24
# Links that differ by less than this share are as good as equal: so far do measured ones vary.
_ALIKE = 0.05


def partition(
    profile: Profile, cluster: Cluster, stages: int | None = None, pipelining: Pipelining = DEFAULT_PIPELINING
) -> Plan:
    """Cut the model into `stages` runs of consecutive layers, each on a device, with a small bottleneck.

    The profile's costs are those of one micro-batch. Without `stages`, all numbers of devices from 1 on are
    tried, and the smallest predicted step wins. Under "interleaved", `stages` is a multiple of the chunks,
    and the stages go round the devices in a circle. Equal arguments give equal plans.
    PlanError where memory does not suffice: it says how much is missing, where, and what would make it fit.
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
    found = (fitting(profile, cluster, count, pipelining, spans) for count in counts)
    plans = [plan for plan in found if plan is not None]
    if not plans:
        plan = least_short(profile, cluster, stages or most, pipelining)
        if plan.shortages(cluster):
            raise PlanError(explain_shortage(plan, profile, cluster))
        plans.append(plan)
    return min(plans, key=lambda plan: plan.step_s)


def fitting(
    profile: Profile, cluster: Cluster, stages: int, pipelining: Pipelining, spans: Spans | None = None
) -> Plan | None:
    """The plan of so many stages, a number that `check_stages` takes; None where none is found that fits.

    For who tries one number after the other: to say why nothing fits takes `partition` far longer than this.
    `spans` are the profile's, where they are at hand.
    """
    orders = Orders(cluster, stages, pipelining, _ALIKE)
    cuts = _search(spans or Spans(profile), orders)
    if cuts is None:
        return None
    return Plan.of(profile, cluster, orders.placement(cuts), pipelining, "greedy")


def check_stages(
    profile: Profile, cluster: Cluster, stages: int, pipelining: Pipelining = DEFAULT_PIPELINING
) -> None:
    """Refuse a number of stages that the model or the cluster does not have, or the schedule cannot run."""
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
    if chunks > 1 and (stages % chunks or stages // chunks > pipelining.microbatches):
        raise HvpipeError(
            "With schedule='interleaved', stages should be a multiple of chunks, and micro-batches at least "
            "as many as devices. "
            f"Received: stages={stages}, chunks={chunks}, microbatches={pipelining.microbatches}"
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
    """What the busiest of the stages takes."""
    return max(_times_s(spans, cuts))


def _busiest(spans: Spans, cuts: list[Cut]) -> int:
    """The number of the stage that takes the longest."""
    return int(np.argmax(_times_s(spans, cuts)))


def _times_s(spans: Spans, cuts: list[Cut]) -> list[float]:
    starts = [0, *(end for _, end in cuts)]
    return [spans.cost_s(start, end, seat) for start, (seat, end) in zip(starts, cuts, strict=False)]


def _search(spans: Spans, orders: Orders) -> list[Cut] | None:
    """The best cuts found over all orders of the devices; None where memory suffices in none."""
    cuts = any_fit(spans, orders)
    if cuts is None:
        return None
    if not orders.circle:
        for breadth in _BROADER[: 2 if orders.mixed else 3]:
            cuts = _improve(spans, orders.seats, cuts, breadth)
    return _search_orders(spans, orders, cuts) if orders.mixed or orders.circle else cuts


def _improve(spans: Spans, seats: Seats, cuts: list[Cut], breadth: Breadth) -> list[Cut]:
    """Bisect T below the bottleneck of `cuts`, then repair; again as long as that finds something.

    Greedy filling may fail at one T and work at a smaller one, so a little below the best is looked as well.
    """
    least_s = spans.compute_s[-1] / seats.fastest((0,) * len(seats.counts), seats.stages)
    for share in (1 - _TOLERANCE, 0.97):
        high_s = bottleneck_s(spans, cuts)
        found = fill(spans, seats, share * high_s, breadth)
        if found is None:
            continue
        cuts, low_s, high_s = found, least_s, bottleneck_s(spans, found)
        for _ in range(_HALVINGS):
            if high_s <= low_s * (1 + _TOLERANCE):
                break
            # Layers may take no time: the geometric mean with 0 would be 0 forever.
            middle_s = math.sqrt(low_s) * math.sqrt(high_s) or high_s / 2
            found = fill(spans, seats, middle_s, breadth)
            if found is None:
                low_s = middle_s
            else:
                cuts, high_s = found, bottleneck_s(spans, found)
    return _repair(spans, seats.devices, cuts)


def _repair(spans: Spans, devices: int, cuts: list[Cut]) -> list[Cut]:
    """Move the boundaries of the busiest stage while that makes it less busy than it was."""
    ends = [0, *(end for _, end in cuts)]
    seats = [seat for seat, _ in cuts]
    while True:
        if devices:
            cuts = _with_the_rest(spans, devices, list(zip(seats, ends[1:], strict=True)))
        costs = [spans.cost_s(ends[s], ends[s + 1], seat) for s, seat in enumerate(seats)]
        busiest = int(np.argmax(costs))
        moves = [
            (worst_s, boundary, end)
            for boundary in (busiest, busiest + 1)
            if 0 < boundary < len(seats)
            for worst_s, end in [_best_boundary(spans, cuts, ends, boundary)]
        ]
        # Sums of another length are rounded otherwise: that is no gain, and would go on forever.
        if not moves or min(moves)[0] >= costs[busiest] * (1 - 1e-9):
            return list(zip(seats, ends[1:], strict=True))
        _, boundary, ends[boundary] = min(moves)


def _with_the_rest(spans: Spans, devices: int, cuts: list[Cut]) -> list[Cut]:
    """The cuts of a circle, each seat with the memory that the other stages of its device leave it."""
    starts = [0, *(end for _, end in cuts)]
    sizes = [spans.memory_bytes(start, end, seat) for start, (seat, end) in zip(starts, cuts, strict=False)]
    held_bytes = [sum(sizes[first::devices]) for first in range(devices)]
    return [
        (replace(seat, memory_bytes=seat.memory_bytes - held_bytes[s % devices] + sizes[s]), end)
        for s, (seat, end) in enumerate(cuts)
    ]


def _best_boundary(spans: Spans, cuts: list[Cut], ends: list[int], boundary: int) -> tuple[float, int]:
    """Where between its neighbours a boundary makes the busier of its two stages the least busy."""
    before, here, behind = ends[boundary - 1 : boundary + 2]
    left, right = cuts[boundary - 1][0], cuts[boundary][0]
    first, last = max(before + 1, here - _REACH), min(behind - 1, here + _REACH)
    left_s = spans.costs_s(before, last, left)
    return min(
        (max(float(left_s[end - before - 1]), spans.cost_s(end, behind, right)), end)
        for end in range(first, last + 1)
    )


def _search_orders(spans: Spans, orders: Orders, cuts: list[Cut]) -> list[Cut]:
    """One order after the other: all if they are few; else from a few good ones by exchanging two devices.

    Where links differ, `cuts` were found with every device charged its slowest; neighbours on one host may
    do better. In a circle a device sits at several stages, which filling alone does not know.
    """
    order = orders.order_of(cuts)
    cuts = _seated(orders, order, cuts)
    for share in orders.shares:
        cuts = _improve(spans, orders.in_order(order, share), cuts, _IN_ORDER)
    every = orders.all(_FEW_ORDERS)
    for candidate in every if every is not None else [*orders.by_host(order), orders.by_memory()]:
        order, cuts = _better(spans, orders, candidate, order, cuts)
    return cuts if every is not None else _rearrange(spans, orders, order, cuts)


def _rearrange(spans: Spans, orders: Orders, order: Order, cuts: list[Cut]) -> list[Cut]:
    """Exchange two devices, or move one, as long as that helps and is within bounds."""
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
    """The order with two devices exchanged, those near the busiest first; then with one moved."""
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
    spans: Spans, orders: Orders, candidate: Order, order: Order, cuts: list[Cut]
) -> tuple[Order, list[Cut]]:
    """The candidate and its cuts if filling in that order beats `cuts`, else what was given."""
    limit_s = bottleneck_s(spans, cuts) * (1 - _TOLERANCE)
    if candidate == order or limit_s == 0:
        return order, cuts
    for share in sorted({orders.shares[0], 1.0}, reverse=True):
        seats = orders.in_order(candidate, share)
        if found := fill(spans, seats, limit_s, _IN_ORDER):
            return candidate, _improve(spans, seats, found, _IN_ORDER)
    return order, cuts


def _seated(orders: Orders, order: Order, cuts: list[Cut]) -> list[Cut]:
    levels = orders.in_order(order).levels
    return [(level[0], end) for level, (_, end) in zip(levels, cuts, strict=True)]
