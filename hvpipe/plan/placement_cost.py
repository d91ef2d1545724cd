"""The cost of placing layers on devices, whether or not the placement is a pipeline of consecutive layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain

from hvpipe.plan.pipelining import DEFAULT_PIPELINING, Pipelining
from hvpipe.specs.cluster import Cluster, Device, Link
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile

Placement = Sequence[tuple[tuple[str, ...], Sequence[int]]]
"""For each stage, its devices (several are replicas) and the indices of its layers in the profile."""


@dataclass(frozen=True)
class StageCost:
    """The cost of one stage for one micro-batch, and the memory that each of its devices needs.

    Replicas share the micro-batches, so they count as one device as fast as all of them. A tensor that other
    stages use travels straight to its users. It is charged once where it is made and once in each stage that
    uses it, each time for itself and its gradient.

    Args:
        compute_s: Seconds of forward and backward, with recomputation.
        receive_s: Seconds to receive tensors and to send back their gradients.
        send_s: Seconds to send tensors and to receive their gradients.
        receive_bytes: Bytes of the tensors received, without gradients.
        send_bytes: Bytes of the tensors sent, without gradients; each counts once.
        state_bytes: Bytes of weights, gradients and optimizer slots.
        stash_bytes: Bytes that all micro-batches in flight keep for the backward, received tensors included.
    """

    compute_s: float
    receive_s: float
    send_s: float
    receive_bytes: int
    send_bytes: int
    state_bytes: int
    stash_bytes: int

    @property
    def total_s(self) -> float:
        """Seconds of computing and of all transfers."""
        return self.compute_s + self.receive_s + self.send_s

    @property
    def memory_bytes(self) -> int:
        """Bytes of state and stash."""
        return self.state_bytes + self.stash_bytes


def is_contiguous(placement: Placement) -> bool:
    """Tell whether the stages are runs of consecutive layers, in order: a pipeline."""
    places = list(chain.from_iterable(layers for _, layers in placement))
    return places == list(range(len(places)))


def stage_costs(
    profile: Profile, cluster: Cluster, placement: Placement, pipelining: Pipelining
) -> list[StageCost]:
    """Return the cost of every stage. Without a pipeline, all micro-batches count as in flight."""
    stage_of = {place: stage for stage, (_, layers) in enumerate(placement) for place in layers}
    receive_s, send_s = [0.0] * len(placement), [0.0] * len(placement)
    receive_bytes, send_bytes = [0] * len(placement), [0] * len(placement)
    for tensor in profile.tensors:
        home = stage_of[tensor.maker]
        replicas = len(placement[home][0])
        away = sorted({stage_of[user] for user in tensor.users} - {home})
        if not away or not tensor.messages:
            continue
        links = [_slowest(cluster, placement[home][0], placement[stage][0]) for stage in away]
        times = [tensor.there_and_back_s(link) for link in links]
        send_s[home] += max(times) / replicas
        send_bytes[home] += tensor.bytes
        for stage, time_s in zip(away, times, strict=True):
            receive_s[stage] += time_s / len(placement[stage][0])
            receive_bytes[stage] += tensor.bytes
    costs = []
    in_flight = in_flight_of(placement, pipelining)
    for stage, (devices, places) in enumerate(placement):
        layers = profile.once(places)
        again = pipelining.recomputes(stage)
        state_bytes, stash_bytes = stage_bytes(layers, receive_bytes[stage], in_flight[stage], again)
        costs.append(
            StageCost(
                compute_s=_compute_s(profile, [cluster.device(name) for name in devices], places, again),
                receive_s=receive_s[stage],
                send_s=send_s[stage],
                receive_bytes=receive_bytes[stage],
                send_bytes=send_bytes[stage],
                state_bytes=state_bytes,
                stash_bytes=stash_bytes,
            )
        )
    return costs


def _compute_s(profile: Profile, devices: Sequence[Device], places: Sequence[int], again: bool) -> float:
    """Return the seconds of a micro-batch of a stage, if its devices share the micro-batches ideally."""
    speeds: dict[str, float] = {}
    for device in devices:
        speeds[device.type] = speeds.get(device.type, 0.0) + device.speed
    times_s = []
    for kind, speed in speeds.items():
        layers = [profile.on(kind).layers[place] for place in places]
        again_s = sum(layer.forward_s for layer in layers) if again else 0.0
        times_s.append((sum(layer.compute_s for layer in layers) + again_s) / speed)
    return together_s(times_s)


def together_s(times_s: Sequence[float]) -> float:
    """Return the seconds of a task that workers share ideally; alone, each takes one of these times."""
    if len(times_s) == 1 or min(times_s) == 0:
        return min(times_s)
    return 1 / sum(1 / time_s for time_s in times_s)


def in_flight_of(placement: Placement, pipelining: Pipelining) -> list[int]:
    """Return the most micro-batches that each stage holds: all of them if the placement is not a pipeline."""
    if not is_contiguous(placement):
        return [pipelining.microbatches] * len(placement)
    counts = [len(devices) for devices, _ in placement]
    return [pipelining.in_flight(stage, counts) for stage in range(len(placement))]


def stage_bytes(
    layers: Sequence[LayerCost], receive_bytes: int, in_flight: int, recompute: bool
) -> tuple[int, int]:
    """Return the bytes that a stage always holds, and those that it stashes for micro-batches in flight."""
    saved_bytes = sum(layer.saved_bytes for layer in layers)
    saved = 1 if recompute else in_flight
    return sum(layer.state_bytes for layer in layers), in_flight * receive_bytes + saved * saved_bytes


def _slowest(cluster: Cluster, one: tuple[str, ...], other: tuple[str, ...]) -> Link:
    """Return the longest latency and the smallest bandwidth between any two of these devices."""
    return reduce(Link.joined, (cluster.link(a, b) for a in one for b in other))


def one_batch_s(
    profile: Profile, cluster: Cluster, placement: Placement, pipelining: Pipelining = DEFAULT_PIPELINING
) -> float:
    """Return the seconds of one micro-batch, forward and backward, without pipelining.

    This is how TensorFlow's own device placement runs it. Each device runs its layers one at a time, in the
    order of the profile, as soon as their inputs are there. Transfers are delays that occupy no device. The
    first of several replicas runs the micro-batch. In a stage that recomputes, a layer's backward takes its
    forward once more.
    """
    device_of = {place: devices[0] for devices, layers in placement for place in layers}
    stages = [layers for stage, (_, layers) in enumerate(placement) if pipelining.recomputes(stage)]
    again = {place for layers in stages for place in layers}
    speed = {devices[0]: cluster.device(devices[0]).speed for devices, _ in placement}
    on = {name: profile.on(cluster.device(name).type).layers for name in speed}
    free_s = dict.fromkeys(speed, 0.0)
    forward_s = [0.0] * len(profile.layers)
    for place in range(len(profile.layers)):
        device = device_of[place]
        arrivals = (
            forward_s[maker]
            + _transfer_s(cluster, profile.edge_bytes[maker, place][0], device_of[maker], device)
            for maker in profile.makers[place]
        )
        start_s = max(free_s[device], max(arrivals, default=0.0))
        forward_s[place] = free_s[device] = start_s + on[device][place].forward_s / speed[device]
    turn_s = max(forward_s)
    free_s = dict.fromkeys(speed, turn_s)
    backward_s = [turn_s] * len(profile.layers)
    for place in reversed(range(len(profile.layers))):
        device = device_of[place]
        arrivals = (
            backward_s[user]
            + _transfer_s(cluster, profile.edge_bytes[place, user][1], device_of[user], device)
            for user in profile.users[place]
        )
        start_s = max(free_s[device], max(arrivals, default=turn_s))
        layer = on[device][place]
        again_s = layer.forward_s if place in again else 0.0
        backward_s[place] = free_s[device] = start_s + (layer.backward_s + again_s) / speed[device]
    return max(backward_s)


def _transfer_s(cluster: Cluster, size_bytes: int, one: str, other: str) -> float:
    """Return the seconds of tensors, or of their gradients, between two devices."""
    return cluster.link(one, other).time_s(size_bytes) if size_bytes and one != other else 0.0
