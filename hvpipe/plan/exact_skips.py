"""The optimum where links differ and tensors skip stages: branch and bound over the cuts of an order.

A tensor is charged to the links between its maker and its users, as `stage_costs` does. So what a stage
costs depends on all cuts, and a dynamic program over single stages only gives a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvpipe.plan.span_costs import ABOVE, Spans, StageDevice, Vector
from hvpipe.specs.cluster import Link
from hvpipe.specs.profile import Profile

# How many visited layers take as long as the bounds of the runs from one layer.
_LAYERS_PER_START = 20


@dataclass
class Effort:
    """The work that is left: layers to visit."""

    layers: int


class OrderBounds:
    """Lower bounds for one order of devices: each tensor travels on the best link that it could use.

    Args:
        spans: The costs of runs of layers.
        devices: The device of each stage.
        links: The link from each stage's device to each other's.
        least_s: Sums of the layers' least times, at speed 1.
        below_s: The bottleneck of a known plan; the bounds do not cover plans that are not better.
        effort: The work, of which computing the bounds takes a part.
    """

    def __init__(
        self,
        spans: Spans,
        devices: Sequence[StageDevice],
        links: Sequence[Sequence[Link]],
        least_s: Vector,
        below_s: float,
        effort: Effort,
    ) -> None:
        self.devices, self.links = devices, links
        count, last = spans.count, len(devices) - 1
        self.receive = [_best([row[stage] for row in links[:stage]]) for stage in range(last + 1)]
        self.send = [_best(links[stage][stage + 1 :]) for stage in range(last + 1)]
        self.suffix_s = [np.full(count + 1, np.inf) for _ in range(last + 2)]
        self.suffix_s[-1][count] = 0.0
        for stage in reversed(range(last + 1)):
            device = self.device(stage)
            stop = count - (last - stage)
            before, behind = (sum(one.speed for one in part) for part in (devices[:stage], devices[stage:]))
            first = int(np.searchsorted(least_s, least_s[-1] - below_s * behind * ABOVE))
            past = int(np.searchsorted(least_s, below_s * before * ABOVE, "right")) if stage else 1
            for start in range(max(first, stage), min(past, stop)):
                effort.layers -= _LAYERS_PER_START
                end = spans.reach(start, stop, device, below_s)
                if end > start:
                    costs_s = spans.costs_s(start, end, device)
                    rest_s = self.suffix_s[stage + 1][start + 1 : end + 1]
                    self.suffix_s[stage][start] = np.maximum(costs_s, rest_s).min()

    @property
    def least_s(self) -> float:
        """A bottleneck that no plan in this order is below; infinite if memory does not suffice."""
        return float(self.suffix_s[0][0])

    def device(self, stage: int) -> StageDevice:
        """Return the device of a stage with its best links."""
        of = self.devices[stage]
        return StageDevice(
            of.kind,
            of.speed,
            of.memory_bytes,
            self.receive[stage],
            self.send[stage],
            of.in_flight,
            of.recompute,
            of.type,
        )


@dataclass
class _Partial:
    """The first stages of a plan.

    Args:
        ends: Their ends.
        home: The stage of each layer in them.
        least_s: For each stage the least that it costs.
        sent_s: For each tensor whose users in these stages are known, its longest time so far.
    """

    ends: tuple[int, ...]
    home: list[int]
    least_s: list[float]
    sent_s: dict[int, float]


class BranchAndBound:
    """Finds the cuts with the smallest bottleneck in one order.

    Args:
        profile: The model.
        spans: The costs of its runs of layers.
        effort: The work to share with the search of other orders.
    """

    def __init__(self, profile: Profile, spans: Spans, effort: Effort) -> None:
        self._spans, self._effort = spans, effort
        self._tensors = profile.tensors
        self._inputs: list[list[int]] = [[] for _ in profile.layers]
        for number, tensor in enumerate(profile.tensors):
            for user in tensor.users if tensor.messages else ():
                self._inputs[user].append(number)
        self.best_s, self.best_ends = math.inf, ()  # type: float, tuple[int, ...]

    def search(self, bounds: OrderBounds, below_s: float) -> None:
        """Set `best_s` and `best_ends` to the best plan below a bottleneck, as far as the effort goes."""
        self._bounds, self._last = bounds, len(bounds.devices) - 1
        self.best_s, self.best_ends = below_s, ()
        self._extend(_Partial((), [], [], {}))

    def _extend(self, partial: _Partial) -> None:
        stage = len(partial.ends)
        if stage > self._last:
            bottleneck_s = max(partial.least_s)
            if bottleneck_s < self.best_s:
                self.best_s, self.best_ends = bottleneck_s, partial.ends
            return
        for bound_s, longer in sorted(self._longer(partial, stage), key=lambda pair: pair[0]):
            if bound_s >= self.best_s or self._effort.layers <= 0:
                return
            self._extend(longer)

    def _longer(self, partial: _Partial, stage: int) -> list[tuple[float, _Partial]]:
        """Return the ways to add a stage, each with a bound on the bottleneck."""
        bounds, spans = self._bounds, self._spans
        start = partial.ends[-1] if partial.ends else 0
        stop = spans.count - (self._last - stage)
        costs_s = spans.costs_s(start, stop, bounds.device(stage))
        rests_s: Vector = bounds.suffix_s[stage + 1][start + 1 : stop + 1]
        worth = np.maximum(costs_s, rests_s) < self.best_s
        if not worth.any():
            return []
        furthest = start + int(np.flatnonzero(worth)[-1]) + 1
        self._effort.layers -= furthest - start
        found = []
        least_s, sent_s, more_s = list(partial.least_s), dict(partial.sent_s), 0.0
        here: set[int] = set()
        for end in range(start + 1, furthest + 1):
            for number in self._inputs[end - 1]:
                if self._tensors[number].maker < start and number not in here:
                    here.add(number)
                    more_s += self._receive(number, stage, partial.home, least_s, sent_s)
            place = end - start - 1
            if not worth[place] or (stage == self._last and end < stop):
                continue
            this_s = float(costs_s[place]) + more_s
            bound_s = max(this_s, float(rests_s[place]), *least_s)
            if bound_s < self.best_s:
                home = partial.home + [stage] * (end - start)
                longer = _Partial((*partial.ends, end), home, [*least_s, this_s], dict(sent_s))
                found.append((bound_s, longer))
        return found

    def _receive(
        self, number: int, stage: int, home: Sequence[int], least_s: list[float], sent_s: dict[int, float]
    ) -> float:
        """Charge a tensor to its link; return by how much the stage's receiving exceeds its bound."""
        bounds, tensor = self._bounds, self._tensors[number]
        source = home[tensor.maker]
        time_s = tensor.there_and_back_s(bounds.links[source][stage])
        before_s = sent_s.get(number, tensor.there_and_back_s(bounds.send[source]))
        if time_s > before_s:
            least_s[source] += time_s - before_s
        sent_s[number] = max(time_s, before_s)
        return time_s - tensor.there_and_back_s(bounds.receive[stage])


def _best(links: Sequence[Link]) -> Link:
    """Return the shortest latency and the largest bandwidth of these links."""
    if not links:
        return Link()
    return Link(min(link.latency_s for link in links), max(link.bandwidth_bytes_per_s for link in links))
