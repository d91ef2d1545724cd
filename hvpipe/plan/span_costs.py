"""The cost of every run of consecutive layers as a stage, vectorised over the ends of a run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hvpipe.specs.cluster import Link
from hvpipe.specs.profile import Profile

Vector = npt.NDArray[np.float64]

# Rows of Spans.table.
_COMPUTE, _AGAIN, _RECEIVE, _RECEIVE_BYTES, _BACK_BYTES, _SEND, _SEND_BYTES, _STATE, _SAVED = range(
    _ROWS := 9
)
_CACHED_NUMBERS = 8_000_000
ABOVE = 1 + 1e-9
"""A limit on sums is exceeded only by more than their rounding."""


@dataclass(frozen=True)
class StageDevice:
    """A kind of device at one stage of the pipeline: its speed, memory, and the links before and after.

    A tensor that skips stages travels straight to its user, but is charged here over the links to the
    neighbours. With equal links that is the same. With others it is an estimate; `stage_costs` is exact.
    """

    kind: int
    speed: float
    memory_bytes: float
    receive: Link
    send: Link
    in_flight: int
    recompute: bool = False
    type: str = ""

    @cached_property
    def seconds(self) -> Vector:
        """The weight of each row of Spans.table in a stage's time."""
        weights = np.zeros(_ROWS)
        weights[_COMPUTE] = 1 / self.speed
        weights[_AGAIN] = self.recompute / self.speed
        weights[_RECEIVE], weights[_SEND] = self.receive.latency_s, self.send.latency_s
        weights[[_RECEIVE_BYTES, _BACK_BYTES]] = 1 / self.receive.bandwidth_bytes_per_s
        weights[_SEND_BYTES] = 1 / self.send.bandwidth_bytes_per_s
        return weights


@dataclass(frozen=True)
class StageDeviceTable:
    """The candidate devices of one stage as arrays, a row each, all with equal micro-batches in flight."""

    seconds: Vector
    speeds: Vector
    memory_bytes: Vector
    in_flight: int
    recompute: bool

    @staticmethod
    def of(devices: Sequence[StageDevice]) -> StageDeviceTable:
        """Return the table of these devices."""
        ((in_flight, recompute),) = {(device.in_flight, device.recompute) for device in devices}
        return StageDeviceTable(
            np.stack([device.seconds for device in devices]),
            np.array([device.speed for device in devices]),
            np.array([device.memory_bytes for device in devices]),
            in_flight,
            recompute,
        )

    def without(self, taken: Sequence[bool]) -> StageDeviceTable:
        """Return the rows that are not taken."""
        rows = np.flatnonzero(~np.array(taken))
        return replace(
            self, seconds=self.seconds[rows], speeds=self.speeds[rows], memory_bytes=self.memory_bytes[rows]
        )

    def within(self, share: float, held_bytes: int) -> StageDeviceTable:
        """Return the rows with at most a share of their memory, of which `held_bytes` are in use."""
        return replace(
            self, memory_bytes=np.minimum(self.memory_bytes * share, self.memory_bytes - held_bytes)
        )

    @cached_property
    def fastest(self) -> float:
        """The highest speed."""
        return float(self.speeds.max())

    @cached_property
    def least_bytes(self) -> float:
        """The smallest memory."""
        return float(self.memory_bytes.min())


