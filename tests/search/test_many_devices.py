"""Layouts of more than 64 devices: each stage on a host, few hosts on slow links."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.placement_cost import stage_costs
from hvpipe.search.judge import Judge
from hvpipe.search.options import PipeliningChoice
from hvpipe.search.search import BUDGET, search
from hvpipe.specs.cluster import Cluster, Device, Host, Link, equal_cluster
from model_graphs import chain


def _hosts_of_8(hosts: int, rate: float) -> Cluster:
    return Cluster(
        tuple(
            Host(
                f"h{host}",
                tuple(Device(f"h{host}:{i}") for i in range(8)),
                Link(1e-5, rate),
                Link(1e-5, 1e11),
            )
            for host in range(hosts)
        )
    )


def test_a_stage_on_each_host_of_many() -> None:
    """Regression: only variants of few cuts were simulated, and the plan took 10.4 s."""
    profile = chain(*[0.1 + 0.01 * (i % 5) for i in range(64)], weight_bytes=10**8, output_bytes=10**6)
    choice = PipeliningChoice(microbatches=32)
    found = search(profile, _hosts_of_8(16, 1e9), choice, budget=BUDGET // 10)["hybrid"]
    assert [{name.split(":")[0] for name in group} for group in found.layout.groups] == [
        {f"h{host}"} for host in range(16)
    ]
    assert found.step_s < 6.4


def test_many_devices_need_not_all_be_used() -> None:
    """Regression: with slow links, plans were up to 1.5x slower than with stages on few hosts, cut where
    little crosses."""
    layers = chain(*[0.1] * 64, weight_bytes=10**8, output_bytes=10**7).layers
    narrow = [replace(one, output_bytes=10**5) if i % 8 == 6 else one for i, one in enumerate(layers)]
    profile = replace(chain(*[0.1] * 64), layers=tuple(narrow))
    choice = PipeliningChoice(microbatches=32)
    found = search(profile, _hosts_of_8(16, 1e8), choice, budget=BUDGET // 10)["hybrid"]
    assert len(found.layout.devices) < 128
    assert all(end % 8 == 7 for end in found.layout.ends[:-1])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "zb-h1"])
@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 1, 2), (2, 4, 1), (4, 4)])
def test_memory_of_equal_replicas_is_exact_without_a_schedule(schedule: str, counts: tuple[int, ...]) -> None:
    profile = chain(*[3] * 4, output_bytes=10, saved_bytes=100, weight_bytes=1000)
    profile = replace(profile, edges=(*profile.edges, (0, 2), (0, 3), (1, 3)))
    judge = Judge(profile, equal_cluster(8), PipeliningChoice(microbatches=9), 10**6)
    ends = [*accumulate(counts)]
    spans = list(pairwise((0, *ends)))
    groups = [tuple(f"h{i}" for i in range(*span)) for span in spans]
    last = len(counts) - 1
    placement = [(group, range(i, i + 1 if i < last else 4)) for i, group in enumerate(groups)]
    for recompute in (False, True):
        how = Pipelining(schedule, 9, recompute)
        sizes = judge.model.memory_bytes(placement, how)
        of_stages = [max(sizes[first:end]) for first, end in spans]
        assert judge.model.most_memory_bytes(placement, how) == of_stages
        costs = stage_costs(profile, judge.cluster, placement, how)
        assert [cost.memory_bytes for cost in costs] == of_stages
