"""Forecasts a data-parallel step: every device runs the whole model on its share of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hvpipe.errors import PlanError, listed
from hvpipe.forecast.gradient_reduce import BackwardSpan, Ring, RingGradients, reduce_beside
from hvpipe.forecast.pipeline import Forecast
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.stage_plan import DATA_PARALLEL, Plan
from hvpipe.specs.cluster import Cluster, Device, Link
from hvpipe.specs.profile import Profile
from hvpipe.trace.events import Event, Trace


def whole_shares(count: int, weights: Sequence[float], least: int = 0) -> list[int]:
    """Split `count` into whole parts in proportion to the weights, by the method of largest remainders.

    No part is below `least`, even if the sum then exceeds `count`.
    """
    whole = sum(weights)
    exact = [count * weight / whole for weight in weights]
    parts = [max(least, int(part)) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda place: parts[place] - exact[place])
    for place in by_remainder[: max(0, count - sum(parts))]:
        parts[place] += 1
    return parts


def _updates(
    profile: Profile,
    devices: Sequence[Device],
    backwards: Sequence[BackwardSpan],
    reduces: Sequence[tuple[int, float, float, int]],
) -> Iterator[Event]:
    """Yield each device's updates, one per bucket: once the bucket is reduced and the device is idle."""
    whole_s = sum(layer.update_s for layer in profile.layers)
    whole_bytes = sum(layer.weight_bytes for layer in profile.layers)
    for rank, (device, backward) in enumerate(zip(devices, backwards, strict=True)):
        free_s = backward.end_s
        for _, _, reduced_s, size_bytes in reduces:
            start_s = max(free_s, reduced_s)
            free_s = start_s + whole_s * size_bytes / whole_bytes / device.speed
            if free_s > start_s:
                yield Event("update", "update", rank, "compute", start_s, free_s, {"kind": "U"})


def forecast_data_parallel(
    profile: Profile,
    cluster: Cluster,
    pipelining: Pipelining,
    samples: int | None = None,
    names: Sequence[str] | None = None,
) -> Forecast:
    """Forecast one data-parallel step, as `hvpipe.keras.data_parallel` runs it.

    Each device runs its share of the batch at once; shares are in samples, in proportion to speed. Times and
    saved bytes are the profile's, scaled. Once a bucket's gradients are final on all devices, a ring of them
    reduces it: 2 (n - 1) / n of its bytes over the slowest link, during the rest of the backward. The
    step ends with the update of the last bucket.

    Args:
        profile: The model, with costs of one micro-batch.
        cluster: The devices and links.
        pipelining: Its micro-batches make the batch; the schedule does not matter. No recomputation.
        samples: Samples of the batch; None if all micro-batches are as large as the profile's.
        names: The devices; None for all of the cluster.

    Returns:
        The forecast. Its plan has one stage with these devices.

    Raises:
        PlanError: If the batch has fewer samples than there are devices, without devices, or with
            recomputation.

    Example:
        ```python
        forecast_data_parallel(profile, cluster, Pipelining(microbatches=16)).step_s
        ```
    """
    devices = cluster.devices if names is None else tuple(map(cluster.device, names))
    if not devices:
        raise PlanError("names should have at least one device. Received: names=[]")
    plan = _plan(profile, cluster, pipelining, samples, devices)
    profile = replace(profile, layers=tuple(profile.once(range(len(profile.layers)))))
    events, memory_bytes = [], []
    at_share = {share: profile.at_batch(int(share)) for share in set(plan.stages[0].shares)}
    for rank, (device, share) in enumerate(zip(devices, plan.stages[0].shares, strict=True)):
        local = at_share[share].on(device.type)
        turn_s = sum(layer.forward_s for layer in local.layers) / device.speed
        end_s = turn_s + sum(layer.backward_s for layer in local.layers) / device.speed
        events.append(Event("forward", "forward", rank, "compute", 0.0, turn_s, {"stage": 0}))
        events.append(Event("backward", "backward", rank, "compute", turn_s, end_s, {"stage": 0}))
        memory_bytes.append(sum(layer.state_bytes + layer.saved_bytes for layer in local.layers))
    backwards = [BackwardSpan(event.start_s, event.end_s) for event in events if event.category == "backward"]
    gradients = RingGradients(profile.layers, backwards, Ring.of(cluster, plan.ranks))
    reduces = list(reduce_beside({0: gradients}))
    for _, start_s, end_s, size_bytes in reduces:
        events.append(Event("reduce", "reduce", 0, "transfer", start_s, end_s, {"bytes": size_bytes}))
    updates = list(_updates(profile, devices, backwards, reduces))
    events.extend(updates)
    busy = [backward.end_s for backward in backwards]
    for event in updates:
        busy[event.rank] += event.duration_s
    busy_s = tuple(busy)
    step_s = max(event.end_s for event in events)
    trace = Trace.merge([Trace(tuple(events), {"makespan_s": step_s, "devices": list(plan.ranks)})])
    return Forecast(plan, step_s, busy_s, tuple(memory_bytes), lambda: trace)


