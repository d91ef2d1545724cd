"""The optimum over all contiguous plans, by dynamic programming: a yardstick for the greedy partitioner."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.plan.device_orders import DeviceOrders
from hvpipe.plan.exact_skips import BranchAndBound, Effort, OrderBounds
from hvpipe.plan.greedy import check_stages
from hvpipe.plan.greedy_fill import Cut, DeviceChoices, UsedDevices
from hvpipe.plan.memory_shortage import explain_shortage, least_short
from hvpipe.plan.pipelining import DEFAULT_PIPELINING, Pipelining
from hvpipe.plan.span_costs import Spans, StageDevice, Vector
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile

# Larger problems would take minutes, or gigabytes.
MOST_LAYERS, _MOST_SETS, _MOST_ORDERS = 1000, 5000, 2000
# Layers that branch and bound visits at most: some seconds.
_EFFORT = 5_000_000


def exact(
    profile: Profile,
    cluster: Cluster,
    stages: int,
    pipelining: Pipelining = DEFAULT_PIPELINING,
    order: Sequence[str] | None = None,
) -> Plan:
    """Find the contiguous plan with the smallest possible bottleneck.

    It is a dynamic program over layers and sets of used devices. Devices of one kind (speed, memory) are
    interchangeable, so a set is a number of devices of each kind. If links differ, it goes through every
    order of the devices. It takes O(sets x kinds x layers^2) steps. If links differ and tensors may skip
    stages, it is a branch and bound (see `exact_skips`) that stops after some seconds.

    Args:
        profile: The model, at most 1000 layers, with costs of one micro-batch.
        cluster: The devices.
        stages: Number of stages, at most the number of devices and of layers.
        pipelining: Schedule and micro-batches; not "interleaved".
        order: Names of `stages` devices, in pipeline order; None for the best order.

    Returns:
        The plan, with method "exact". If branch and bound stopped before the end, the method says how far the
        bottleneck is from the optimum at most, such as "exact within 2.5%".

    Raises:
        HvpipeError: If the problem is too large, or `stages` or `order` is out of range.
        PlanError: If memory does not suffice; the message says where and what would fit.

    Example:
        ```python
        plan = exact(profile, cluster, stages=4)
        print(plan.bottleneck_s / partition(profile, cluster, stages=4).bottleneck_s)
        ```
    """
    check_stages(profile, cluster, stages, pipelining)
    _check_size(profile, pipelining)
    if profile.levelled(cluster) is not cluster:
        raise HvpipeError(
            "exact needs devices that differ by their speed only. "
            f"Received: types={sorted({device.type for device in cluster.devices} - {''})}"
        )
    spans = Spans(profile)
    orders = DeviceOrders(cluster, stages, pipelining)
    if orders.mixed and not _is_chain(profile):
        best, method = _with_skips(profile, spans, orders, order)
    else:
        best, method = _without_skips(spans, orders, order), "exact"
    if best is None:
        plan = least_short(profile, cluster, stages, pipelining)
        if order is not None and not plan.shortages(cluster):
            raise PlanError(
                "The memory of every device should hold its stage. In this order it does not, but another "
                f"order fits. Received: order={list(order)}"
            )
        raise PlanError(explain_shortage(plan, profile, cluster))
    placement = orders.placement(best)
    if order is not None:
        placement = [((name,), layers) for name, (_, layers) in zip(order, placement, strict=True)]
    return Plan.of(profile, cluster, placement, pipelining, method)


def _without_skips(spans: Spans, orders: DeviceOrders, order: Sequence[str] | None) -> list[Cut] | None:
    """Return the cuts of the optimum by the dynamic program, or None if memory does not suffice."""
    best_s, best = math.inf, None
    for choices in _device_choices(orders, order):
        found_s, cuts = _optimum(spans, choices)
        if found_s < best_s:
            best_s, best = found_s, cuts
    return best


def _with_skips(
    profile: Profile, spans: Spans, orders: DeviceOrders, order: Sequence[str] | None
) -> tuple[list[Cut] | None, str]:
    """Return the cuts that branch and bound finds, and the method, which says how good they are."""
    effort = Effort(_EFFORT)
    every = []
    for choices in _device_choices(orders, order):
        devices = [level[0] for level in choices.levels]
        every.append(OrderBounds(spans, devices, orders.links(tuple(device.kind for device in devices))))
    every.sort(key=lambda bounds: bounds.least_s)
    best_s, best, unproven_s = math.inf, None, math.inf
    search = BranchAndBound(profile, spans, effort)
    for bounds in every:
        if bounds.least_s >= best_s:
            break
        search.search(bounds, best_s)
        if search.best_ends:
            best_s, best = search.best_s, list(zip(bounds.devices, search.best_ends, strict=True))
        if effort.layers <= 0:
            unproven_s = min(unproven_s, bounds.least_s)
    if unproven_s >= best_s:
        return best, "exact"
    return best, f"exact within {math.ceil(1000 * (best_s / unproven_s - 1)) / 10:g}%"


def _is_chain(profile: Profile) -> bool:
    """Tell whether every tensor has its users in the next layer only, so that none can skip a stage."""
    return all(tensor.users == (tensor.maker + 1,) or not tensor.messages for tensor in profile.tensors)


def _check_size(profile: Profile, pipelining: Pipelining) -> None:
    """Refuse chunks, and more layers than the dynamic program can handle."""
    if pipelining.chunks > 1:
        raise HvpipeError(
            "exact needs a schedule with one stage on each device. "
            f"Received: schedule={pipelining.schedule!r}"
        )
    if len(profile.layers) > MOST_LAYERS:
        raise HvpipeError(
            f"exact handles at most {MOST_LAYERS} layers; use partition for more. "
            f"Received: layers={len(profile.layers)}"
        )


def _device_choices(orders: DeviceOrders, order: Sequence[str] | None) -> list[DeviceChoices]:
    """Return the choices to search one after the other; together they cover all orders asked for."""
    if order is not None:
        return [orders.of_names(order)]
    if not orders.mixed:
        if math.prod(count + 1 for count in orders.counts) > _MOST_SETS:
            raise HvpipeError(
                f"exact handles at most {_MOST_SETS} sets of devices; use partition for more. "
                f"Received: kinds of devices={orders.counts}"
            )
        return [orders.in_any_order]
    every = orders.all(_MOST_ORDERS)
    if every is None:
        raise HvpipeError(
            f"exact handles at most {_MOST_ORDERS} orders of devices if links differ; use partition "
            f"for more. Received: kinds of devices={orders.counts}"
        )
    return [orders.in_order(one) for one in every]


def _optimum(spans: Spans, choices: DeviceChoices) -> tuple[float, list[Cut]]:
    """Return the smallest bottleneck and its cuts; infinite if memory never suffices.

    best[s][used][end] is the smallest bottleneck of s stages on the used devices with the layers before
    `end`.
    """
    start = np.full(spans.count + 1, np.inf)
    start[0] = 0.0
    best: list[dict[UsedDevices, Vector]] = [{(0,) * len(choices.counts): start}]
    matrices = [_matrices(spans, level) for level in choices.levels]
    for level, costs_s in zip(choices.levels, matrices, strict=True):
        reached: dict[UsedDevices, Vector] = {}
        for used, before_s in best[-1].items():
            for device in level:
                now = _shift(used, device, +1)
                if now[device.kind] <= choices.counts[device.kind]:
                    through_s = np.maximum(before_s[:, None], costs_s[device]).min(axis=0)
                    reached[now] = np.minimum(reached.get(now, np.inf), through_s)
        best.append(reached)
    used = min(best[-1], key=lambda used: (best[-1][used][-1], used))
    optimum_s = float(best[-1][used][-1])
    return optimum_s, [] if math.isinf(optimum_s) else _trace_back(best, matrices, used)


def _trace_back(
    best: list[dict[UsedDevices, Vector]], matrices: list[dict[StageDevice, Vector]], used: UsedDevices
) -> list[Cut]:
    """Return the cuts of the optimum on the `used` devices, traced from the last stage back to the first."""
    end = len(best[0][min(best[0])]) - 1
    cuts: list[Cut] = []
    for stage in reversed(range(len(matrices))):
        options = []
        for device, costs_s in matrices[stage].items():
            before_s = best[stage].get(_shift(used, device, -1))
            if before_s is not None:
                through_s = np.maximum(before_s, costs_s[:, end])
                options.append((float(through_s.min()), device.kind, int(through_s.argmin()), device))
        _, _, start, device = min(options, key=lambda option: option[:3])
        cuts.append((device, end))
        used, end = _shift(used, device, -1), start
    return cuts[::-1]


def _shift(used: UsedDevices, device: StageDevice, by: int) -> UsedDevices:
    return (*used[: device.kind], used[device.kind] + by, *used[device.kind + 1 :])


def _matrices(spans: Spans, level: Sequence[StageDevice]) -> dict[StageDevice, Vector]:
    """Return the costs of all runs on each device: a row per start, a column per end."""
    matrices = {}
    for device in level:
        costs_s = np.full((spans.count + 1, spans.count + 1), np.inf)
        for start in range(spans.count):
            costs_s[start, start + 1 :] = spans.costs_s(start, spans.count, device)
        matrices[device] = costs_s
    return matrices
