"""The optimum: by hand, against every possible plan, and never worse on better hardware."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

import pytest
from hypothesis import given, settings

from bench.planning.brute_force import random_case
from hvpipe.errors import HvpipeError, PlanError
from hvpipe.plan.exact import exact
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Cluster, Device, Host, Link, equal_cluster
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile
from model_graphs import chain, clusters, profiles

quickly = settings(max_examples=25)


def every_plan(profile: Profile, cluster: Cluster, stages: int) -> list[float]:
    """Return the bottlenecks of all contiguous plans that fit, by trying each."""
    found = []
    count = len(profile.layers)
    for order in permutations([device.name for device in cluster.devices], stages):
        for cuts in combinations(range(1, count), stages - 1):
            runs = [range(a, b) for a, b in pairwise((0, *cuts, count))]
            placement = [((name,), run) for name, run in zip(order, runs, strict=True)]
            plan = Plan.of(profile, cluster, placement, Pipelining(), "")
            if not plan.shortages(cluster):
                found.append(plan.bottleneck_s)
    return found


def test_the_optimum_by_hand() -> None:
    # 5 + 1 | 4 + 3 is the best of three cuts. With speeds 1 and 1/2 it is 5 + 1 + 4 | 3 / 0.5.
    assert exact(chain(5, 1, 4, 3), equal_cluster(2), 2).bottleneck_s == pytest.approx(7)
    assert exact(chain(5, 1, 4, 3), equal_cluster(2, speeds=(1, 0.5)), 2).bottleneck_s == pytest.approx(10)


def test_a_given_order_of_devices() -> None:
    cluster = equal_cluster(2, speeds=(1.0, 2.0))
    plan = exact(chain(6, 3), cluster, 2, order=["h0", "h1"])
    assert [stage.device for stage in plan.stages] == ["h0", "h1"]
    assert plan.bottleneck_s == pytest.approx(6)
    assert exact(chain(6, 3), cluster, 2).bottleneck_s == pytest.approx(3)
    with pytest.raises(HvpipeError, match=r"Received: order=\['h0', 'h9'\]"):
        exact(chain(6, 3), cluster, 2, order=["h0", "h9"])


def test_an_order_that_fits_is_mentioned() -> None:
    """The first stage keeps two micro-batches, 20 bytes, which only h1 can hold.

    Regression: the message mentioned no other order.
    """
    cluster = Cluster((Host("h0", (Device("h0", 1.0, 10),)), Host("h1", (Device("h1", 1.0, 20),))))
    profile = chain(3, 3, saved_bytes=10)
    assert exact(profile, cluster, 2, order=["h1", "h0"])
    with pytest.raises(
        PlanError, match=r"In this order it does not, but another order fits. Received: order=\['h0', 'h1'\]"
    ):
        exact(profile, cluster, 2, order=["h0", "h1"])


@quickly
@given(profiles(most=8), clusters())
def test_no_plan_is_better(profile: Profile, cluster: Cluster) -> None:
    for stages in (2, min(3, len(cluster.devices))):
        found = every_plan(profile, cluster, stages)
        if not found:
            with pytest.raises(PlanError, match="may use"):
                exact(profile, cluster, stages)
        else:
            assert exact(profile, cluster, stages).bottleneck_s == pytest.approx(min(found))


def with_skips(seed: int) -> tuple[Profile, Cluster]:
    """Return a random case on unequal links, in which a quarter of the pairs of layers are joined."""
    request, draw = random_case(seed, 4 + seed % 4, 3 + seed % 2), random.Random(seed)
    profile, layers = request.profile, range(len(request.profile.layers))
    skips = {(a, b) for a, b in combinations(layers, 2) if draw.random() < 0.25}
    return replace(profile, edges=tuple(sorted({*profile.edges, *skips}))), request.cluster


@pytest.mark.parametrize("seed", range(16))
def test_no_plan_is_better_where_links_differ_and_tensors_skip_stages(seed: int) -> None:
    """Regression: such a tensor was charged to the links of neighbours, and greedy could be 1.47x better."""
    profile, cluster = with_skips(seed)
    for stages in (2, 3):
        if found := every_plan(profile, cluster, stages):
            plan = exact(profile, cluster, stages)
            assert (plan.method, plan.bottleneck_s) == ("exact", pytest.approx(min(found)))


def test_a_search_that_stops_early_says_how_good_its_plan_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hvpipe.plan.exact"], "_EFFORT", 20)
    stopped = 0
    for seed in range(20):
        profile, cluster = with_skips(seed)
        if found := every_plan(profile, cluster, 3):
            plan = exact(profile, cluster, 3)
            if bound := re.fullmatch(r"exact within (.+)%", plan.method):
                stopped += 1
                assert plan.bottleneck_s <= min(found) * (1 + float(bound[1]) / 100) * (1 + 1e-9)
    assert stopped > 0


def test_a_search_that_stops_early_says_what_memory_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an OverflowError."""
    monkeypatch.setattr(sys.modules["hvpipe.plan.exact"], "_EFFORT", 20)
    for seed in range(20):
        profile, cluster = with_skips(seed)
        hosts = [
            replace(host, devices=tuple(replace(device, memory_bytes=1) for device in host.devices))
            for host in cluster.hosts
        ]
        with pytest.raises(PlanError, match="memory of every device"):
            exact(profile, replace(cluster, hosts=tuple(hosts)), 3)


@quickly
@given(profiles())
def test_better_hardware_is_never_worse(profile: Profile) -> None:
    times_s = [
        exact(profile, equal_cluster(3, Link(0.01, rate), speeds=(speed, 0.5)), 3).bottleneck_s
        for rate, speed in ((10.0, 0.5), (100.0, 0.5), (100.0, 1.0), (1000.0, 2.0))
    ]
    assert times_s == sorted(times_s, reverse=True)


def long_chain(count: int) -> Profile:
    draw = random.Random(count)
    layers = (
        LayerCost(f"l{i}", draw.random(), draw.random(), 1, output_bytes=draw.randrange(9))
        for i in range(count)
    )
    return Profile(tuple(layers), tuple((i, i + 1) for i in range(count - 1)))


def test_no_moved_cut_of_thousands_of_layers_is_better() -> None:
    profile, how = long_chain(3000), Pipelining()
    cluster = equal_cluster(5, Link(0.0, 10.0), speeds=(1.0, 0.5))
    plan = exact(profile, cluster, 5)
    placement = plan.placement(profile)
    for cut, by in product(range(4), (-2, -1, 1, 2)):
        ends = [places[-1] + 1 for _, places in placement]
        ends[cut] += by
        runs = [range(*pair) for pair in pairwise((0, *ends))]
        moved = [(names, run) for (names, _), run in zip(placement, runs, strict=True)]
        other = Plan.of(profile, cluster, moved, how, "")
        assert plan.bottleneck_s <= other.bottleneck_s * (1 + 1e-9)
    with pytest.raises(PlanError, match="may use"):
        exact(long_chain(300), equal_cluster(5, memory_bytes=100), 5)


def test_limits_are_named() -> None:
    speeds = tuple(1 / i for i in range(1, 14))
    with pytest.raises(HvpipeError, match="at most 4995 sets of devices with 1000 layers"):
        exact(long_chain(1000), equal_cluster(13, speeds=speeds), 12)
    hosts = tuple(Host(f"h{i}", (Device(f"h{i}"),), Link(i)) for i in range(8))
    with pytest.raises(HvpipeError, match="at most 2000 orders"):
        exact(chain(*[1] * 8), Cluster(hosts), 8)