class DataParallelSteps:
    """The steps that `forecast_data_parallel` forecasts, for many sets of devices, without plans and traces.

    Args:
        profile: The model, with costs of one micro-batch.
        cluster: The devices and links.
        samples: Samples of the batch.
    """

    def __init__(self, profile: Profile, cluster: Cluster, samples: int) -> None:
        self._cluster, self._samples = cluster, samples
        self._speed = {device.name: profile.speed(device) for device in cluster.devices}
        self._profile = replace(profile, layers=tuple(profile.once(range(len(profile.layers)))))
        layers = self._profile.layers
        # A backward of one second completes the buckets at these times.
        one = RingGradients(layers, [BackwardSpan(0.0, 1.0)], Ring(1, Link()))
        buckets = list(one.buckets())
        self._parts = np.array([part for part, _ in buckets])
        self._sizes = np.array([size for _, size in buckets], float)
        update_s = sum(layer.update_s for layer in layers)
        weight_bytes = sum(layer.weight_bytes for layer in layers)
        self._updates_s = update_s * self._sizes / max(1, weight_bytes)
        self._state_bytes = sum(layer.state_bytes for layer in layers)
        self._saved = np.array([layer.saved_bytes for layer in layers], float)
        self._fixed_s: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._known: dict[tuple[int, str], tuple[float, float, int]] = {}

    def of(self, names: Sequence[str]) -> tuple[float, float]:
        """Return the bytes that the devices lack together, and the seconds of their step.

        The step is infinite if a device would get no sample.
        """
        if len(names) > self._samples:
            return math.inf, math.inf
        devices = list(map(self._cluster.device, names))
        shares = whole_shares(self._samples, [self._speed[name] for name in names])
        if min(shares) < 1:
            return math.inf, math.inf
        missing_bytes = 0.0
        spans: set[tuple[float, float, float]] = set()
        for device, share in zip(devices, shares, strict=True):
            forward_s, backward_s, size_bytes = self._of_share(share, device.type)
            turn_s = forward_s / device.speed
            spans.add((turn_s, turn_s + backward_s / device.speed, device.speed))
            missing_bytes += max(0.0, size_bytes - device.room_bytes)
        starts_s, ends_s, speeds = np.array(sorted(spans)).T  # of the backwards
        if not len(self._sizes):
            return missing_bytes, float(ends_s.max())
        ring = Ring.of(self._cluster, names)
        final_s = (starts_s + self._parts[:, None] * (ends_s - starts_s)).max(axis=1)
        start_s, link = ring.seconds(0), ring.link
        ring_s = start_s + 2 * (1 - 1 / len(names)) * self._sizes / link.bandwidth_bytes_per_s
        # A bucket's ring starts when the bucket is final and the ring before it is over.
        until_s = np.cumsum(ring_s)
        over_s = until_s + np.maximum.accumulate(final_s - until_s + ring_s)
        # A device updates a bucket's weights when its ring is over and the update before it is, too.
        update_s = np.cumsum(self._updates_s)
        rest_s = (update_s[-1] - update_s + self._updates_s)[:, None] / speeds
        free_s = np.maximum(ends_s + update_s[-1] / speeds, (over_s[:, None] + rest_s).max(axis=0))
        return missing_bytes, max(float(over_s[-1]), float(free_s.max()))

    def _of_share(self, share: int, device_type: str) -> tuple[float, float, int]:
        """Return the seconds of forward and backward on a device of speed 1, and the bytes, of a share."""
        key = share, device_type
        if key not in self._known:
            self._known[key] = self._share(share, device_type)
        return self._known[key]

    def _share(self, share: int, device_type: str) -> tuple[float, float, int]:
        by = share / self._profile.batch_size
        if device_type not in self._fixed_s:
            layers = self._profile.on(device_type).layers
            fixed_s = np.array([(one.fixed_forward_s, one.fixed_backward_s) for one in layers]).sum(axis=0)
            whole_s = np.array([(one.forward_s, one.backward_s) for one in layers]).sum(axis=0)
            self._fixed_s[device_type] = fixed_s, whole_s - fixed_s
        fixed_s, more_s = self._fixed_s[device_type]
        forward_s, backward_s = fixed_s + more_s * by
        return float(forward_s), float(backward_s), self._state_bytes + int(np.ceil(self._saved * by).sum())


def _plan(
    profile: Profile,
    cluster: Cluster,
    pipelining: Pipelining,
    samples: int | None,
    devices: Sequence[Device],
) -> Plan:
    """Return the plan of one stage with the devices; its shares are in samples."""
    if pipelining.recompute:
        raise PlanError(
            "hvpipe.keras.data_parallel keeps what its backward needs: plan data parallel without recompute. "
            f"Received: recompute={pipelining.recompute}"
        )
    if samples is None:
        samples = profile.batch_size * pipelining.microbatches
    shares = whole_shares(samples, [profile.speed(device) for device in devices])
    if min(shares) < 1:
        raise PlanError(
            "Each device should have a sample of the batch. "
            f"Received: samples={samples}, in shares of {listed(map(str, shares))}"
        )
    names = tuple(device.name for device in devices)
    how = pipelining if pipelining.chunks == 1 else Pipelining("1f1b", pipelining.microbatches)
    plan = Plan.of(profile, cluster, [(names, range(len(profile.layers)))], how, DATA_PARALLEL)
    return replace(plan, stages=(replace(plan.stages[0], shares=tuple(map(float, shares))),))
