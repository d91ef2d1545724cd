"""Choosing data parallel, pipeline or hybrid: cases by hand, memory limits, real models."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.forecast.data_parallel import forecast_data_parallel, whole_shares
from hvpipe.forecast.pipeline import Forecast
from hvpipe.plan import greedy
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.replication import groupings
from hvpipe.plan.stage_plan import Plan
from hvpipe.schedule.plan_schedule import schedule_of
from hvpipe.search.choice import candidate, candidates, choose
from hvpipe.specs.cluster import Cluster, Device, Host, Link, equal_cluster
from hvpipe.specs.profile import Profile
from model_graphs import chain, clusters, model, profiles

FOUR = Pipelining("1f1b", 4)


def devices(one: Forecast) -> list[int]:
    return [len(stage.devices) for stage in one.plan.stages]


def of_mode(mode: str, profile: Profile, cluster: Cluster, microbatches: int = 4) -> Forecast:
    found = candidate(mode, profile, cluster, replace(FOUR, microbatches=microbatches)).forecast
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("count", "weights", "parts"),
    [
        (10, (1, 1, 0.5), [4, 4, 2]),
        (7, (1, 1, 1), [3, 2, 2]),
        # 1.75, 3.5 and 1.75 round down to 1, 3 and 1. The two largest remainders get the other two samples.
        (7, (1, 2, 1), [2, 3, 2]),
        (1, (1, 3), [0, 1]),
    ],
)
def test_whole_shares(count: int, weights: tuple[float, ...], parts: list[int]) -> None:
    assert whole_shares(count, weights) == parts


@given(st.integers(0, 1000), st.lists(st.sampled_from([0.1, 0.25, 0.3, 1.0, 3.0]), min_size=1, max_size=9))
def test_whole_shares_round_the_exact_shares(count: int, weights: list[float]) -> None:
    parts = whole_shares(count, weights)
    assert sum(parts) == count
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - count * weight / sum(weights)) < 1 + 1e-9


def test_shares_of_many_devices_take_no_time() -> None:
    """Regression: the time grew with the square of the devices."""
    start_s = time.process_time()
    assert sum(whole_shares(10**5, [1.0] * 65536)) == 10**5
    assert time.process_time() - start_s < 1


def test_data_parallel_by_hand() -> None:
    """Each rank trains 2 of 4 samples: forward 4 s, backward 8 s.

    Then the all-reduce of 20 bytes takes 2 (2 - 1) / 2 x 20 / 5 = 4 s.
    """
    one = forecast_data_parallel(
        chain(3, 3, weight_bytes=10, saved_bytes=3), equal_cluster(2, Link(0, 5.0)), FOUR
    )
    assert one.step_s == pytest.approx(12 + 4)
    assert one.busy_s == pytest.approx((12, 12))
    assert one.memory_bytes == (2 * 20 + 2 * 6, 2 * 20 + 2 * 6)


def test_reduces_overlap_the_backward() -> None:
    """b's bucket is final at 8 s and takes 1 s. a's bucket is final at 12 s."""
    profile = chain(3, 3, weight_bytes=1 << 20)
    one = forecast_data_parallel(profile, equal_cluster(2, Link(0, float(1 << 20))), FOUR)
    assert [(e.start_s, e.end_s) for e in one.trace.of("reduce")] == [
        pytest.approx((8, 9)),
        pytest.approx((12, 13)),
    ]


def test_an_update_waits_for_its_reduce_and_for_the_backward() -> None:
    """The reduces end at 9 and 13 s, the backward at 12 s. Updates take 3 s; the first starts at 12 s."""
    profile = chain(3, 3, weight_bytes=1 << 20)
    profile = replace(profile, layers=tuple(replace(layer, update_s=3.0) for layer in profile.layers))
    one = forecast_data_parallel(profile, equal_cluster(2, Link(0, float(1 << 20))), FOUR)
    for rank in (0, 1):
        found = [(event.start_s, event.end_s) for event in one.trace.of("update", rank)]
        assert found == [pytest.approx((12, 15)), pytest.approx((15, 18))]
    assert one.step_s == pytest.approx(18)
    assert one.busy_s == pytest.approx((18, 18))


def test_unequal_devices_get_unequal_shares_of_the_batch() -> None:
    profile = replace(chain(3), batch_size=3)
    one = forecast_data_parallel(profile, equal_cluster(2, speeds=(1.0, 0.5)), FOUR)
    assert one.plan.stages[0].shares == (8, 4)
    assert one.busy_s == pytest.approx((8, 8))
    with pytest.raises(PlanError, match="samples=1, in shares of 1, 0"):
        forecast_data_parallel(chain(3), equal_cluster(2), Pipelining(microbatches=1))


def test_shares_add_up_to_the_given_samples() -> None:
    """Regression: 10 samples in 4 micro-batches of up to 3 were planned, and advised, as 12 samples."""
    profile = replace(chain(3), batch_size=3)
    for samples, shares in ((10, (5, 5)), (None, (6, 6))):
        found = candidate("data", profile, equal_cluster(2), FOUR, samples=samples).forecast
        assert found is not None
        assert found.plan.stages[0].shares == shares


def test_a_data_parallel_plan_has_no_schedule() -> None:
    """Regression: with fewer micro-batches than devices, an error about micro-batches was raised."""
    profile = replace(chain(3), batch_size=8)
    one = forecast_data_parallel(profile, equal_cluster(4), Pipelining(microbatches=2))
    assert one.plan.stages[0].shares == (4, 4, 4, 4)
    with pytest.raises(PlanError, match=r"with hvpipe.keras.data_parallel.*shares=\[4.0, 4.0, 4.0, 4.0\]"):
        schedule_of(Plan.from_json(one.plan.to_json()))


def test_data_parallel_with_recompute_is_a_pipeline_of_one_stage() -> None:
    """Each device runs 2 micro-batches: forward twice, 2 s each, and backward, 4 s."""
    with pytest.raises(PlanError, match="without recompute"):
        forecast_data_parallel(chain(3, 3), equal_cluster(2), replace(FOUR, recompute=True))
    found = candidate("data", chain(3, 3), equal_cluster(2), replace(FOUR, recompute=True)).forecast
    assert found is not None
    assert (devices(found), found.step_s) == ([2], 16)


def test_why_few_samples_do_not_fit_many_devices_is_their_memory() -> None:
    """Regression: the reason was that all devices together would not get a sample each."""
    profile, cluster = chain(3, weight_bytes=10), equal_cluster(4, memory_bytes=19)
    one = candidate("data", profile, cluster, Pipelining(microbatches=2))
    assert one.refused == "lacks memory on 2 devices; on h0 1 bytes"


def test_data_parallel_wins_with_small_weights() -> None:
    found = candidates(chain(3, 3), equal_cluster(2), FOUR)
    assert [one.mode for one in found] == ["data", "pipeline", "hybrid"]
    assert [one.forecast and one.forecast.step_s for one in found] == [12, 15, None]
    assert found[2].refused == "no way found to give a stage several devices"


def test_a_pipeline_wins_with_large_weights() -> None:
    chosen = choose(chain(3, 3, weight_bytes=1000), equal_cluster(2, Link(0, 5.0)), FOUR)
    assert (devices(chosen), chosen.step_s) == ([1, 1], pytest.approx(15))


def test_a_hybrid_wins_with_one_slow_and_one_heavy_stage() -> None:
    """Two devices share a's 6 s, the third holds b's weights: 18 s, as in test_pipeline.py."""
    profile = chain(6, 3)
    heavy = replace(profile.layers[1], weight_bytes=1000)
    profile = replace(profile, layers=(profile.layers[0], heavy))
    chosen = choose(profile, equal_cluster(3, Link(0, 5.0)), FOUR)
    assert (devices(chosen), chosen.step_s) == ([2, 1], pytest.approx(18))
    # The first stage computes for 4 x 6 s and waits 1 s for its first gradient.
    assert of_mode("pipeline", profile, equal_cluster(3, Link(0, 5.0))).step_s == pytest.approx(25)


def test_whole_pipelines_side_by_side() -> None:
    """Four devices form two stages of two. Each pipeline runs 2 of 4 micro-batches: (2 + 1) x 3 s."""
    one = of_mode("hybrid", chain(3, 3), equal_cluster(4))
    assert (devices(one), one.step_s) == ([2, 2], pytest.approx(9))


def test_memory_excludes_modes() -> None:
    """A device has room for 20 bytes of weights and gradients, but not for 40."""
    profile, cluster = chain(3, 3, weight_bytes=10), equal_cluster(2, memory_bytes=30)
    found = {one.mode: one for one in candidates(profile, cluster, FOUR)}
    assert found["data"].refused == "lacks memory on 2 devices; on h0 10 bytes"
    assert devices(choose(profile, cluster, FOUR)) == [1, 1]
    with pytest.raises(PlanError, match=r"in some mode. Received: data: lacks.*pipeline: The memory of"):
        choose(profile, equal_cluster(2, memory_bytes=19), FOUR)


def test_data_parallel_splits_a_share_that_does_not_fit_into_micro_batches() -> None:
    profile, cluster = chain(3, 3, saved_bytes=10), equal_cluster(2, memory_bytes=25)
    one = of_mode("data", profile, cluster)
    assert one.memory_bytes == (20, 20)
    assert one.step_s == pytest.approx(12)


def test_every_number_of_stages_is_considered() -> None:
    """Regression: with six devices only 1, 2, 4 and 6 stages were tried. Here three devices are fast."""
    cluster = equal_cluster(6, Link(1e-4, 1e9), speeds=(1.0,) * 3 + (0.05,) * 3)
    assert devices(of_mode("pipeline", chain(*[3] * 6), cluster, 16)) == [1] * 3
    profile, slow_links = chain(*[3] * 6, output_bytes=1), equal_cluster(6, Link(0.9))
    how = replace(FOUR, microbatches=16)
    others = (candidate("pipeline", profile, slow_links, how, count).forecast for count in (3, 5))
    assert of_mode("pipeline", profile, slow_links, 16).step_s <= min(one.step_s for one in others if one)


def test_the_one_number_of_stages_that_fits_is_found() -> None:
    """Ten layers: the first device holds two, eight devices hold one each, the other three hold none."""
    sizes = [40] + [20] * 8 + [0] * 3
    cluster = Cluster(tuple(Host(f"h{i}", (Device(f"h{i}", 1.0, size),)) for i, size in enumerate(sizes)))
    assert devices(of_mode("pipeline", chain(*[3] * 10, weight_bytes=10), cluster, 16)) == [1] * 9


def test_a_shortage_is_explained_once_and_only_if_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each stage count that did not fit was explained, for seconds, and the text discarded."""
    asked = []
    least_short = greedy.least_short
    monkeypatch.setattr(greedy, "least_short", lambda *given: asked.append(given[2]) or least_short(*given))
    profile, how = chain(*[3] * 8, weight_bytes=10), replace(FOUR, microbatches=8)
    assert devices(of_mode("pipeline", profile, equal_cluster(8, memory_bytes=20), 8)) == [1] * 8
    candidate("hybrid", profile, equal_cluster(8, memory_bytes=20), how)
    assert asked == []
    refused = candidate("pipeline", profile, equal_cluster(8, memory_bytes=19), how).refused
    assert "needs 20 bytes, may use 19 bytes" in refused
    assert asked == [8]


