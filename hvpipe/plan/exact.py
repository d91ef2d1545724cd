"""The optimum over all contiguous plans by dynamic programming: what the greedy partitioner is judged by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.plan.device_orders import Orders
from hvpipe.plan.greedy import check_stages
from hvpipe.plan.greedy_fill import Cut, Seats, Used
from hvpipe.plan.memory_shortage import explain_shortage, least_short
from hvpipe.plan.pipelining import DEFAULT_PIPELINING, Pipelining
from hvpipe.plan.span_costs import Seat, Spans, Vector
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile

# More would take minutes, or gigabytes.
MOST_LAYERS, _MOST_SETS, _MOST_ORDERS = 1000, 5000, 2000


def exact(
    profile: Profile,
    cluster: Cluster,
    stages: int,
    pipelining: Pipelining = DEFAULT_PIPELINING,
    order: Sequence[str] | None = None,
) -> Plan:
    """The contiguous plan of `stages` stages with the smallest bottleneck there is.

    With `order` (names of devices) for the devices in this order; else over all orders, by how many devices
    of each kind are used, as those of one kind are interchangeable. With mixed links every order
    is gone through. O(sets x kinds x layers^2). PlanError where memory does not suffice.
    """
    check_stages(profile, cluster, stages, pipelining)
    if pipelining.chunks > 1:
        raise HvpipeError(
            "exact should be asked about schedules with one stage on each device. "
            f"Received: schedule={pipelining.schedule!r}"
        )
    if len(profile.layers) > MOST_LAYERS:
        raise HvpipeError(
            f"exact should be asked about at most {MOST_LAYERS} layers. "
            f"Received: layers={len(profile.layers)}"
        )
    spans = Spans(profile)
    orders = Orders(cluster, stages, pipelining)
    best_s, best = math.inf, None
    for seats in _all_seats(orders, order):
        found_s, cuts = _optimum(spans, seats)
        if found_s < best_s:
            best_s, best = found_s, cuts
    if best is None:
        plan = least_short(profile, cluster, stages, pipelining)
        if order is not None and not plan.shortages(cluster):
            raise PlanError(
                "The memory of every device should hold its stage in this order: in another it does. "
                f"Received: order={list(order)}"
            )
        raise PlanError(explain_shortage(plan, profile, cluster))
    placement = orders.placement(best)
    if order is not None:
        placement = [((name,), layers) for name, (_, layers) in zip(order, placement, strict=True)]
    return Plan.of(profile, cluster, placement, pipelining, "exact")


def _all_seats(orders: Orders, order: Sequence[str] | None) -> list[Seats]:
    if order is not None:
        return [orders.of_names(order)]
    if not orders.mixed:
        if math.prod(count + 1 for count in orders.counts) > _MOST_SETS:
            raise HvpipeError(
                f"exact should be asked about at most {_MOST_SETS} sets of devices. "
                f"Received: kinds of devices={orders.counts}"
            )
        return [orders.seats]
    every = orders.all(_MOST_ORDERS)
    if every is None:
        raise HvpipeError(
            f"exact should be asked about at most {_MOST_ORDERS} orders where links differ. "
            f"Received: kinds of devices={orders.counts}"
        )
    return [orders.in_order(one) for one in every]


def _optimum(spans: Spans, seats: Seats) -> tuple[float, list[Cut]]:
    """The smallest bottleneck and its cuts; infinite where memory never suffices.

    best[s][used][end] is the smallest bottleneck of s stages on these devices with the layers before `end`.
    """
    start = np.full(spans.count + 1, np.inf)
    start[0] = 0.0
    best: list[dict[Used, Vector]] = [{(0,) * len(seats.counts): start}]
    matrices = [_matrices(spans, level) for level in seats.levels]
    for level, costs_s in zip(seats.levels, matrices, strict=True):
        reached: dict[Used, Vector] = {}
        for used, before_s in best[-1].items():
            for seat in level:
                now = _shift(used, seat, +1)
                if now[seat.kind] <= seats.counts[seat.kind]:
                    through_s = np.maximum(before_s[:, None], costs_s[seat]).min(axis=0)
                    reached[now] = np.minimum(reached.get(now, np.inf), through_s)
        best.append(reached)
    used = min(best[-1], key=lambda used: (best[-1][used][-1], used))
    optimum_s = float(best[-1][used][-1])
    return optimum_s, [] if math.isinf(optimum_s) else _trace_back(best, matrices, used)


def _trace_back(best: list[dict[Used, Vector]], matrices: list[dict[Seat, Vector]], used: Used) -> list[Cut]:
    """The cuts of the optimum on the devices `used`: from the last stage to the first, where it came from."""
    end = len(best[0][min(best[0])]) - 1
    cuts: list[Cut] = []
    for stage in reversed(range(len(matrices))):
        ways = []
        for seat, costs_s in matrices[stage].items():
            before_s = best[stage].get(_shift(used, seat, -1))
            if before_s is not None:
                through_s = np.maximum(before_s, costs_s[:, end])
                ways.append((float(through_s.min()), seat.kind, int(through_s.argmin()), seat))
        _, _, start, seat = min(ways, key=lambda way: way[:3])
        cuts.append((seat, end))
        used, end = _shift(used, seat, -1), start
    return cuts[::-1]


def _shift(used: Used, seat: Seat, by: int) -> Used:
    return (*used[: seat.kind], used[seat.kind] + by, *used[seat.kind + 1 :])


def _matrices(spans: Spans, level: Sequence[Seat]) -> dict[Seat, Vector]:
    """For each seat the costs of all runs: a row for each start, a column for each end."""
    matrices = {}
    for seat in level:
        costs_s = np.full((spans.count + 1, spans.count + 1), np.inf)
        for start in range(spans.count):
            costs_s[start, start + 1 :] = spans.costs_s(start, spans.count, seat)
        matrices[seat] = costs_s
    return matrices
