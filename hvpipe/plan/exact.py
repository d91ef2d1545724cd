"""The optimum over all contiguous plans, by dynamic programming: a yardstick for the greedy partitioner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.plan.device_orders import DeviceOrders
from hvpipe.plan.exact_skips import BranchAndBound, Effort, OrderBounds
from hvpipe.plan.greedy import check_stages, fitting
from hvpipe.plan.greedy_fill import Cut, DeviceChoices, UsedDevices
from hvpipe.plan.memory_shortage import explain_shortage, least_short
from hvpipe.plan.pipelining import DEFAULT_PIPELINING, Pipelining
from hvpipe.plan.span_costs import ABOVE, Spans, StageDevice, Vector
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile

# Larger problems would take minutes, or gigabytes: sets of devices times layers, and orders of devices.
_MOST_STATES, _MOST_ORDERS = 5_000_000, 2000
# Layers that branch and bound visits at most: some seconds.
_EFFORT = 5_000_000
# The optimum is first sought below the bottleneck of the greedy plan, then below these multiples of it.
_LIMITS = (1.0, 2.0, 8.0, math.inf)


def exact(
    profile: Profile,
    cluster: Cluster,
    stages: int,
    pipelining: Pipelining = DEFAULT_PIPELINING,
    order: Sequence[str] | None = None,
) -> Plan:
    """Find the contiguous plan with the smallest possible bottleneck.

    It is a dynamic program over layers and sets of used devices. Devices of one kind (speed, memory, type)
    are interchangeable, so a set is a number of devices of each kind. If links differ, it goes through every
    order of the devices. It leaves out runs of layers that take longer than the greedy plan's bottleneck. If
    links differ and tensors may skip stages, it is a branch and bound (see `exact_skips`) that stops after
    some seconds.

    Args:
        profile: The model, with costs of one micro-batch.
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
    if pipelining.chunks > 1:
        raise HvpipeError(
            "exact needs a schedule with one stage on each device. "
            f"Received: schedule={pipelining.schedule!r}"
        )
    spans = Spans(profile)
    orders = DeviceOrders(cluster, stages, pipelining)
    greedy = fitting(profile, cluster, stages, pipelining, spans)
    if orders.mixed and not _is_chain(profile):
        if greedy is not None and order not in (None, list(greedy.ranks)):
            greedy = None
        best, method = _with_skips(profile, spans, orders, order, greedy)
        if best is None and greedy is not None:
            return replace(greedy, method=method)
    else:
        best, method = _without_skips(spans, orders, order, greedy), "exact"
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
    plan = Plan.of(profile, cluster, placement, pipelining, method)
    if not plan.shortages(cluster):
        return plan
    # Spans leave out what waits for tensors that skip stages.
    if greedy is not None and order in (None, list(greedy.ranks)):
        return replace(greedy, method="not proven exact")
    raise PlanError(explain_shortage(plan, profile, cluster))


def _without_skips(
    spans: Spans, orders: DeviceOrders, order: Sequence[str] | None, greedy: Plan | None
) -> list[Cut] | None:
    """Return the cuts of the optimum by the dynamic program, or None if memory does not suffice."""
    every = _device_choices(orders, order, spans.count)
    speed = every[0].fastest((0,) * len(every[0].counts), orders.stages)
    least_s = least_compute_s(spans, every)[-1] / speed if greedy is None else greedy.bottleneck_s
    for factor in _LIMITS if least_s > 0 else (math.inf,):
        best_s, best = factor * least_s if least_s > 0 else math.inf, None
        for choices in every:
            found_s, cuts = _optimum(spans, choices, best_s)
            if cuts and (best is None or found_s < best_s):
                best_s, best = found_s, cuts
        if best is not None:
            return best
    return None


def _with_skips(
    profile: Profile,
    spans: Spans,
    orders: DeviceOrders,
    order: Sequence[str] | None,
    greedy: Plan | None,
) -> tuple[list[Cut] | None, str]:
    """Return the cuts that branch and bound finds, and the method, which says how good they are.

    No cuts mean that none are better than the greedy plan's, or that memory does not suffice.
    """
    effort = Effort(_EFFORT)
    best_s, best, unproven_s = math.inf if greedy is None else greedy.bottleneck_s, None, math.inf
    every = []
    all_choices = _device_choices(orders, order, spans.count)
    least_s = least_compute_s(spans, all_choices)
    for choices in all_choices:
        devices = [level[0] for level in choices.levels]
        links = orders.links(tuple(device.kind for device in devices))
        if effort.layers > _EFFORT // 2:
            every.append(OrderBounds(spans, devices, links, least_s, best_s, effort))
        else:
            unproven_s = min(unproven_s, least_s[-1] / sum(device.speed for device in devices))
    every.sort(key=lambda bounds: bounds.least_s)
    search = BranchAndBound(profile, spans, effort)
    for bounds in every:
        if bounds.least_s >= best_s:
            break
        search.search(bounds, best_s)
        if search.best_ends:
            best_s, best = search.best_s, list(zip(bounds.devices, search.best_ends, strict=True))
        if effort.layers <= 0:
            unproven_s = min(unproven_s, bounds.least_s)
    if unproven_s >= best_s or math.isinf(best_s):
        return best, "exact"
    if unproven_s == 0:
        return best, "not proven exact"
    return best, f"exact within {math.ceil(1000 * (best_s / unproven_s - 1)) / 10:g}%"