def test_stage_counts_without_the_stage_to_recompute_are_skipped() -> None:
    how = replace(FOUR, recompute=(2,))
    found = candidate("pipeline", chain(3, 3, 3), equal_cluster(3), how)
    assert found.forecast is not None
    assert devices(found.forecast) == [1, 1, 1]
    refused = candidate("pipeline", chain(3, 3), equal_cluster(3), how).refused
    assert refused == "recompute should name stages from 0 to 1. Received: recompute=(2,)"


def of_hosts(hosts: int, each: int) -> Cluster:
    """Build hosts of `each` devices, joined by slow links."""
    return Cluster(
        tuple(
            Host(f"h{host}", tuple(Device(f"h{host}:{i}") for i in range(each)), Link(0, 100.0))
            for host in range(hosts)
        )
    )


@pytest.mark.parametrize(("hosts", "each"), [(3, 3), (6, 2)])
def test_hybrids_of_many_devices_leave_no_device_idle(hosts: int, each: int) -> None:
    """Each host's devices share one stage. Regression: above eight devices only powers of 2 were tried."""
    profile = chain(*[3] * 12, weight_bytes=10_000, output_bytes=1)
    assert devices(of_mode("hybrid", profile, of_hosts(hosts, each), 12)) == [each] * hosts


def test_the_reason_for_no_hybrid_is_given() -> None:
    """Regression: the message always said that no stage could get several devices, whatever the reason."""
    profile, cluster = chain(3, 3, weight_bytes=10), equal_cluster(4, memory_bytes=19)
    assert candidate("hybrid", profile, cluster, FOUR).refused == "lacks memory for stages on several devices"
    found = candidate("hybrid", chain(3, 3), equal_cluster(4), FOUR, 1)  # no device has a limit
    assert found.refused == "no way found to give a stage several devices"
    one = replace(FOUR, microbatches=1)
    refused = candidate("hybrid", profile, equal_cluster(4), one).refused
    assert refused == "Each replica of a stage should get a micro-batch. Received: microbatches=1"
    with pytest.raises(HvpipeError, match=r"number of layers, 2\. Received: stages=3"):
        candidate("hybrid", profile, equal_cluster(8), FOUR, 3)


