"""The layouts that a search starts from: cuts by several rules for many sequences of devices."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hvpipe.plan.baselines import BASELINES
from hvpipe.plan.chain_cuts import RULES, ChainCutter
from hvpipe.plan.greedy import fitting
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.replication import Group, groupings
from hvpipe.plan.span_costs import Spans
from hvpipe.search.judge import Judge
from hvpipe.search.layout import StageLayout, even_ends

# With more devices than this, only some numbers of stages are tried, and the greedy partitioner, whose time
# grows with devices times layers, is left out.
_FEW, _GREEDY_DEVICES, _GREEDY_STAGES = 8, 16, 64
_CUT_OF_MANY = 140  # the work of the cuts for a stage, as `Judge` counts it
# With many devices, cuts may lie so far from where all stages take equally long, as a share of a stage.
_TOLERANCES = (0.02, 0.1, 0.3)
_BASELINES = ("m_topo",)


class Starts:
    """Makes the layouts to start from.

    Args:
        judge: The judge, for its profile, cluster and choice.
        stages: The number of stages if it is fixed; with chunks, of all of them.
        modes: The modes to start from: "pipeline", "hybrid".
    """

    def __init__(self, judge: Judge, stages: int | None, modes: Sequence[str]) -> None:
        self._judge, self._profile, self._choice = judge, judge.profile, judge.choice
        self._cluster = judge.profile.levelled(judge.cluster)
        self._stages, self._modes, self._most_groups = stages, modes, judge.most_groups
        self._many = judge.many
        self.spans = Spans(judge.profile)
        self.cutter = ChainCutter(judge.profile, self.spans, judge.cluster)
        self._relaxed = judge.limited and judge.choice.recompute == "auto"

    def layouts(self) -> Iterator[StageLayout]:
        """Yield the layouts of every schedule whose number of stages is possible."""
        seen = set()
        # With many devices, other schedules are only tried on the best layouts.
        schedules = self._choice.schedules[:1] if self._many else self._choice.schedules
        for name, chunks in schedules:
            how = Pipelining(name, self._choice.microbatches, self._choice.fixed_recompute, chunks)
            for groups in self._all_groups(chunks):
                if self._many:  # cutting for many devices takes seconds
                    self._judge.left -= _CUT_OF_MANY * len(groups)
                    if self._judge.left <= 0:
                        return
                for layout in self.cut(groups, how):
                    if layout not in seen:
                        seen.add(layout)
                        yield layout

    def cut(self, groups: Sequence[Group], how: Pipelining) -> Iterator[StageLayout]:
        """Yield cuts for the groups by every rule, if memory is scarce also with recomputation."""
        stages = [*groups] * how.chunks
        if len(stages) > len(self._profile.layers):
            return
        again = how.recompute is True
        for rule in RULES:
            for recompute in dict.fromkeys((again, self._relaxed or again)):
                if ends := self.cutter.cut(stages, how, rule, recompute=recompute):
                    yield StageLayout(tuple(groups), ends, how.schedule, how.chunks)
        for tolerance in _TOLERANCES if self._many else ():
            if ends := self.cutter.narrow(stages, tolerance):
                yield StageLayout(tuple(groups), ends, how.schedule, how.chunks)
        yield StageLayout(
            tuple(groups), even_ends(len(self._profile.layers), len(stages)), how.schedule, how.chunks
        )
        if how.chunks == 1 and max(map(len, groups)) == 1:
            yield from self._published(groups, how)

    def _published(self, groups: Sequence[Group], how: Pipelining) -> Iterator[StageLayout]:
        """Yield the cuts of baselines, which may use fewer devices."""
        devices = [self._cluster.device(name) for (name,) in groups]
        for name in _BASELINES:
            placed = BASELINES[name](self._profile, self._cluster, devices, random.Random(0))
            used = [(group, places) for group, places in placed if places]
            if self._stages in (None, len(used)):
                ends = tuple(places[-1] + 1 for _, places in used)
                yield StageLayout(tuple(group for group, _ in used), ends, how.schedule)

    def greedy(self) -> Iterator[StageLayout]:
        """Yield the greedy partitioner's plans, which also search the order of unequal devices."""
        name, chunks = self._choice.schedules[0]
        devices = len(self._cluster.devices)
        if (self._many or devices > _GREEDY_DEVICES) and not 0 < (self._stages or 0) <= _GREEDY_STAGES:
            return
        for again in dict.fromkeys(
            (self._choice.fixed_recompute, self._relaxed or self._choice.fixed_recompute)
        ):
            how = Pipelining(name, self._choice.microbatches, again, chunks)
            for count in self._counts(len(self._cluster.devices), chunks):
                if count * chunks < how.least_stages:
                    continue
                plan = fitting(self._profile, self._cluster, count * chunks, how, self.spans)
                if plan is not None:
                    placement = plan.placement(self._profile)
                    groups = tuple(devices for devices, _ in placement[:count])
                    yield StageLayout(groups, tuple(places[-1] + 1 for _, places in placement), name, chunks)

    def _all_groups(self, chunks: int) -> Iterator[list[Group]]:
        """Yield the devices of each stage, for each number of stages and order of devices to try."""
        devices = len(self._cluster.devices)
        if self._many and "hybrid" in self._modes and chunks == 1:
            hosts = len(self._cluster.hosts)
            for count in self._counts(devices, chunks):
                if self._stages is not None or count in (hosts, 1 << (count.bit_length() - 1)):
                    yield from self._on_hosts(count)
        for count in self._counts(devices, chunks):
            if "pipeline" in self._modes:
                for names in self._orders(count):
                    yield [(name,) for name in names]
            if "hybrid" in self._modes and chunks == 1:
                yield from groupings(self._cluster, count)
                if devices > count and devices % count and devices - count < self._choice.microbatches:
                    names = [device.name for device in self._cluster.devices]
                    ends = [0, *even_ends(devices, count)]
                    yield [tuple(names[a:b]) for a, b in pairwise(ends)]

    def _on_hosts(self, count: int) -> Iterator[list[Group]]:
        """Yield ways to give each stage the devices of a part of a host, of a host, or of several hosts.

        They leave devices idle: `groupings` has those that use all. Hosts with more speed come first.
        """
        hosts = sorted(self._cluster.hosts, key=lambda host: -sum(one.speed for one in host.devices))
        size = len(hosts[0].devices)
        names = [one.name for host in hosts if len(host.devices) == size for one in host.devices]
        each = size
        while each % 2 == 0 and each > 2:
            each //= 2
        while each < len(names) // count and each <= self._choice.microbatches:
            if each > 1:
                yield [tuple(names[stage * each : (stage + 1) * each]) for stage in range(count)]
            each *= 2

    def _orders(self, count: int) -> list[list[str]]:
        """Return orders of `count` devices: as listed, the fastest first and last, the roomiest first."""
        listed = list(self._cluster.devices)
        fastest = sorted(listed, key=lambda device: -device.speed)
        roomiest = sorted(listed, key=lambda device: -device.room_bytes)
        found = [order[:count] for order in (listed, fastest, roomiest)]
        found.append(found[1][::-1])
        names = [[device.name for device in order] for order in found]
        return [order for place, order in enumerate(names) if order not in names[:place]]

    def _counts(self, devices: int, chunks: int) -> list[int]:
        """Return the numbers of devices, or groups of devices, to try."""
        most = min(devices, len(self._profile.layers) // chunks, self._most_groups)
        if self._stages is not None:
            count, rest = divmod(self._stages, chunks)
            return [count] if rest == 0 and 1 <= count <= most else []
        if most <= _FEW:
            return list(range(1, most + 1))
        hosts = len(self._cluster.hosts)
        wanted = {2**power for power in range(most.bit_length())} | {most, hosts, 3, 6, 12}
        wanted |= {devices // replicas for replicas in range(2, math.isqrt(devices) + 1)}
        return sorted(count for count in wanted if 1 <= count <= most)
