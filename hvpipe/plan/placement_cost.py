"""The cost of placing layers on devices, whether or not the placement is a pipeline of consecutive layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain

from hvpipe.plan.pipelining import DEFAULT_PIPELINING, Pipelining
from hvpipe.specs.cluster import Cluster, Device, Link
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
        compute_s: Seconds of forward and backward, with one recomputation; "zb-h1" may need two.
        receive_s: Seconds to receive tensors and to send back their gradients.
        send_s: Seconds to send tensors and to receive their gradients.
        receive_bytes: Bytes of the tensors received, without gradients.
        send_bytes: Bytes of the tensors sent, without gradients; each counts once.
        state_bytes: Bytes of weights, gradients and optimizer slots.
        stash_bytes: Bytes that all micro-batches in flight keep for the backward, received tensors included,
            and `waiting_bytes`.
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
    memory = stage_memory(profile, placement, pipelining)
    for stage, (devices, places) in enumerate(placement):
        again = pipelining.recomputes(stage)
        state_bytes, stash_bytes = memory[stage]
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


def stage_memory(profile: Profile, placement: Placement, pipelining: Pipelining) -> list[tuple[int, int]]:
    """Return for each stage the bytes that it always holds, and those that it stashes."""
    stage_of = {place: stage for stage, (_, places) in enumerate(placement) for place in places}
    sent: list[Sent] = []
    for tensor in profile.tensors:
        home = stage_of[tensor.maker]
        for stage in {stage_of[user] for user in tensor.users} - {home}:
            sent.append((home, stage, tensor.bytes, tensor.gradient_bytes))
    replicas = [len(devices) for devices, _ in placement]
    if is_contiguous(placement):
        in_flight = pipelining.all_in_flight(replicas)
    else:
        in_flight = [pipelining.microbatches] * len(placement)
    held = [flying * count for flying, count in zip(in_flight, replicas, strict=True)]
    found = []
    stash_bytes = waiting_bytes(sent, replicas, held, pipelining.microbatches)
    for _, stage, size_bytes, _ in sent:
        stash_bytes[stage] += in_flight[stage] * size_bytes
    for stage, (_, places) in enumerate(placement):
        layers = profile.once(places)
        saved = 1 if pipelining.recomputes(stage) else in_flight[stage]
        stash_bytes[stage] += saved * sum(layer.saved_bytes for layer in layers)
        found.append((sum(layer.state_bytes for layer in layers), stash_bytes[stage]))
    return found


def fits_memory(profile: Profile, cluster: Cluster, placement: Placement, pipelining: Pipelining) -> bool:
    """Tell whether every device has the memory for all of its stages."""
    needed_bytes: Counter[str] = Counter()
    for (names, _), sizes in zip(placement, stage_memory(profile, placement, pipelining), strict=True):
        needed_bytes.update(dict.fromkeys(names, sum(sizes)))
    return not missing_bytes(needed_bytes, cluster)


def missing_bytes(needed_bytes: Mapping[str, int], cluster: Cluster) -> dict[str, int]:
    """Return the missing bytes of each device that lacks memory, by device name."""
    limits_bytes = {name: cluster.device(name).memory_bytes for name in needed_bytes}
    return {
        name: needed_bytes[name] - limit_bytes
        for name, limit_bytes in limits_bytes.items()
        if limit_bytes is not None and needed_bytes[name] > limit_bytes
    }


Sent = tuple[int, int, int, int]
"""Tensors of a micro-batch between two stages: maker, user, their bytes and those of their gradients."""


def waiting_bytes(
    sent: Iterable[Sent], replicas: Sequence[int], held: Sequence[int], microbatches: int
) -> list[int]:
    """Return what each rank of a stage holds for tensors that skip stages, beside its own micro-batches.

    The receive of such a tensor is posted when its maker runs, so at its user the tensor waits for each
    micro-batch that is in flight at the maker but not at the user. At the maker its gradient waits for as
    many. A stage's ranks share them evenly. Tensors to the next stage hardly wait.

    Args:
        sent: The tensors.
        replicas: The number of ranks of each stage.
        held: The micro-batches in flight on all ranks of each stage together.
        microbatches: Micro-batches of the step.
    """
    found = [0] * len(replicas)
    for maker, user, size_bytes, gradient_bytes in sent:
        waiting = min(microbatches, held[maker]) - held[user]
        if user > maker + 1 and waiting > 0:
            found[user] += -(-waiting // replicas[user]) * size_bytes
            found[maker] += -(-waiting // replicas[maker]) * gradient_bytes
    return found


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
