"""Cuts a chain of layers for devices in a given order: bisect the bottleneck, fill greedily."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.replication import Group
from hvpipe.plan.span_costs import Spans
from hvpipe.specs.cluster import Cluster, Link
from hvpipe.specs.profile import Profile

RULES = ("send", "travel")
"""What a stage may not exceed. "send": computing, and the transfers behind the stage, each by itself, as in
PipeDream (Narayanan et al., SOSP 2019). "travel": computing and transfers on both sides together."""

_PRECISION, _HALVINGS = 1e-3, 60


@dataclass(frozen=True)
class _Stage:
    """A stage to fill: its devices' speed together, and the micro-batches that share its links at a time.

    Devices of one type have its times. Devices of several have the model's usual times, with their speeds for
    the whole model.
    """

    speed: float
    room_bytes: float
    link: Link
    at_once: int
    kind: str
    number: int
    """Equal stages have equal numbers."""
    sending: int
    """Stages that send alike have equal numbers."""


class ChainCutter:
    """Cuts one model for any sequence of groups of devices."""

    def __init__(self, profile: Profile, spans: Spans, cluster: Cluster) -> None:
        self._profile, self._cluster, self._spans = profile, cluster, spans
        self._least: dict[frozenset[str], float] = {}
        self._compute_of = {
            kind: [0.0, *accumulate(layer.compute_s for layer in profile.on(kind).layers)]
            for kind in {device.type for device in cluster.devices} | {""}
        }
        self._compute_s, self._cut_bytes = spans.compute_s.tolist(), spans.cut_bytes.tolist()
        self._both_bytes = spans.cut_both_bytes.tolist()
        self._kept: dict[int, array[float]] = {}
        self._stages: dict[tuple[Group, Group], _Stage] = {}
        self._numbers: dict[object, int] = {}
        self._send_s: dict[int, list[float]] = {}
        self._known: dict[object, tuple[int, ...] | None] = {}

    def cut(
        self, groups: Sequence[Group], pipelining: Pipelining | None, rule: str, *, recompute: bool = False
    ) -> tuple[int, ...] | None:
        """Return the ends of the stages with the least bottleneck under a rule, or None if none fits.

        For "send" without memory limits, the result is optimal for this order of the devices: computing grows
        with the end, and what a cut sends does not depend on its start.

        Args:
            groups: The devices of each stage.
            pipelining: For the micro-batches in flight; None to ignore memory.
            rule: One of RULES.
            recompute: Whether stages keep only their inputs for the micro-batches in flight.
        """
        stages = [self._stage(*pair) for pair in zip(groups, (*groups[1:], groups[-1]), strict=True)]
        in_flight = None if pipelining is None else pipelining.all_in_flight([len(group) for group in groups])
        key = (
            tuple(stage.number for stage in stages),
            None if in_flight is None else tuple(in_flight),
            rule,
            recompute,
        )
        if key not in self._known:
            self._known[key] = self._bisect(stages, in_flight, rule, recompute)
        return self._known[key]

    def narrow(self, groups: Sequence[Group], tolerance: float) -> tuple[int, ...] | None:
        """Return ends where little crosses, near those that give every stage the same time.

        Args:
            groups: The devices of each stage.
            tolerance: How far an end may be from there, as a share of a stage.

        Returns:
            The ends; None if a stage would have no layer.
        """
        stages = [self._stage(*pair) for pair in zip(groups, (*groups[1:], groups[-1]), strict=True)]
        reached = [*accumulate(stage.speed for stage in stages)]
        stage_s = self._compute_s[-1] / len(stages)
        ends = []
        for part in reached[:-1]:
            middle_s = self._compute_s[-1] * part / reached[-1]
            first = bisect_left(self._compute_s, middle_s - tolerance * stage_s)
            last = max(first, bisect_right(self._compute_s, middle_s + tolerance * stage_s) - 1)
            ends.append(
                min(
                    range(first, last + 1),
                    key=lambda end: (self._both_bytes[end], abs(self._compute_s[end] - middle_s)),
                )
            )
        ends.append(len(self._compute_s) - 1)
        return tuple(ends) if all(a < b for a, b in pairwise((0, *ends))) else None

    def _bisect(
        self, stages: Sequence[_Stage], in_flight: Sequence[int] | None, rule: str, recompute: bool
    ) -> tuple[int, ...] | None:
        low = self._least_s(frozenset(stage.kind for stage in stages)) / sum(stage.speed for stage in stages)
        if not low and (free := self._fill(stages, in_flight, 0.0, rule, recompute)) is not None:
            return free
        high, found = low * (1 + _PRECISION) or 1e-12, None
        for _ in range(_HALVINGS):
            found = self._fill(stages, in_flight, high, rule, recompute)
            if found is not None:
                break
            low, high = high, 2 * high
        if found is None:
            return self._fill(stages, in_flight, math.inf, rule, recompute)
        while high > low * (1 + _PRECISION):
            middle = (low + high) / 2
            ends = self._fill(stages, in_flight, middle, rule, recompute)
            if ends is None:
                low = middle
            else:
                high, found = middle, ends
        return found

    def _stage(self, group: Group, following: Group) -> _Stage:
        """Return the stage of these devices before those of the next one."""
        found = self._stages.get((group, following))
        if found is None:
            devices = [self._cluster.device(name) for name in group]
            kinds = {device.type for device in devices}
            one = len(kinds) == 1
            facts = (
                sum(device.speed if one else self._profile.speed(device) for device in devices),
                min(device.room_bytes for device in devices),
                self._cluster.link(group[0], following[0]),
                min(len(group), len(following)),
                kinds.pop() if one else "",
            )
            number, sending = (self._numbers.setdefault(of, len(self._numbers)) for of in (facts, facts[2:4]))
            found = _Stage(*facts, number, sending)
            self._stages[group, following] = found
        return found

    def _least_s(self, kinds: frozenset[str]) -> float:
        """Return the seconds of all layers, each on the kind of device that it is fastest on."""
        if kinds not in self._least:
            times_s = np.diff([self._compute_of[kind] for kind in kinds])
            self._least[kinds] = float(times_s.min(axis=0).sum())
        return self._least[kinds]

    def _fill(
        self,
        stages: Sequence[_Stage],
        in_flight: Sequence[int] | None,
        limit_s: float,
        rule: str,
        recompute: bool,
    ) -> tuple[int, ...] | None:
        """Give each stage the longest run within the limit; None if layers remain."""
        count = len(self._compute_s) - 1
        ends: list[int] = []
        start, received_s = 0, 0.0
        for number, stage in enumerate(stages):
            compute_s = self._compute_of[stage.kind]
            reach_s = compute_s[start] + limit_s * stage.speed * (1 + 1e-12)
            least = start if number + 1 < len(stages) else count - 1
            end = min(count - (len(stages) - number - 1), bisect_right(compute_s, reach_s) - 1)
            if in_flight is not None and stage.room_bytes < math.inf:
                end = self._roomy_end(stage.room_bytes, in_flight[number], start, end, recompute)
            send_s = self._sends(stage)
            while end > least:
                busy_s = send_s[end]
                if rule == "travel":
                    busy_s += received_s + (compute_s[end] - compute_s[start]) / stage.speed
                if busy_s <= limit_s:
                    break
                end -= 1
            else:
                return None
            received_s, start = send_s[end], end
            ends.append(end)
        return tuple(ends)

    def _sends(self, stage: _Stage) -> list[float]:
        """Return the seconds to send what crosses each cut, and to get its gradients back."""
        found = self._send_s.get(stage.sending)
        if found is None:
            spans, link = self._spans, stage.link
            both_s = spans.cut_messages * link.latency_s + spans.cut_both_bytes / link.bandwidth_bytes_per_s
            found = self._send_s[stage.sending] = (both_s / stage.at_once).tolist()
        return found

    def _roomy_end(self, room_bytes: float, in_flight: int, start: int, end: int, recompute: bool) -> int:
        """Return the last end up to `end` of a run that fits the memory; `start` if none does."""
        kept_bytes = self._kept_bytes(1 if recompute else in_flight)
        most_bytes = room_bytes - in_flight * self._cut_bytes[start] + kept_bytes[start]
        if end <= start or kept_bytes[end] <= most_bytes:
            return end
        return bisect_right(kept_bytes, most_bytes, start + 1, end) - 1

    def _kept_bytes(self, in_flight: int) -> array[float]:
        """Return the sums of weights and of `in_flight` micro-batches' activations up to each end."""
        found = self._kept.get(in_flight)
        if found is None:
            sums_bytes = self._spans.state_bytes + in_flight * self._spans.saved_bytes
            found = self._kept[in_flight] = array("d", sums_bytes.tolist())
        return found
