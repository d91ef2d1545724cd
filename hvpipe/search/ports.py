"""How long the ports of hosts and racks are busy in a step: where links are slow, the step takes as long."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from hvpipe.forecast.step import StepModel
from hvpipe.plan.replication import Group
from hvpipe.search.layout import StageLayout
from hvpipe.specs.cluster import Link, Port


class PortTimes:
    """Adds up what transfers and all-reduces need of each port.

    Args:
        model: Of the profile and the cluster.
        microbatches: Micro-batches of a step.
    """

    def __init__(self, model: StepModel, microbatches: int) -> None:
        self._model, self._microbatches = model, microbatches
        self._shares: dict[tuple[Group, Group], Mapping[tuple[Port, Link], float]] = {}

    def busiest_s(self, layout: StageLayout) -> float:
        """Return the seconds of the busiest port, if replicas have equal shares."""
        groups, sums = layout.groups, self._model.sums
        busy_s: dict[Port, float] = defaultdict(float)
        for (maker, user), crossing in sums.crossings(layout.ends).items():
            pair = groups[maker % len(groups)], groups[user % len(groups)]
            for back, (source, target) in ((False, pair), (True, pair[::-1])):
                for (port, link), share in self._ports(source, target).items():
                    busy_s[port] += share * self._microbatches * crossing.time_s(link, back)
        start = 0
        for stage, end in enumerate(layout.ends):
            group = groups[stage % len(groups)]
            if len(group) > 1:
                ring = self._model.ring(group)
                sizes_bytes = sums.bucket_bytes(start, end)
                for port, link in ring.ports:
                    busy_s[port] += ring.least_s(link, sum(sizes_bytes), len(sizes_bytes))
            start = end
        return max(busy_s.values(), default=0.0)

    def _ports(self, source: Group, target: Group) -> Mapping[tuple[Port, Link], float]:
        """Return the ports between two groups, each with its share of the micro-batches."""
        found = self._shares.get((source, target))
        if found is None:
            turns = max(len(source), len(target))
            shares: dict[tuple[Port, Link], float] = defaultdict(float)
            for turn in range(turns):
                one, other = source[turn % len(source)], target[turn % len(target)]
                for port in self._model.cluster.ports(one, other):
                    shares[port] += 1 / turns
            found = self._shares[source, target] = shares
        return found
