"""Baseline placements: cases worked out by hand, and properties that always hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.plan.baselines import BASELINES, baseline, random_plans
from hvpipe.plan.explain import explain
from hvpipe.plan.greedy import partition
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Link, equal_cluster
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile
from model_graphs import MODELS, chain, model, profiles

FIVE = chain(1, 1, 1, 1, 1, weight_bytes=10)


def cut(plan: Plan) -> list[str]:
    return ["".join(stage.layers) for stage in plan.stages]


def test_even_and_round_robin_and_m_topo_by_hand() -> None:
    cluster = equal_cluster(2)
    assert cut(baseline("even", FIVE, cluster, 2)) == ["ab", "cde"]
    assert cut(baseline("round_robin", FIVE, cluster, 2)) == ["ace", "bd"]
    # 20 bytes a layer: 100 / 2 + 20 = 70 bytes allow three layers.
    assert cut(baseline("m_topo", FIVE, cluster, 2)) == ["abc", "de"]
    assert cut(baseline("m_topo", FIVE, equal_cluster(2, memory_bytes=45), 2)) == ["ab", "cde"]


def test_m_etf_runs_branches_at_the_same_time() -> None:
    # a feeds b and c, 2 s each; d joins them. A transfer takes 1 s.
    layers = [LayerCost(name, s, 0, output_bytes=1) for name, s in (("a", 1), ("b", 2), ("c", 2), ("d", 1))]
    profile = Profile.of(layers, [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])
    plan = baseline("m_etf", profile, equal_cluster(2, Link(1.0)), 2)
    # b starts at 1 s on a's device. c starts at 2 s on the other and ends at 4 s. d starts there at 4 s.
    assert cut(plan) == ["ab", "cd"]
    # The forward takes 5 s. The backward takes no time except for transfers: d to b, while c sends to a.
    assert plan.one_batch_s == pytest.approx(5 + 1)


def test_m_etf_respects_memory() -> None:
    plan = baseline("m_etf", FIVE, equal_cluster(2, memory_bytes=60), 2)
    assert cut(plan) == ["abc", "de"]
    assert not plan.shortages(equal_cluster(2, memory_bytes=60))


def test_a_placement_that_is_no_pipeline_is_marked() -> None:
    plan = baseline("round_robin", FIVE, equal_cluster(2), 2)
    assert not plan.contiguous
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match=r"Only a pipeline has cuts.*method='round_robin'"):
        explain(plan, FIVE, equal_cluster(2))


def test_random_depends_on_its_seed_alone() -> None:
    cluster = equal_cluster(4)
    for name in ("random", "random_cuts"):
        one, same, other = (baseline(name, model("vgg16"), cluster, 4, seed=seed) for seed in (1, 1, 2))
        assert one == same
        assert one != other


def test_random_fits_or_is_refused() -> None:
    # Three layers of 20 bytes fit on one of the two devices.
    plan = baseline("random", FIVE, equal_cluster(2, memory_bytes=60), 2)
    assert not plan.shortages(equal_cluster(2, memory_bytes=60))
    with pytest.raises(PlanError, match="None of 1000 random placements fits"):
        baseline("random", FIVE, equal_cluster(2, memory_bytes=40), 2)


def test_many_random_plans_share_their_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if hardly any placement fits, each of a hundred plans drew up to a thousand times."""
    drawn = []
    draw = BASELINES["random"]
    monkeypatch.setitem(BASELINES, "random", lambda *given: drawn.append(given) or draw(*given))
    profile, how = chain(*[1] * 12, weight_bytes=10), Pipelining()
    # Six of 12 layers on each of two devices: 12! / 6! 6! / 2^12, one draw in four or five.
    plans = random_plans("random", profile, equal_cluster(2, memory_bytes=120), 2, how, range(5))
    assert len(plans) == 5
    assert plans[3] == baseline("random", profile, equal_cluster(2, memory_bytes=120), 2, how, seed=3)
    # Two on each of six devices: one draw in 291.
    drawn.clear()
    some = random_plans("random", profile, equal_cluster(6, memory_bytes=40), 6, how, range(100))
    assert 0 < len(some) < 100
    assert len(drawn) == 2000
    assert random_plans("random", profile, equal_cluster(6, memory_bytes=39), 6, how, range(100)) == []


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(HvpipeError, match=r"one of random, .*m_etf. Received: name='best'"):
        baseline("best", FIVE, equal_cluster(2), 2)


@settings(max_examples=30)
@given(profiles(), st.sampled_from(["random", "random_cuts"]), st.integers(100, 3000), st.booleans())
def test_random_plans_all_fit(profile: Profile, name: str, memory_bytes: int, again: bool) -> None:
    roomy, tight = (equal_cluster(3, Link(0.1, 100.0), memory_bytes=size) for size in (10**9, memory_bytes))
    how = Pipelining("1f1b", 4, recompute=again)
    first = baseline(name, profile, roomy, 3, how)
    found = random_plans(name, profile, tight, 3, how, range(3))
    assert not any(plan.shortages(tight) for plan in found)
    fits = not first.shortages(tight)
    assert fits == any(
        [s.layers for s in plan.stages] == [s.layers for s in first.stages] for plan in found[:1]
    )


@settings(max_examples=30)
@given(profiles(), st.sampled_from(sorted(BASELINES)), st.integers(1, 4))
def test_every_layer_is_placed_once(profile: Profile, name: str, stages: int) -> None:
    plan = baseline(name, profile, equal_cluster(4, Link(0.1, 100.0)), stages)
    names = [layer for stage in plan.stages for layer in stage.layers]
    assert sorted(names) == sorted(layer.name for layer in profile.layers)
    assert all(stage.layers for stage in plan.stages)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_at_least_as_good_as_any_baseline_pipeline(name: str) -> None:
    cluster = equal_cluster(4, Link(1e-4, 1.25e9))
    greedy = partition(model(name), cluster, 4)
    for rival in ("even", "random_cuts"):
        assert greedy.bottleneck_s <= baseline(rival, model(name), cluster, 4).bottleneck_s * (1 + 1e-9)
