"""The search against brute force: every cut, order, replica and schedule of small random cases."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest

from hvpipe.forecast.pipeline import forecast
from hvpipe.plan.baselines import BASELINES, baseline, is_random
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.replication import Group
from hvpipe.plan.stage_plan import Plan
from hvpipe.search import exhaustive
from hvpipe.search.choice import choose, plan_for_every_device
from hvpipe.search.judge import Judge
from hvpipe.search.layout import Layout
from hvpipe.search.options import PipeliningChoice
from hvpipe.search.search import search
from hvpipe.specs.cluster import Cluster, Device, Host, Link, equal_cluster
from hvpipe.specs.profile import LayerCost, Profile
from model_graphs import MODELS, chain, model


def random_case(seed: int, layers: int = 7, devices: int = 3) -> tuple[Profile, Cluster, int]:
    """Draw layers, skips, speeds, memory and links of equal, grouped or measured hosts."""
    draw = random.Random(seed)
    costs = tuple(
        LayerCost(
            f"l{i}",
            forward_s=(seconds := draw.uniform(0.1, 1)),
            backward_s=2 * seconds * draw.uniform(0.5, 1.5),
            weight_bytes=draw.choice([0, 10**6, 10**7, 10**8]),
            output_bytes=int(10 ** draw.uniform(4, 7.5)),
            saved_bytes=int(10 ** draw.uniform(5, 7.5)),
            update_s=draw.choice([0.0, 0.05]),
        )
        for i in range(layers)
    )
    skips = {(a, b) for a in range(layers) for b in range(a + 2, layers) if draw.random() < 0.08}
    profile = Profile(costs, tuple(sorted(skips | {(i, i + 1) for i in range(layers - 1)})))
    whole_bytes = sum(layer.state_bytes + 2 * layer.saved_bytes for layer in costs)
    memory_bytes = None if draw.random() < 0.5 else int(whole_bytes * draw.uniform(0.35, 1))
    made = [Device(f"d{i}", draw.choice((1.0, 1.0, 0.5)), memory_bytes) for i in range(devices)]
    rate = 10 ** draw.uniform(7, 9)
    apart = tuple(Host(d.name, (d,), Link(1e-3, rate * draw.choice([1, 0.3]))) for d in made)
    pairs = tuple(
        (a.name, b.name, Link(1e-3, rate * draw.choice([1, 0.3, 0.1]))) for a, b in combinations(made, 2)
    )
    together = (Host("x", tuple(made[:2]), Link(1e-3, rate), Link(1e-4, 1e10)), *apart[2:])
    kinds = [Cluster(apart), Cluster(together), Cluster(apart, pairs)]
    return profile, draw.choice(kinds), draw.choice([4, 6, 8])


def sequences(names: Group) -> Iterator[tuple[Group, ...]]:
    for size in range(1, len(names) + 1):
        for group in combinations(names, size):
            rest = tuple(name for name in names if name not in group)
            yield (group,)
            yield from ((group, *more) for more in sequences(rest))


def brute_force_s(profile: Profile, cluster: Cluster, choice: PipeliningChoice) -> float:
    """Return the shortest forecast step of all layouts that fit."""
    judge = Judge(profile, cluster, choice, 10**12)
    layers = len(profile.layers)
    for groups in sequences(tuple(device.name for device in cluster.devices)):
        for name, chunks in choice.schedules:
            if chunks == 1 or max(map(len, groups)) == 1:
                for inner in combinations(range(1, layers), len(groups) * chunks - 1):
                    judge.judge(Layout(groups, (*inner, layers), name, chunks))
    return min((one.step_s for one in judge.best.values()), default=float("inf"))


def found_s(profile: Profile, cluster: Cluster, choice: PipeliningChoice) -> float:
    return min((one.step_s for one in search(profile, cluster, choice).values()), default=float("inf"))


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_of_a_small_case_is_faster(seed: int) -> None:
    profile, cluster, microbatches = random_case(seed)
    choice = PipeliningChoice(microbatches=microbatches)
    assert found_s(profile, cluster, choice) <= brute_force_s(profile, cluster, choice) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_local_moves_come_within_3_percent(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger cases cannot be searched exhaustively, so this looks at what they rely on."""
    monkeypatch.setattr(exhaustive, "_MOST_LAYOUTS", 0)
    profile, cluster, microbatches = random_case(seed)
    choice = PipeliningChoice(microbatches=microbatches)
    assert found_s(profile, cluster, choice) <= 1.03 * brute_force_s(profile, cluster, choice)


@pytest.mark.parametrize("seed", range(10))
def test_the_judge_says_what_the_forecast_says(seed: int) -> None:
    profile, cluster, microbatches = random_case(100 + seed)
    for one in search(profile, cluster, PipeliningChoice(microbatches=microbatches)).values():
        plan = Plan.of(profile, cluster, one.layout.placement, one.pipelining, "search")
        step = forecast(plan, profile, cluster)
        assert step.step_s == pytest.approx(one.step_s, rel=1e-9)
        assert step.shortages(cluster) == {}
        judge = Judge(profile, cluster, PipeliningChoice(microbatches=microbatches), 10**6)
        assert judge.bound_s(one.layout, one.pipelining) <= one.step_s * (1 + 1e-9)


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
