"""What every run of consecutive layers costs as a stage: all ends of a start at once, as the planners ask."""

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
_COMPUTE, _AGAIN, _RECEIVE, _RECEIVE_BYTES, _SEND, _SEND_BYTES, _STATE, _SAVED = range(_ROWS := 8)
_CACHED_NUMBERS = 8_000_000


@dataclass(frozen=True)
class Seat:
    """A place in the pipeline with a kind of device in it: its speed, memory, links before and after.

    What skips stages travels straight to its user but is charged here over the links of the neighbours. Where
    all links are equal this is the same; elsewhere `stage_costs` has the last word.
    """

    kind: int
    speed: float
    memory_bytes: float
    receive: Link
    send: Link
    in_flight: int
    recompute: bool = False

    @cached_property
    def seconds(self) -> Vector:
        """What each row of Spans.table counts for in a stage's time."""
        weights = np.zeros(_ROWS)
        weights[_COMPUTE] = 1 / self.speed
        weights[_AGAIN] = self.recompute / self.speed
        weights[_RECEIVE], weights[_RECEIVE_BYTES] = _there_and_back(self.receive)
        weights[_SEND], weights[_SEND_BYTES] = _there_and_back(self.send)
        return weights


@dataclass(frozen=True)
class Bench:
    """The seats to choose from at one stage, as rows: all keep as much of as many micro-batches."""

    seconds: Vector
    speeds: Vector
    memory_bytes: Vector
    in_flight: int
    recompute: bool

    @staticmethod
    def of(seats: Sequence[Seat]) -> Bench:
        ((in_flight, recompute),) = {(seat.in_flight, seat.recompute) for seat in seats}
        return Bench(
            np.stack([seat.seconds for seat in seats]),
            np.array([seat.speed for seat in seats]),
            np.array([seat.memory_bytes for seat in seats]),
            in_flight,
            recompute,
        )

    def without(self, taken: Sequence[bool]) -> Bench:
        """Those that are not taken."""
        rows = np.flatnonzero(~np.array(taken))
        return replace(
            self, seconds=self.seconds[rows], speeds=self.speeds[rows], memory_bytes=self.memory_bytes[rows]
        )

    def within(self, share: float, held_bytes: int) -> Bench:
        """Those with at most a share of their memory, of which so much is in use."""
        return replace(
            self, memory_bytes=np.minimum(self.memory_bytes * share, self.memory_bytes - held_bytes)
        )

    @cached_property
    def fastest(self) -> float:
        return float(self.speeds.max())

    @cached_property
    def least_bytes(self) -> float:
        return float(self.memory_bytes.min())


class Spans:
    """Costs of the runs [start, end) of a profile's layers.

    They are not monotone in the end: what a run sends depends on where it is cut.
    """

    def __init__(self, profile: Profile) -> None:
        layers = profile.layers
        self.count = len(layers)
        self.compute_s = _sums([layer.compute_s for layer in layers])
        self._forward_s = _sums([layer.forward_s for layer in layers])
        self._state = _sums([layer.state_bytes for layer in layers])
        self._saved = _sums([layer.saved_bytes for layer in layers])
        self._users = profile.users
        self._bytes = [float(layer.output_bytes) for layer in layers]
        # The last user of each tensor that travels; 0 for one that never does.
        self._last = np.array(
            [u[-1] if u and size else 0 for u, size in zip(profile.users, self._bytes, strict=True)], np.intp
        )
        # Tensors alive at each cut: made before it, used behind it.
        self.cut_tensors, self.cut_bytes = np.zeros(self.count + 2), np.zeros(self.count + 2)
        for maker in np.flatnonzero(self._last):
            for alive, amount in ((self.cut_tensors, 1.0), (self.cut_bytes, self._bytes[maker])):
                alive[maker + 1] += amount
                alive[self._last[maker] + 1] -= amount
        self.cut_tensors, self.cut_bytes = np.cumsum(self.cut_tensors), np.cumsum(self.cut_bytes)
        self._tables: dict[int, Vector] = {}
        self._cached_numbers = 0

    def table(self, start: int, stop: int) -> Vector:
        """A row for each quantity, a column for each end from start + 1 to stop."""
        cached = self._tables.get(start)
        if cached is not None and cached.shape[1] >= stop - start:
            return cached[:, : stop - start]
        if self._cached_numbers > _CACHED_NUMBERS:
            self._tables.clear()
            self._cached_numbers = 0
        # Somewhat more than asked for: the next question is for a little more.
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
            _STATE: self._state,
            _SAVED: self._saved,
        }
        for row, sums in of_layers.items():
            table[row] = sums[ends] - sums[start]
        table[_SEND], table[_SEND_BYTES] = self.cut_tensors[ends], self.cut_bytes[ends]
        for maker in np.flatnonzero(self._last[:start] >= start):
            users = self._users[maker]
            first = users[bisect_left(users, start)]
            # Received from the first user on; and what lives on behind an end was not made here.
            table[_RECEIVE, first - start :] += 1
            table[_RECEIVE_BYTES, first - start :] += self._bytes[maker]
            passing = max(0, int(self._last[maker]) - start)
            table[_SEND, :passing] -= 1
            table[_SEND_BYTES, :passing] -= self._bytes[maker]
        return table

    def costs_s(self, start: int, stop: int, seat: Seat) -> Vector:
        """Seconds of the runs from `start` to each end up to `stop`, infinite where memory is short."""
        table = self.table(start, stop)
        costs: Vector = seat.seconds @ table
        if seat.memory_bytes != np.inf:
            costs[_memory_bytes(table, seat) > seat.memory_bytes] = np.inf
        return costs

    def costs_of_all_s(self, start: int, first: int, stop: int, bench: Bench) -> Vector:
        """`costs_s` of several seats, a row for each, for the ends from `first` on."""
        table = self.table(start, stop)[:, first - start - 1 :]
        costs: Vector = bench.seconds @ table
        if bench.least_bytes != np.inf:
            memory_bytes = _memory_bytes(table, bench)
            if memory_bytes.max() > bench.least_bytes:
                costs[memory_bytes > bench.memory_bytes[:, None]] = np.inf
        return costs

    def cost_s(self, start: int, end: int, seat: Seat) -> float:
        """Seconds of one run, infinite where memory is short."""
        return float(self.costs_s(start, end, seat)[-1])

    def memory_bytes(self, start: int, end: int, seat: Seat) -> int:
        return int(_memory_bytes(self.table(start, end), seat)[-1])


def _memory_bytes(table: Vector, where: Seat | Bench) -> Vector:
    weights = np.zeros(_ROWS)
    weights[_STATE] = 1
    weights[_RECEIVE_BYTES] = where.in_flight
    weights[_SAVED] = 1 if where.recompute else where.in_flight
    memory: Vector = weights @ table
    return memory


def _there_and_back(link: Link) -> tuple[float, float]:
    """Seconds for each message and for each byte of a tensor that goes one way, its gradient the other."""
    return 2 * link.latency_s, 2 / link.bandwidth_bytes_per_s


def _sums(values: list[float]) -> Vector:
    return np.concatenate(([0.0], np.cumsum(np.array(values, np.float64))))