def least_compute_s(spans: Spans, every: Sequence[DeviceChoices]) -> Vector:
    """Return sums of the layers' shortest times on any type of device, at speed 1."""
    types = {device.type for choices in every for level in choices.levels for device in level}
    times_s = [np.diff(spans.on(one).compute_s) for one in types]
    return np.concatenate(([0.0], np.cumsum(np.min(times_s, axis=0))))


def _is_chain(profile: Profile) -> bool:
    """Tell whether every tensor has its users in the next layer only, so that none can skip a stage."""
    return all(tensor.users == (tensor.maker + 1,) or not tensor.messages for tensor in profile.tensors)


def _device_choices(orders: DeviceOrders, order: Sequence[str] | None, layers: int) -> list[DeviceChoices]:
    """Return the choices to search one after the other; together they cover all orders asked for."""
    if order is not None:
        return [orders.of_names(order)]
    if not orders.mixed:
        most = _MOST_STATES // (layers + 1)
        if math.prod(count + 1 for count in orders.counts) > most:
            raise HvpipeError(
                f"exact handles at most {most} sets of devices with {layers} layers; use partition for more. "
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


def _optimum(spans: Spans, choices: DeviceChoices, limit_s: float) -> tuple[float, list[Cut]]:
    """Return the smallest bottleneck up to a limit, and its cuts; no cuts if every one exceeds it.

    best[s][used][end] is the smallest bottleneck of s stages on the used devices with the layers before
    `end`; infinite above the limit.
    """
    start = np.full(spans.count + 1, np.inf)
    start[0] = 0.0
    best: list[dict[UsedDevices, Vector]] = [{(0,) * len(choices.counts): start}]
    least_s = least_compute_s(spans, [choices])
    for number, level in enumerate(choices.levels):
        reached: dict[UsedDevices, Vector] = {}
        left = choices.stages - number
        for used, before_s in best[-1].items():
            rest_s = limit_s * choices.fastest(used, left) * ABOVE
            first = int(np.searchsorted(least_s, least_s[-1] - rest_s))
            starts = first + np.flatnonzero(before_s[first : spans.count - left + 1] <= limit_s)
            for device in level:
                now = _shift(used, device, +1)
                if starts.size and now[device.kind] <= choices.counts[device.kind]:
                    through_s = _through_s(spans, device, before_s, starts, limit_s, spans.count - left + 1)
                    reached[now] = np.minimum(reached.get(now, np.inf), through_s)
        if not reached:
            return math.inf, []
        best.append(reached)
    used = min(best[-1], key=lambda used: (best[-1][used][-1], used))
    optimum_s = float(best[-1][used][-1])
    if optimum_s > limit_s * ABOVE or math.isinf(optimum_s):
        return math.inf, []
    return optimum_s, _trace_back(spans, choices, best, used)


def _through_s(
    spans: Spans,
    device: StageDevice,
    before_s: Vector,
    starts: npt.NDArray[np.intp],
    limit_s: float,
    stop: int,
) -> Vector:
    """Return the smallest bottleneck to each end, if the device runs the layers from one of the starts."""
    found = np.full(spans.count + 1, np.inf)
    for start in starts.tolist():
        end = spans.reach(start, stop, device, limit_s)
        if end > start:
            costs_s = np.maximum(spans.costs_s(start, end, device), before_s[start])
            into = found[start + 1 : end + 1]
            np.minimum(into, costs_s, out=into)
    return found


def _trace_back(
    spans: Spans, choices: DeviceChoices, best: list[dict[UsedDevices, Vector]], used: UsedDevices
) -> list[Cut]:
    """Return the cuts of the optimum on the `used` devices, traced from the last stage back to the first."""
    end = spans.count
    optimum_s = float(best[-1][used][end])
    cuts: list[Cut] = []
    for stage in reversed(range(choices.stages)):
        options = []
        for device in choices.levels[stage]:
            before_s = best[stage].get(_shift(used, device, -1))
            for start in [] if before_s is None else np.flatnonzero(before_s[:end] <= optimum_s).tolist():
                if spans.reach(start, end, device, optimum_s) == end:
                    assert before_s is not None
                    through_s = max(float(before_s[start]), spans.cost_s(start, end, device))
                    options.append((through_s, device.kind, start, device))
        _, _, start, device = min(options, key=lambda option: option[:3])
        cuts.append((device, end))
        used, end = _shift(used, device, -1), start
    return cuts[::-1]


def _shift(used: UsedDevices, device: StageDevice, by: int) -> UsedDevices:
    return (*used[: device.kind], used[device.kind] + by, *used[device.kind + 1 :])