class Spans:
    """Costs of the runs [start, end) of a profile's layers.

    A longer run may cost less: what a run sends depends on where it is cut.
    """

    def __init__(self, profile: Profile) -> None:
        layers = profile.layers
        self._profile = profile
        self._of_types: dict[str, Spans] = {}
        self.count = len(layers)
        self.compute_s = _sums([layer.compute_s for layer in layers])
        self._forward_s = _sums([layer.forward_s for layer in layers])
        self.state_bytes = _sums([layer.state_bytes for layer in layers])
        self.saved_bytes = _sums([layer.saved_bytes for layer in layers])
        self._tensors = [tensor for tensor in profile.tensors if tensor.messages]
        self._makers = [tensor.maker for tensor in self._tensors]
        self._last = np.array([tensor.users[-1] for tensor in self._tensors], np.intp)
        # What crosses each cut, made before it and used behind it: messages and bytes with gradients, and
        # bytes without.
        crossing = np.zeros((3, self.count + 2))
        for tensor in self._tensors:
            amounts = (tensor.messages, tensor.both_bytes, tensor.bytes)
            crossing[:, tensor.maker + 1] += amounts
            crossing[:, tensor.users[-1] + 1] -= amounts
        self.cut_messages, self.cut_both_bytes, self.cut_bytes = np.cumsum(crossing, axis=1)
        self._tables: dict[int, Vector] = {}
        self._cached_numbers = 0

    def on(self, device_type: str) -> Spans:
        """Return the costs on devices of a type, where layers have `time_s` for it."""
        if not device_type:
            return self
        if device_type not in self._of_types:
            profile = self._profile.on(device_type)
            self._of_types[device_type] = self if profile is self._profile else Spans(profile)
        return self._of_types[device_type]

    def reach(self, start: int, stop: int, device: StageDevice, limit_s: float) -> int:
        """Return the furthest end, at most `stop`, of a run from `start` within the limit and the memory."""
        most_s = self.on(device.type).compute_s[: stop + 1]
        stop = int(np.searchsorted(most_s, most_s[start] + limit_s * device.speed * ABOVE, "right")) - 1
        if device.memory_bytes == np.inf:
            return stop
        most_bytes = self.state_bytes[: stop + 1]
        return int(np.searchsorted(most_bytes, most_bytes[start] + device.memory_bytes * ABOVE, "right")) - 1

    def table(self, start: int, stop: int) -> Vector:
        """Return the costs of the runs from `start`: a row per quantity, a column per end up to `stop`."""
        cached = self._tables.get(start)
        if cached is not None and cached.shape[1] >= stop - start:
            return cached[:, : stop - start]
        if self._cached_numbers > _CACHED_NUMBERS:
            self._tables.clear()
            self._cached_numbers = 0
        # Compute a few more columns than requested: the next call usually needs a few more.
        made = self._make_table(start, min(self.count, stop + (stop - start) // 2 + 8))
        self._tables[start] = made
        self._cached_numbers += made.size
        return made[:, : stop - start]

    def _make_table(self, start: int, stop: int) -> Vector:
        table = np.zeros((_ROWS, stop - start))
        ends = slice(start + 1, stop + 1)
        of_layers = {
            _COMPUTE: self.compute_s,
            _AGAIN: self._forward_s,
            _STATE: self.state_bytes,
            _SAVED: self.saved_bytes,
        }
        for row, sums in of_layers.items():
            table[row] = sums[ends] - sums[start]
        table[_SEND], table[_SEND_BYTES] = self.cut_messages[ends], self.cut_both_bytes[ends]
        for number in np.flatnonzero(self._last[: bisect_left(self._makers, start)] >= start):
            tensor = self._tensors[number]
            first = tensor.users[bisect_left(tensor.users, start)]
            # A run receives the tensor from its first user on. It does not send it on: it did not make it.
            table[_RECEIVE, first - start :] += tensor.messages
            table[_RECEIVE_BYTES, first - start :] += tensor.bytes
            table[_BACK_BYTES, first - start :] += tensor.gradient_bytes
            passing = max(0, tensor.users[-1] - start)
            table[_SEND, :passing] -= tensor.messages
            table[_SEND_BYTES, :passing] -= tensor.both_bytes
        return table

    def costs_s(self, start: int, stop: int, device: StageDevice) -> Vector:
        """Return the seconds of the runs from `start` to each end up to `stop`; infinite if too large."""
        table = self.on(device.type).table(start, stop)
        costs: Vector = device.seconds @ table
        if device.memory_bytes != np.inf:
            costs[_memory_bytes(table, device) > device.memory_bytes] = np.inf
        return costs

    def costs_of_all_s(self, start: int, first: int, stop: int, candidates: StageDeviceTable) -> Vector:
        """Return `costs_s` of several devices, a row for each, for the ends from `first` on."""
        table = self.table(start, stop)[:, first - start - 1 :]
        costs: Vector = candidates.seconds @ table
        if candidates.least_bytes != np.inf:
            memory_bytes = _memory_bytes(table, candidates)
            if memory_bytes.max() > candidates.least_bytes:
                costs[memory_bytes > candidates.memory_bytes[:, None]] = np.inf
        return costs

    def cost_s(self, start: int, end: int, device: StageDevice) -> float:
        """Return the seconds of one run; infinite if memory is short."""
        return float(self.costs_s(start, end, device)[-1])

    def memory_bytes(self, start: int, end: int, device: StageDevice) -> int:
        """Return the bytes that one run needs."""
        return int(_memory_bytes(self.table(start, end), device)[-1])


def _memory_bytes(table: Vector, where: StageDevice | StageDeviceTable) -> Vector:
    weights = np.zeros(_ROWS)
    weights[_STATE] = 1
    weights[_RECEIVE_BYTES] = where.in_flight
    weights[_SAVED] = 1 if where.recompute else where.in_flight
    memory: Vector = weights @ table
    return memory


def _sums(values: list[float]) -> Vector:
    return np.concatenate(([0.0], np.cumsum(np.array(values, np.float64))))
