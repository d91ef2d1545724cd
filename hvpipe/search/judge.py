"""Judges layouts by the forecast of their step, within a budget of work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product

from hvpipe.errors import HvpipeError
from hvpipe.forecast.layer_sums import Crossing
from hvpipe.forecast.step import StepModel
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.placement_cost import together_s
from hvpipe.plan.replication import Group
from hvpipe.plan.span_costs import Spans
from hvpipe.search.layout import StageLayout
from hvpipe.search.options import PipeliningChoice
from hvpipe.specs.cluster import Cluster, Link
from hvpipe.specs.profile import Profile

MANY_DEVICES = 64
"""With more devices than this, a search does less for each."""

_FEW_PAIRS = 64  # of devices, whose links are looked up one by one

_GAIN = 1e-9
"""Steps that differ by less than this share count as equal."""


@dataclass(frozen=True)
class Judged:
    """A layout with its forecast.

    Args:
        layout: The layout.
        pipelining: Its schedule, and the stages that recompute.
        step_s: Seconds of the step; infinite if it was not simulated.
        missing_bytes: Bytes that devices lack, together; 0 if the layout fits.
    """

    layout: StageLayout
    pipelining: Pipelining
    step_s: float
    missing_bytes: float = 0

    @property
    def fits(self) -> bool:
        """Whether the layout was simulated, so that its memory suffices."""
        return self.missing_bytes == 0 and math.isfinite(self.step_s)

    def beats(self, other: Judged | None) -> bool:
        """Tell whether this layout is better: it lacks less memory, or it fits and is faster."""
        if other is None:
            return True
        if self.missing_bytes != other.missing_bytes:
            return self.missing_bytes < other.missing_bytes
        return self.step_s < other.step_s * (1 - _GAIN) or (
            math.isinf(other.step_s) and math.isfinite(self.step_s)
        )


class Judge:
    """Forecasts layouts of one model on one cluster, each once, and remembers the best of each mode.

    Args:
        profile: The model, with costs of one micro-batch.
        cluster: The devices and links.
        choice: What is fixed and what is open.
        budget: The work that `judge` and `promise` may do, in units of some 0.4 microseconds.
        every_device: Whether a layout must use every device, as a run on these ranks must.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        choice: PipeliningChoice,
        budget: int,
        every_device: bool = False,
    ) -> None:
        self.profile, self.cluster, self.choice, self.left = profile, cluster, choice, budget
        self.model = StepModel(profile, cluster)
        self.best: dict[str, Judged] = {}
        self.most_groups = choice.microbatches  # with more stages than micro-batches, some only wait
        self.every_device = every_device
        self.many = len(cluster.devices) > MANY_DEVICES
        self.room_bytes = {device.name: device.room_bytes for device in cluster.devices}
        self._most_chunks = max(chunks for _, chunks in choice.schedules)
        self.limited = self._most_bytes() > min(self.room_bytes.values())
        self._device = {device.name: device for device in cluster.devices}
        self._known: dict[StageLayout, Judged] = {}
        self._refused: set[StageLayout] = set()
        self._bounds: dict[StageLayout, tuple[Pipelining, float, float]] = {}
        self._links_of: dict[tuple[Group, Group], set[Link]] = {}
        self._counts_of: dict[Group, list[tuple[tuple[str, float], int]]] = {}

    def _most_bytes(self) -> float:
        """Return at least as many bytes as any layout with the usual chunks needs on a device."""
        spans, choice = Spans(self.profile), self.choice
        stashed = float(spans.saved_bytes[-1]) + self._most_chunks * float(spans.cut_bytes.max())
        if any(tensor.users[-1] > tensor.maker + 1 for tensor in self.profile.tensors):  # see waiting_bytes
            stashed += self._most_chunks * float((spans.cut_both_bytes - spans.cut_bytes).max())
        recomputed = float(spans.saved_bytes[-1])
        return float(spans.state_bytes[-1]) + choice.microbatches * stashed + recomputed

    def judge(self, layout: StageLayout, rival: Judged | None = None) -> Judged | None:
        """Forecast a layout; None if it cannot run or beat the rival, or if the budget is spent."""
        if layout in self._known:
            return self._known[layout]
        if (
            self.left <= 0
            or layout in self._refused
            or (self.every_device and len(layout.devices) < len(self._device))
        ):
            return None
        try:
            found = self._forecast(layout, self._pipelining(layout), rival)
        except HvpipeError:  # for example, a replica gets no micro-batch
            self._refused.add(layout)
            found = None
        if found is not None:
            self._known[layout] = found
            mode = layout.mode
            if found.fits and found.beats(self.best.get(mode)):
                self.best[mode] = found
        return found

    def fastest(self, mode: str) -> list[Judged]:
        """Return the layouts of a mode that were simulated, the fastest first."""
        of_mode = (one for one in self._known.values() if one.fits and one.layout.mode == mode)
        return sorted(of_mode, key=lambda one: one.step_s)

    def _forecast(self, layout: StageLayout, pipelining: Pipelining, rival: Judged | None) -> Judged | None:
        pipelining, missing_bytes, bound_s = self._bounded(layout, pipelining)
        if missing_bytes:
            return Judged(layout, pipelining, math.inf, missing_bytes)
        if rival is not None and rival.fits and bound_s >= rival.step_s:
            return None
        self.left -= self.work_of(layout)
        return Judged(layout, pipelining, self.model.step(layout.placement, pipelining).step_s)

    def work_of(self, layout: StageLayout) -> int:
        """Return the work of simulating a layout, in the unit of the budget."""
        return 100 + 60 * len(layout.devices) + 8 * len(layout.ends) * self.choice.microbatches

    def _pipelining(self, layout: StageLayout) -> Pipelining:
        how = Pipelining(
            layout.schedule, self.choice.microbatches, self.choice.fixed_recompute, layout.chunks
        )
        if how.least_stages > len(layout.ends):
            raise HvpipeError(f"recompute should name stages of the layout. Received: {how.recompute}")
        return how

    def promise(self, layout: StageLayout) -> tuple[float, float]:
        """Return a key that sorts layouts before they are simulated: missing bytes, and a bound of the step.

        Most steps are less than 1.1 times their bound.
        """
        if layout in self._refused or max(map(len, layout.groups)) > self.choice.microbatches:
            return math.inf, math.inf
        try:
            _, missing_bytes, bound_s = self._bounded(layout, self._pipelining(layout))
        except HvpipeError:  # see `judge`
            return math.inf, math.inf
        return missing_bytes, bound_s

    def _bounded(self, layout: StageLayout, pipelining: Pipelining) -> tuple[Pipelining, float, float]:
        """Return the pipelining with what recomputes, the bytes that are missing, and a bound of the step."""
        if layout not in self._bounds:
            self.left -= 27 * len(layout.devices)
            pipelining, missing_bytes = self._with_memory(layout, pipelining)
            bound_s = math.inf if missing_bytes else self.bound_s(layout, pipelining)
            self._bounds[layout] = pipelining, missing_bytes, bound_s
        return self._bounds[layout]

    def _with_memory(self, layout: StageLayout, pipelining: Pipelining) -> tuple[Pipelining, float]:
        """Let stages recompute where memory is short, if that is open; return what is still missing."""
        if not self.limited and layout.chunks <= self._most_chunks:
            return pipelining, 0
        missing = self._missing(layout, pipelining)
        if self.choice.recompute != "auto" or not missing:
            return pipelining, sum(missing.values())
        # Of several stages on a device the first recomputes first: it has the most micro-batches in flight.
        stages: set[int] = set()
        for chunk in range(layout.chunks):
            first = chunk * len(layout.groups)
            stages |= {
                first + number
                for number, group in enumerate(layout.groups)
                if any(name in missing for name in group)
            }
            pipelining = replace(pipelining, recompute=tuple(sorted(stages)))
            missing = self._missing(layout, pipelining)
            if not missing:
                break
        return pipelining, sum(missing.values())

    def _missing(self, layout: StageLayout, pipelining: Pipelining) -> dict[str, float]:
        if layout.chunks == 1:
            most_bytes = self.model.most_memory_bytes(layout.placement, pipelining)
            missing = {
                name: most - self.room_bytes[name]
                for most, names in zip(most_bytes, layout.groups, strict=True)
                for name in names
                if most > self.room_bytes[name]
            }
            if not missing or (self.many and all(map(self.model.are_equal, layout.groups))):
                return missing
        if self.many:  # it makes the schedule, which takes long
            self.left -= self.work_of(layout) // 2
        sizes = self.model.memory_bytes(layout.placement, pipelining)
        return {
            name: size - self.room_bytes[name]
            for name, size in zip(layout.devices, sizes, strict=True)
            if size > self.room_bytes[name]
        }

    def busy_s(self, layout: StageLayout, pipelining: Pipelining) -> list[float]:
        """Return the seconds that each group of devices computes in a step, at least."""
        groups = layout.groups
        busy_s = [0.0] * len(groups)
        for stage, (start, end) in enumerate(pairwise((0, *layout.ends))):
            number = stage % len(groups)
            times_s = self._times_s(groups[number], start, end, pipelining.recomputes(stage))
            busy_s[number] += _whole_s(times_s, pipelining)
        return busy_s

    def bound_s(self, layout: StageLayout, pipelining: Pipelining) -> float:
        """Return seconds that the step takes at least, whichever group of devices it waits for.

        A group waits for its first input and computes. Then its last gradients travel on, if the backward has
        one part, while its weights are summed and updated.
        """
        groups = layout.groups
        inputs: list[list[tuple[int, Crossing]]] = [[] for _ in layout.ends]
        for (maker, user), crossing in self.model.sums.crossings(layout.ends).items():
            inputs[user].append((maker, crossing))
        first_s: list[float] = []  # when each stage has its first output, at the earliest
        rest_s: list[float] = []  # from the last gradient at a stage to the last backward, at least
        waits_s, ends_s = [math.inf] * len(groups), [math.inf] * len(groups)
        busy_s, updates_s = [0.0] * len(groups), [0.0] * len(groups)
        for stage, (start, end) in enumerate(pairwise((0, *layout.ends))):
            number = stage % len(groups)
            group = groups[number]
            head_s = tail_s = 0.0
            for maker, crossing in inputs[stage]:
                links = self._links(groups[maker % len(groups)], group)
                head_s = max(head_s, first_s[maker] + min(crossing.time_s(link, False) for link in links))
                tail_s = max(tail_s, rest_s[maker] + min(crossing.time_s(link, True) for link in links))
            times_s = self._times_s(group, start, end, pipelining.recomputes(stage))
            first_s.append(head_s + min(forward_s for forward_s, _ in times_s))
            rest_s.append(tail_s + min(backward_s for _, backward_s in times_s))
            waits_s[number], ends_s[number] = min(waits_s[number], head_s), min(ends_s[number], tail_s)
            busy_s[number] += _whole_s(times_s, pipelining)
            updates_s[number] += self._update_s(group, start, end)
        if layout.schedule == "zb-h1":  # the last part of the backward may be one that no stage waits for
            ends_s = [0.0] * len(groups)
        return max(
            wait_s + of_group_s + max(end_s, update_s)
            for wait_s, of_group_s, end_s, update_s in zip(waits_s, busy_s, ends_s, updates_s, strict=True)
        )

    def _links(self, ones: Group, others: Group) -> set[Link]:
        """Return the links between two groups."""
        found = self._links_of.get((ones, others))
        if found is None:
            found = {self.cluster.link(a, b) for a, b in self._pairs(ones, others)}
            self._links_of[ones, others] = found
        return found

    def _pairs(self, ones: Group, others: Group) -> Iterable[tuple[str, str]]:
        """Return pairs of a device of each group, with all links between the groups among them."""
        if self.cluster.measured or len(ones) * len(others) < _FEW_PAIRS:
            return product(ones, others)
        # Links between two hosts depend on the kinds of hosts. Two hosts of a kind stand for all of them, so
        # that one of them is not the other group's.
        mine, theirs = self._by_host(ones), self._by_host(others)
        shared = {self._kind(names[0]): host for host, names in mine.items() if host in theirs}.values()
        inside = [product(mine[host], theirs[host]) for host in shared]
        return chain(product(self._two_of_each(mine), self._two_of_each(theirs)), *inside)

    def _by_host(self, group: Group) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in group:
            found.setdefault(self.cluster.host_of(name).name, []).append(name)
        return found

    def _two_of_each(self, by_host: Mapping[str, Sequence[str]]) -> list[str]:
        """Return a device of two hosts of each kind, or of one where there is one."""
        found: dict[tuple[Link, Link, str], list[str]] = {}
        for names in by_host.values():
            of_kind = found.setdefault(self._kind(names[0]), [])
            if len(of_kind) < 2:
                of_kind.append(names[0])
        return [name for names in found.values() for name in names]

    def _kind(self, device: str) -> tuple[Link, Link, str]:
        host = self.cluster.host_of(device)
        return host.link, host.inner, host.rack

    def _update_s(self, group: Group, start: int, end: int) -> float:
        """Return the seconds that summing and updating the weights of a run of layers takes at least."""
        sums, speed = self.model.sums, max(speed for (_, speed), _ in self._counts(group))
        reduce_s = 0.0
        if len(group) > 1:
            ring, sizes_bytes = self.model.ring(group), sums.bucket_bytes(start, end)
            reduce_s = ring.least_s(ring.link, sum(sizes_bytes), len(sizes_bytes))
        return reduce_s + sums.whole_update_s(start, end) / speed

    def _times_s(self, group: Group, start: int, end: int, recompute: bool) -> list[tuple[float, float]]:
        """Return each device's seconds of forward and backward for a run of layers, with their `action_s`."""
        found: list[tuple[float, float]] = []
        action_s = self.cluster.action_s
        for (kind, speed), count in self._counts(group):
            sums = self.model.sums.on(kind)
            forward_s = (sums.forward_s[end] - sums.forward_s[start]) / speed
            backward_s = (sums.backward_s[end] - sums.backward_s[start]) / speed
            again_s = forward_s if recompute else 0.0
            found += [(forward_s + action_s, backward_s + again_s + action_s)] * count
        return found

    def _counts(self, group: Group) -> Sequence[tuple[tuple[str, float], int]]:
        """Return the types and speeds of a group's devices, each with the number of such devices."""
        found = self._counts_of.get(group)
        if found is None:
            devices = map(self._device.__getitem__, group)
            found = self._counts_of[group] = list(Counter((one.type, one.speed) for one in devices).items())
        return found


def _whole_s(times_s: Sequence[tuple[float, float]], pipelining: Pipelining) -> float:
    """Return the seconds that devices compute for a stage's whole batch together, at least."""
    return pipelining.microbatches * together_s([forward_s + backward_s for forward_s, backward_s in times_s])
