"""Greedy filling: give each stage in turn the longest run of the remaining layers that it finishes in time T.

A beam search over the orders of the devices: it keeps several partial pipelines at each stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hvpipe.plan.span_costs import Spans, StageDevice, StageDeviceTable, Vector

UsedDevices = tuple[int, ...]
"""The number of devices of each kind that are in use."""

Indices = npt.NDArray[np.intp]

Cut = tuple[StageDevice, int]
"""A stage of a filled pipeline: its device, and the end of its layers."""

# The number of a stage's ends to keep on each of the two fronts of `_worth_keeping`.
_FRONT = 3
# Each kept set of used devices is extended by every kind of device. The most extensions to try per stage, and
# the fewest sets to try them for.
_MOST_EXTENSIONS, _FEWEST_SETS = 192, 4


@dataclass(frozen=True)
class DeviceChoices:
    """The candidate devices of each stage.

    `levels` has the candidates of each stage; with a fixed order of devices, each stage has one. `counts` is
    the number of devices of each kind. With an interleaved schedule, stages go round a circle of `devices`
    devices (0: no circle). Stages of one device share its memory, and each may take at most a `share` of it,
    0 to 1.
    """

    levels: Sequence[Sequence[StageDevice]]
    counts: Sequence[int]
    devices: int = 0
    share: float = 1.0

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.levels)

    @cached_property
    def speeds(self) -> dict[int, float]:
        """The speed of each kind of device, the fastest first."""
        speeds = {device.kind: device.speed for level in self.levels for device in level}
        return dict(sorted(speeds.items(), key=lambda pair: -pair[1]))

    def fastest(self, used: UsedDevices, stages: int) -> float:
        """Return the total speed of the `stages` fastest remaining devices."""
        return sum(self._left(used, stages))

    def fastest_behind(self, used: UsedDevices, stages: int) -> dict[int, float]:
        """Return, for each kind to use next, the total speed of the `stages` fastest devices left then."""
        left = self._left(used, stages + 1)
        together, spare = sum(left[:stages]), left[stages]
        return {kind: together - max(0.0, speed - spare) for kind, speed in self.speeds.items()}

    def _left(self, used: UsedDevices, at_most: int) -> list[float]:
        """Return the speeds of up to `at_most` remaining devices, the fastest first."""
        speeds: list[float] = []
        for kind, speed in self.speeds.items():
            speeds += [speed] * min(at_most - len(speeds), self.counts[kind] - used[kind])
            if len(speeds) == at_most:
                break
        return speeds


@dataclass(frozen=True)
class BeamWidth:
    """The number of partial fills to keep at each stage: sets of used devices, and last ends of each set.

    With fewer sets, more ends of each are kept.
    """

    sets: int
    ends: int

    def among(self, kinds: int) -> BeamWidth:
        """Return the width for a number of kinds: with many, fewer sets, as every kind extends each set."""
        return BeamWidth(min(self.sets, max(_FEWEST_SETS, _MOST_EXTENSIONS // kinds)), self.ends)


@dataclass(frozen=True)
class _PartialFill:
    """Stages filled up to `end`. The last stage is on `device`; `before` is the fill without it.

    In a circle, `held_bytes` is the memory in use on each device, starting with the next stage's device.
    """

    end: int
    device: StageDevice | None = None
    before: _PartialFill | None = None
    held_bytes: tuple[int, ...] = ()

    def with_stage(self, spans: Spans, device: StageDevice, end: int) -> _PartialFill:
        """Return this fill with one more stage."""
        held_bytes = self.held_bytes
        if held_bytes:
            more_bytes = spans.memory_bytes(self.end, end, device)
            held_bytes = (*held_bytes[1:], held_bytes[0] + more_bytes)  # the next device comes to the front
        return _PartialFill(end, device, self, held_bytes)


_Extension = tuple[Indices, StageDevice, _PartialFill]
"""The ends that a further stage can have, its device, and the stages before it."""

_NOWHERE: Indices = np.empty(0, np.intp)


def fill(spans: Spans, choices: DeviceChoices, limit_s: float, breadth: BeamWidth) -> list[Cut] | None:
    """Cut the layers so that each stage takes at most `limit_s` and fits its memory; None if that fails.

    Finds the order of the devices on the way. Among partial fills that used the same devices, it keeps those
    that got furthest. Among sets of used devices, it keeps those that wasted the least of `limit_s`. If
    `breadth` has room for all sets (few kinds of devices), it tries every order.

    Costs are not monotone, because the sizes of cuts jump. So it tries every end, even past the first that
    takes too long. The furthest end may be a bad one: it may send a large tensor that the next stage has no
    time to receive. So it keeps a few shorter ends as well (`_worth_keeping`). It drops fills that wasted
    more than the remaining devices could make up for.
    """
    breadth = breadth.among(len(choices.speeds))
    beam: dict[UsedDevices, list[_PartialFill]] = {
        (0,) * len(choices.counts): [_PartialFill(0, held_bytes=(0,) * choices.devices)]
    }
    for number, level in enumerate(choices.levels):
        left = choices.stages - number - 1
        found: dict[UsedDevices, list[_Extension]] = {}
        candidates = StageDeviceTable.of(level)
        for used, filled in beam.items():
            taken = [used[device.kind] == choices.counts[device.kind] for device in level]
            free = [device for device, is_taken in zip(level, taken, strict=True) if not is_taken]
            if not free:
                continue
            among = candidates.without(taken) if len(free) < len(level) else candidates
            nexts = [(*used[: s.kind], used[s.kind] + 1, *used[s.kind + 1 :]) for s in free]
            least = _least_ends(spans, choices, free, used, limit_s, left)
            for before in filled:
                if before.held_bytes:
                    among = candidates.within(choices.share, before.held_bytes[0])
                all_ends = _ends(spans, before.end, among, limit_s, (least, spans.count - left))
                for now, device, ends in zip(nexts, free, all_ends, strict=True):
                    if ends.size:
                        found.setdefault(now, []).append((ends, device, before))
        beam = _furthest(spans, choices, found, limit_s, breadth)
    best = next(iter(beam.values()), None)
    return _cuts(best[0]) if best else None


def _least_ends(
    spans: Spans,
    choices: DeviceChoices,
    free: Sequence[StageDevice],
    used: UsedDevices,
    limit_s: float,
    left: int,
) -> Indices:
    """Return the least end for each device: the `left` fastest other devices must run the later layers."""
    if not left:
        return np.full(len(free), spans.count, np.intp)
    if not math.isfinite(limit_s):
        return np.zeros(len(free), np.intp)
    behind = choices.fastest_behind(used, left)
    rest_s = limit_s * np.array([behind[device.kind] for device in free])
    places: Indices = spans.compute_s.searchsorted((spans.compute_s[-1] - rest_s) * (1 - 1e-9))
    return places


def _ends(
    spans: Spans, start: int, among: StageDeviceTable, limit_s: float, between: tuple[Indices, int]
) -> list[Indices]:
    """Return for each device the ends in `between` at which a stage from `start` fits, in rising order.

    The upper bound leaves a layer for each later stage.
    """
    least, furthest = np.maximum(between[0], start + 1), between[1]
    if math.isfinite(limit_s):
        reach_s = spans.compute_s[start] + limit_s * among.fastest * (1 + 1e-12)
        furthest = min(furthest, int(spans.compute_s.searchsorted(reach_s, "right")) - 1)
    first = int(least.min())
    if furthest < first:
        return [_NOWHERE] * len(least)
    costs = spans.costs_of_all_s(start, first, furthest, among)
    fitting = (costs <= limit_s) & (costs != np.inf)
    return [row[low - first :].nonzero()[0] + low for row, low in zip(fitting, least.tolist(), strict=True)]


def _worth_keeping(spans: Spans, ends: Indices, largest: int) -> list[int]:
    """Select from ends in rising order: the `largest` last ones, and cheap cuts from both sides.

    From the right: shorter ends that send less than every longer one. From the left: short stages with cheap
    cuts, which help if the caller asks for more stages than are useful.
    """
    if ends.size <= largest:
        return [int(end) for end in ends[::-1]]
    cuts = spans.cut_bytes[ends]
    down, up = _records(cuts[::-1])[:_FRONT], _records(cuts)[-_FRONT:]
    kept = {*ends[-largest:].tolist(), *ends[::-1][down].tolist(), *ends[up].tolist()}
    return sorted(kept, reverse=True)


def _records(values: Vector) -> Indices:
    """Return the first index, and each index with a value below all values before it."""
    smallest = np.minimum.accumulate(values)
    return np.concatenate(([0], np.flatnonzero(smallest[1:] < smallest[:-1]) + 1))


def _furthest(
    spans: Spans,
    choices: DeviceChoices,
    found: dict[UsedDevices, list[_Extension]],
    limit_s: float,
    breadth: BeamWidth,
) -> dict[UsedDevices, list[_PartialFill]]:
    """Return the partial fills worth keeping for each set of used devices, for the least wasteful sets."""
    least_wasteful = list(found)
    if len(found) > breadth.sets:
        wasted = ((_waste_s(spans, choices, used, found[used], limit_s), used) for used in found)
        least_wasteful = [used for _, used in sorted(wasted)[: breadth.sets]]
    kept: dict[UsedDevices, list[_PartialFill]] = {}
    largest = breadth.ends * max(1, breadth.sets // max(1, len(found)))
    for used in least_wasteful:
        extensions = found[used]
        ends, first = np.unique(np.concatenate([ends for ends, _, _ in extensions]), return_index=True)
        behind = np.cumsum([ends.size for ends, _, _ in extensions])
        worthy = _worth_keeping(spans, ends, largest)
        # For each end, the first extension that has it.
        origin = behind.searchsorted(first[ends.searchsorted(worthy)], "right")
        kept[used] = []
        for end, number in zip(worthy, origin, strict=True):
            _, device, before = extensions[number]
            kept[used].append(before.with_stage(spans, device, end))
    return kept


def _waste_s(
    spans: Spans, choices: DeviceChoices, used: UsedDevices, extensions: list[_Extension], limit_s: float
) -> float:
    """Return the computing offered by the used devices in `limit_s`, less the layers to the furthest end."""
    offered = sum(count * choices.speeds.get(kind, 0.0) for kind, count in enumerate(used))
    furthest = max(int(ends[-1]) for ends, _, _ in extensions)
    return float((offered * limit_s if math.isfinite(limit_s) else 0) - spans.compute_s[furthest])


def _cuts(filled: _PartialFill) -> list[Cut]:
    cuts: list[Cut] = []
    at: _PartialFill | None = filled
    while at is not None and at.device is not None:
        cuts.append((at.device, at.end))
        at = at.before
    return cuts[::-1]