def test_fewer_layers_than_chunks() -> None:
    how = Pipelining("interleaved", 4, chunks=2)
    found = {one.mode: one for one in candidates(chain(3), equal_cluster(2), how)}
    assert found["pipeline"].refused.endswith("a layer for each chunk. Received: layers=1, chunks=2")
    assert found["data"].forecast is not None


def test_stages_as_asked_for() -> None:
    found = candidates(chain(3, 3, 3, 3), equal_cluster(4), FOUR, stages=2)
    for one in found:
        assert one.forecast is not None
        assert len(one.forecast.plan.stages) == (1 if one.mode == "data" else 2)


def test_no_replicas_with_chunks() -> None:
    how = Pipelining("interleaved", 4, chunks=2)
    found = {one.mode: one for one in candidates(chain(3, 3, 3, 3), equal_cluster(2), how)}
    assert "without chunks" in found["hybrid"].refused
    assert found["pipeline"].forecast is not None


def test_an_unknown_mode() -> None:
    with pytest.raises(HvpipeError, match=r"one of data, pipeline, hybrid. Received: mode='model'"):
        candidate("model", chain(1), equal_cluster(1), FOUR)


@settings(max_examples=8)
@given(profiles(), clusters())
def test_the_chosen_plan_fits_and_is_the_fastest(profile: Profile, cluster: Cluster) -> None:
    found = candidates(profile, cluster, FOUR)
    fitting = [one.forecast for one in found if one.forecast is not None]
    assert all(bool(one.refused) == (one.forecast is None) for one in found)
    if not fitting:
        with pytest.raises(PlanError, match="in some mode"):
            choose(profile, cluster, FOUR)
        return
    assert choose(profile, cluster, FOUR) == fitting[0]
    for one in fitting:
        assert fitting[0].step_s <= one.step_s
        assert not one.shortages(cluster)
        assert Plan.from_json(one.plan.to_json()) == one.plan


def test_real_models() -> None:
    """GNMT has large weights: a slow network needs a pipeline, on a fast one data parallel wins."""
    gnmt = replace(model("gnmt"), batch_size=64)
    assert devices(choose(gnmt, equal_cluster(4, Link(1e-4, 125e9)), FOUR)) == [4]
    assert devices(choose(gnmt, equal_cluster(4, Link(1e-4, 125e6)), FOUR)) != [4]


def test_groupings_by_hand() -> None:
    hosts = tuple(
        Host(h, (Device(f"{h}0", speed), Device(f"{h}1", 1.0))) for h, speed in (("x", 1), ("y", 2))
    )
    assert list(groupings(Cluster(hosts), 2)) == [
        [("x0", "x1"), ("y0", "y1")],
        [("x0", "y0"), ("x1", "y1")],
        [("y0", "x0"), ("x1", "y1")],
        [("y0", "x1"), ("x0", "y1")],
    ]
    assert list(groupings(Cluster(hosts), 3)) == []
