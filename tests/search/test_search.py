"""The search against brute force: every cut, order, replica and schedule of small random cases."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.planning.brute_force import (
    fastest_baseline_s,
    planned,
    random_case,
    shortest_data_parallel_s,
    shortest_s,
)
from hvpipe.commands.plan_request import PlanRequest
from hvpipe.errors import PlanError
from hvpipe.forecast.data_parallel import DataParallelSteps, forecast_data_parallel
from hvpipe.forecast.pipeline import forecast
from hvpipe.plan.baselines import BASELINES, baseline, is_random
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.stage_plan import Plan
from hvpipe.search.choice import candidate, choose, plan_for_every_device
from hvpipe.search.data_devices import data_devices
from hvpipe.search.judge import Judge
from hvpipe.search.layout import StageLayout
from hvpipe.search.options import PipeliningChoice
from hvpipe.search.search import BUDGET, faster_halves, search
from hvpipe.specs.cluster import Cluster, Device, Host, Link, Rack, equal_cluster
from model_graphs import MODELS, chain, model


@pytest.mark.parametrize("seed", range(16))
def test_no_plan_of_a_small_case_is_faster(seed: int) -> None:
    """Also local moves alone, on which larger cases rely, come within 3 %."""
    request = random_case(seed, layers=3 + seed % 4, devices=2 + seed % 7 % 2)
    best_s, result = shortest_s(request), planned(request)
    if result is None:
        assert math.isinf(best_s)
        return
    assert result.chosen.step_s <= min(best_s, fastest_baseline_s(result)) * (1 + 1e-9)
    by_moves = planned(request, moves=True, with_baselines=False)
    assert by_moves is not None
    assert by_moves.chosen.step_s <= 1.03 * best_s


@pytest.mark.parametrize("seed", range(4))
def test_the_judge_says_what_the_forecast_says(seed: int) -> None:
    request = random_case(100 + seed, 7, 3)
    profile, cluster = request.profile, request.cluster
    for one in search(profile, cluster, request.choice).values():
        plan = Plan.of(profile, cluster, one.layout.placement, one.pipelining, "search")
        step = forecast(plan, profile, cluster)
        assert step.step_s == pytest.approx(one.step_s, rel=1e-9)
        assert step.shortages(cluster) == {}
        judge = Judge(profile, cluster, request.choice, 10**6)
        assert judge.bound_s(one.layout, one.pipelining) <= one.step_s * (1 + 1e-9)


def test_a_branch_does_not_wait_for_the_stage_before_it() -> None:
    """Regression: the bound had the second stage wait for the first, whose output only the third takes."""
    profile = replace(chain(3, 30, 0.003), edges=((0, 2), (1, 2)))
    cluster, choice = equal_cluster(3), PipeliningChoice("1f1b", 4)
    judge, layout = (
        Judge(profile, cluster, choice, 10**6),
        StageLayout((("h0",), ("h1",), ("h2",)), (1, 2, 3), "1f1b"),
    )
    one = judge.judge(layout)
    assert one is not None
    assert 120 <= judge.bound_s(layout, one.pipelining) <= one.step_s < 120.1


def test_one_micro_batch_over_devices_that_are_each_fast_on_some_layers() -> None:
    """Regression: with one micro-batch only one stage was looked at. Alone, either device takes 33 s."""
    profile = chain(30, 3)
    x_s = ((1.0, 2.0), (10.0, 20.0))
    layers = [replace(one, time_s={"x": of_x}) for one, of_x in zip(profile.layers, x_s, strict=True)]
    cluster = Cluster((Host("a", (Device("a"),)), Host("b", (Device("b", type="x"),))))
    best = choose(replace(profile, layers=tuple(layers)), cluster, PipeliningChoice("1f1b", 1))
    assert best.step_s == pytest.approx(6)


def test_a_small_budget_suffices_for_a_plan_of_many_devices() -> None:
    """Regression: bounds of the starts used it up, and hybrids were not simulated."""
    request = random_case(2, layers=40, devices=24)
    found = search(request.profile, request.cluster, PipeliningChoice(microbatches=32), budget=BUDGET // 11)
    assert len(found["pipeline"].layout.devices) >= 12
    assert len(found["hybrid"].layout.devices) >= 12


def test_many_micro_batches_on_many_devices() -> None:
    """Regression: making the starts used up the budget, so that none was simulated."""
    hosts = (
        Host(f"h{host}", tuple(Device(f"h{host}:{i}", memory_bytes=16 * 10**9) for i in range(8)))
        for host in range(16)
    )
    choice = PipeliningChoice(microbatches=512)
    found = search(
        chain(*[0.003 + 0.001 * (i % 5) for i in range(200)]),
        Cluster(tuple(hosts)),
        choice,
        budget=BUDGET // 10,
    )
    assert len(found["hybrid"].layout.devices) == 128
    assert found["hybrid"].step_s < found["pipeline"].step_s


@settings(max_examples=30)
@given(st.data())
def test_quick_answers_of_the_judge_are_those_of_all_pairs_and_of_the_schedule(data: st.DataObject) -> None:
    """Links between many devices are found by the kinds of hosts, and most memory without a schedule."""
    racks = (Rack("r0", Link(1e-4, 1e9)), Rack("r1", Link(1e-4, 2e9)))
    hosts = []
    for number in range(data.draw(st.integers(2, 5))):
        link, inner = (Link(1e-4, data.draw(st.sampled_from((1e8, 1e9)))) for _ in range(2))
        speeds = data.draw(st.lists(st.sampled_from((1.0, 2.0)), min_size=4, max_size=6))
        devices = tuple(Device(f"h{number}:{i}", speed) for i, speed in enumerate(speeds))
        hosts.append(Host(f"h{number}", devices, link, inner, data.draw(st.sampled_from(("", "r0", "r1")))))
    cluster = Cluster(tuple(hosts), racks=racks)
    profile = random_case(1, 6, 2).profile
    profile = replace(profile, edges=tuple(sorted({*profile.edges, (0, 3), (1, 5)})))  # skips of stages
    judge = Judge(profile, cluster, PipeliningChoice(microbatches=8), 10**6)
    names = data.draw(st.permutations([device.name for device in cluster.devices]))
    middle = data.draw(st.integers(1, len(names) - 1))
    for ones, others in ((names[:middle], names[middle:]), (names, names)):
        found = {cluster.link(a, b) for a, b in judge._pairs(tuple(ones), tuple(others))}
        assert found == {cluster.link(a, b) for a in ones for b in others}
    cuts = sorted(data.draw(st.sets(st.integers(1, min(5, len(names) - 1)))))
    last = min(len(names), cuts[-1] + 2 if cuts else 8)
    groups = [tuple(names[a:b]) for a, b in pairwise((0, *cuts, last))]
    placement = [(group, range(stage, stage + 1)) for stage, group in enumerate(groups[:-1])]
    placement.append((groups[-1], range(len(groups) - 1, 6)))
    schedule = data.draw(st.sampled_from(("gpipe", "1f1b", "eager-1f1b", "zb-h1")))
    how = Pipelining(schedule, 32, data.draw(st.sampled_from((False, True, (0,)))))
    most = judge.model.most_memory_bytes(placement, how)
    ranks = [stage for stage, (group, _) in enumerate(placement) for _ in group]
    exact = judge.model.memory_bytes(placement, how)
    assert all(bytes_ <= most[stage] for stage, bytes_ in zip(ranks, exact, strict=True))


def test_speed_on_layers_that_take_no_time_without_a_type() -> None:
    """Regression: times of types counted only beside usual times, and all devices seemed equal."""
    times_s = {"x": (1.0, 2.0), "y": (2.0, 4.0), "free": (0.0, 0.0)}
    layer = replace(chain(0).layers[0], time_s=times_s)
    profile = replace(chain(0), layers=(layer,))
    speeds = {name: profile.speed(Device("h", 2.0, type=name)) for name in ("", *times_s)}
    assert speeds == {"": 2e6, "x": 4.0, "y": 2.0, "free": 2e6}
    usual = replace(profile, layers=(replace(layer, forward_s=6.0),))
    assert [usual.speed(Device("h", type=name)) for name in ("", "x", "free")] == pytest.approx([1, 2, 1e6])
    assert chain(0).speed(Device("h", 2.0, type="x")) == 2.0


def test_replicas_share_by_their_speed_for_their_stage() -> None:
    """Regression: they shared by their speed for the whole model, here 4/3 and 1."""
    profile = chain(2, 3)
    layers = [
        replace(profile.layers[0], time_s={"x": (0.5, 1.0)}),
        replace(profile.layers[1], time_s={"x": (2, 4)}),
    ]
    devices = (Device("a"), Device("b"), Device("c", type="x"))
    cluster = Cluster(tuple(Host(device.name, (device,)) for device in devices))
    profile, how = replace(profile, layers=tuple(layers)), Pipelining("1f1b", 6)
    placement = [(("a",), range(1)), (("b", "c"), range(1, 2))]
    plan = Plan.of(profile, cluster, placement, how, "hybrid")
    assert [stage.shares for stage in plan.stages] == [(1.0,), (1.0, 0.5)]
    judge = Judge(profile, cluster, PipeliningChoice.of(how), 10**6)
    one = judge.judge(StageLayout((("a",), ("b", "c")), (1, 2), "1f1b"))
    assert one is not None
    assert one.step_s == forecast(plan, profile, cluster).step_s


@pytest.mark.parametrize("name", MODELS)
def test_no_baseline_of_a_real_model_is_faster(name: str) -> None:
    profile, cluster, how = model(name), equal_cluster(3, Link(1e-4, 1.25e9)), Pipelining("1f1b", 8)
    best = choose(profile, cluster, how)
    for other in BASELINES:
        if not is_random(other):
            plan = baseline(other, profile, cluster, 3, how)
            assert best.step_s <= forecast(plan, profile, cluster).step_s * (1 + 1e-9)


def test_only_the_stages_that_lack_memory_recompute() -> None:
    """Stage 0 would keep two micro-batches of 10 bytes. Stage 1 keeps one."""
    profile = chain(3, 3, saved_bytes=10)
    best = choose(profile, equal_cluster(2, memory_bytes=19), PipeliningChoice("1f1b", 4), stages=2)
    assert best.plan.pipelining.recompute == (0,)


def test_it_always_fits_where_recomputation_helps() -> None:
    profile, cluster = chain(3, 3, saved_bytes=10), equal_cluster(2, memory_bytes=19)
    assert choose(profile, cluster, PipeliningChoice("gpipe", 4)).shortages(cluster) == {}


def test_a_run_can_ask_for_every_device() -> None:
    """The third device is so slow that the fastest plan leaves it out."""
    cluster = equal_cluster(3, Link(1e-3, 1e3), speeds=(1.0, 1.0, 0.01))
    choice = PipeliningChoice(microbatches=4)
    profile = chain(3, 3, 3, weight_bytes=10**6)
    assert len(choose(profile, cluster, choice).plan.ranks) < 3
    assert len(plan_for_every_device(profile, cluster, choice).ranks) == 3


def test_one_sample_over_several_devices_if_memory_demands_it() -> None:
    """Each device holds the weights of one layer. With room for both layers, one stage is as fast."""
    profile, choice = chain(3, 3, weight_bytes=10), PipeliningChoice("1f1b", 1)
    split = choose(profile, equal_cluster(2, memory_bytes=20), choice)
    assert ([len(stage.layers) for stage in split.plan.stages], split.step_s) == ([1, 1], 6)
    assert len(choose(profile, equal_cluster(2, memory_bytes=40), choice).plan.stages) == 1
    with pytest.raises(PlanError, match="in some mode"):
        choose(profile, equal_cluster(2, memory_bytes=19), choice)


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "eager-1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_more_stages_than_micro_batches_if_asked_for(schedule: str, microbatches: int) -> None:
    choice = PipeliningChoice(schedule, microbatches)
    found = search(chain(*[1] * 6), equal_cluster(4), choice, 4, ("pipeline",))
    assert len(found["pipeline"].layout.groups) == 4


@pytest.mark.parametrize("kind", ["equal", "unequal", "hosts of 2", "racks"])
def test_more_devices_are_never_slower_than_the_faster_half(kind: str) -> None:
    """Regression: plans for 16 devices were up to 1.33x slower than those for 8 of them."""
    profile = chain(3, 1, 2, 5, 1, 2, output_bytes=2 * 10**6, weight_bytes=4 * 10**6)
    link, count = Link(1e-3, 1e6), 8
    devices = [Device(f"d{i}", 0.5 if kind == "unequal" and i % 3 else 1.0) for i in range(count)]
    each = 2 if kind == "hosts of 2" else 1
    rack = {"rack": "a"} if kind == "racks" else {}
    hosts = (
        Host(f"h{i}", tuple(devices[i : i + each]), link, Link(1e-5, 1e9), **rack)
        for i in range(0, count, each)
    )
    cluster = Cluster(tuple(hosts), racks=(Rack("a", link),) if rack else ())
    some_devices = (cluster, *faster_halves(profile, cluster))
    steps_s = [choose(profile, some, PipeliningChoice("1f1b", 4)).step_s for some in some_devices]
    assert steps_s == sorted(steps_s)


def test_the_faster_half_has_the_fastest_devices_and_then_the_roomiest() -> None:
    speeds = (("a", 0.5, 9), ("b", 1.0, 9), ("c", 0.5, None), ("d", 0.5, 9))
    cluster = Cluster((Host("h", tuple(Device(*one) for one in speeds)),))
    halves = faster_halves(chain(3), cluster)
    assert [[device.name for device in half.devices] for half in halves] == [["b", "c"], ["b"]]


def test_data_parallel_on_fewer_devices() -> None:
    """Two devices compute for 6 s, and their ring takes 2 s. A slow one would add 2 s."""
    cluster = equal_cluster(4, Link(1.0, 1e9), speeds=(1.0, 1.0, 0.01, 0.01))
    found = candidate("data", chain(3, weight_bytes=10), cluster, Pipelining(microbatches=4)).forecast
    assert found is not None
    assert (found.plan.ranks, found.step_s) == (("h0", "h1"), pytest.approx(8))


@pytest.mark.parametrize("slow", [0, 3])
def test_data_parallel_leaves_out_a_slow_link(slow: int) -> None:
    """Regression: only the faster half was tried. Three compute for 16 / 3 s; the slow link needs 7.5 s."""
    hosts = (Host(f"h{i}", (Device(f"d{i}"),), Link(0, 2.0 if i == slow else 1e9)) for i in range(4))
    profile = replace(chain(1, weight_bytes=10), batch_size=3)
    found = candidate("data", profile, Cluster(tuple(hosts)), Pipelining(microbatches=16)).forecast
    assert found is not None
    assert (len(found.plan.ranks), found.step_s) == (3, pytest.approx(16 / 3))
    assert f"d{slow}" not in found.plan.ranks


@pytest.mark.parametrize("fast", [6, 10])
def test_data_parallel_on_the_number_of_devices_that_is_fastest(fast: int) -> None:
    """Regression: of equal devices, only all, a half, a quarter were tried; of unequal ones, not all fast."""
    cluster = equal_cluster(10, Link(0.2), speeds=(1.0,) * fast + (0.05,) * (10 - fast))
    profile = replace(chain(12.5, weight_bytes=4), batch_size=64)
    request = PlanRequest(profile, cluster, PipeliningChoice(microbatches=8), mode="data")
    found = candidate("data", profile, cluster, request.choice).forecast
    assert found is not None
    assert found.step_s == pytest.approx(shortest_data_parallel_s(request))


@pytest.mark.parametrize("seed", range(4))
def test_data_parallel_on_the_best_set_of_many_sets(seed: int) -> None:
    """Also where not all sets of devices are tried, because all are of different kinds."""
    draw = random.Random(seed)
    request = random_case(seed, 5, 2)
    sizes_bytes = sum(layer.state_bytes + layer.saved_bytes for layer in request.profile.layers)
    hosts = []
    for i in range(8):
        room_bytes = int(sizes_bytes * draw.uniform(0.9, 2)) if seed % 2 else None
        link = Link(draw.choice([1e-3, 1e-2]), 10 ** draw.uniform(7, 9))
        hosts.append(Host(f"h{i}", (Device(f"d{i}", draw.uniform(0.3, 1), room_bytes),), link))
    cluster = Cluster(tuple(hosts))
    steps = DataParallelSteps(request.profile, cluster, 40)
    best_s = math.inf
    for size in range(1, 9):
        for names in combinations([device.name for device in cluster.devices], size):
            missing_bytes, step_s = steps.of(names)
            best_s = min(best_s, math.inf if missing_bytes else step_s)
    found = data_devices(request.profile, cluster, 40, 1, part=0.02)
    missing_bytes, step_s = steps.of(found[0])
    assert math.isinf(best_s) if missing_bytes else step_s <= 1.01 * best_s
    how = Pipelining(microbatches=40)
    one = forecast_data_parallel(request.profile, cluster, how, 40, found[0])
    assert one.step_s == pytest.approx(step_s)
    assert sum(one.shortages(cluster).values()) == missing_bytes
