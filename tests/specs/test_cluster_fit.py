"""Link latency and bandwidth fitted to times, and device speeds from profiles."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvpipe.errors import HvpipeError
from hvpipe.specs.cluster import Cluster, Device, Host, Link
from hvpipe.specs.cluster_fit import (
    RankFacts,
    fit_link,
    measured_cluster,
    profile_of_kinds,
    relative_speeds,
    sustained,
)
from hvpipe.specs.profile import Profile
from model_graphs import chain

SIZES = [4**exponent for exponent in range(12)]  # 1 byte to 4 MiB


def relative_error(link: Link, sizes: list[int], times: list[float]) -> float:
    return math.sqrt(sum((link.time_s(n) / t - 1) ** 2 for n, t in zip(sizes, times, strict=True)))


@given(st.floats(1e-7, 1e-1), st.floats(1e4, 1e12))
def test_exact_times_recover_the_link(latency_s: float, bandwidth: float) -> None:
    times = [latency_s + size / bandwidth for size in SIZES]
    link = fit_link(SIZES, times)
    for size, time_s in zip(SIZES, times, strict=True):
        assert link.time_s(size) == pytest.approx(time_s, rel=1e-4)


@given(st.floats(1e-6, 1e-3), st.floats(1e7, 1e10), st.integers(0, 2**32 - 1))
def test_noise_of_ten_percent_moves_the_fit_by_less_than_twelve_percent(
    latency_s: float, bandwidth: float, seed: int
) -> None:
    factors = np.random.default_rng(seed).uniform(0.9, 1.1, len(SIZES))
    times = [(latency_s + n / bandwidth) * f for n, f in zip(SIZES, factors, strict=True)]
    link = fit_link(SIZES, times)
    for size in (SIZES[0], SIZES[-1]):
        assert link.time_s(size) == pytest.approx(latency_s + size / bandwidth, rel=0.12)


@given(st.lists(st.floats(1e-6, 1.0), min_size=len(SIZES), max_size=len(SIZES)))
def test_no_neighbouring_link_fits_better(times: list[float]) -> None:
    """This also holds if the best line has a negative latency or slope, which no link has."""
    link = fit_link(SIZES, times)
    error = relative_error(link, SIZES, times)
    for latency_factor, bandwidth_factor in ((1.02, 1), (0.98, 1), (1, 1.02), (1, 0.98)):
        other = Link(link.latency_s * latency_factor, link.bandwidth_bytes_per_s * bandwidth_factor)
        assert error <= relative_error(other, SIZES, times) + 1e-9


def test_small_messages_weigh_as_much_as_large_ones() -> None:
    """An error of 1 s in 11 s must not spoil the latency, as it would in a fit of absolute errors."""
    link = fit_link([1, 10, 10**9], [1e-4, 1e-4, 11.0])
    assert link.latency_s == pytest.approx(1e-4, rel=1e-3)
    assert link.bandwidth_bytes_per_s == pytest.approx(1e9 / 11, rel=1e-3)


@given(st.floats(1e7, 1e10), st.floats(1e5, 1e6))
def test_a_burst_at_full_speed_does_not_hide_the_rate(bandwidth: float, burst: float) -> None:
    """A token bucket in front of a link that is a hundred times as fast."""
    times = [1e-6 + n / bandwidth / 100 + max(0.0, n - burst) / bandwidth for n in SIZES]
    link = sustained(fit_link(SIZES, times), (SIZES[-2], SIZES[-1]), (times[-2], times[-1]))
    assert link.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.3)


@pytest.mark.parametrize("times", [(1.0, 2.4), (1e9, 1e8), (2.9, 3.0)])
def test_a_link_without_a_burst_stays_as_it_is(times: tuple[float, float]) -> None:
    assert sustained(Link(0.0, 1e6), (1e6, 2e6), times) == Link(0.0, 1e6)


def test_times_that_fall_with_size_are_all_latency() -> None:
    link = fit_link([1, 100], [2e-3, 1e-3])
    # The sum of 1/t is 1500, that of 1/t^2 is 1.25e6.
    assert link.latency_s == pytest.approx(1500 / 1.25e6)
    assert link.bandwidth_bytes_per_s == math.inf


def test_times_that_grow_faster_than_size_are_all_bandwidth() -> None:
    link = fit_link([1, 10], [1e-6, 1e-4])
    assert link.latency_s == 0
    # size/t is 1e6 and 1e5: the sum of both over the sum of their squares.
    assert 1 / link.bandwidth_bytes_per_s == pytest.approx(1.1e6 / 1.01e12)


@pytest.mark.parametrize(
    ("sizes", "times"),
    [([1, 2], [1.0]), ([1], [1.0]), ([4, 4], [1.0, 2.0]), ([1, 2], [1.0, 0.0]), ([1, 2], [1.0, math.nan])],
)
def test_too_little_to_fit(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(HvpipeError, match=r"at least two sizes\. Received: sizes_bytes="):
        fit_link(sizes, times)


def slowed(profile: Profile, factor: float) -> Profile:
    layers = (replace(layer, forward_s=layer.forward_s * factor) for layer in profile.layers)
    return replace(profile, layers=tuple(layers))


def test_speeds_are_ratios_of_total_times() -> None:
    """3 s in all, a third of it in the forward. With a forward four times as slow, 6 s."""
    first = chain(1.0, 2.0)
    assert relative_speeds([first, first, slowed(first, 4)]) == (1.0, 1.0, pytest.approx(0.5))


def test_speeds_of_different_models_are_refused() -> None:
    with pytest.raises(HvpipeError, match=r"2 layers, batch 1.*3 layers, batch 1"):
        relative_speeds([chain(1.0, 2.0), chain(1.0, 2.0, 3.0)])
    with pytest.raises(HvpipeError, match=r"batch 1.*batch 2"):
        relative_speeds([chain(1.0, 2.0), chain(1.0, 2.0).at_batch(2)])
    with pytest.raises(HvpipeError, match="every layer takes 0 s"):
        relative_speeds([chain(0.0, 0.0)])


def test_a_cluster_of_ranks_that_alternate_between_hosts() -> None:
    """Ranks 0 and 2 run on a, rank 1 on b. Rank 2 is half as fast."""
    first = chain(1.0, 2.0)
    ranks = [
        RankFacts("a", 0, first, 100),
        RankFacts("b", 0, first, None),
        RankFacts("a", 1, replace(first, layers=chain(2.0, 4.0).layers), 50),
    ]
    near, far, farther = Link(1e-6, 1e9), Link(1e-4, 1e8), Link(2e-4, 2e8)
    cluster = measured_cluster(ranks, {(0, 1): far, (0, 2): near, (1, 2): farther})
    outer = Link(2e-4, 1e8)
    assert cluster == Cluster(
        hosts=(
            Host("a", (Device("a:0", 1.0, 100), Device("a:1", 0.5, 50)), outer, near),
            Host("b", (Device("b:0", 1.0, None),), outer, Link()),
        ),
        measured=(("a:0", "b:0", far), ("a:0", "a:1", near), ("b:0", "a:1", farther)),
    )
    assert cluster.link("a:1", "b:0") == farther
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_kinds_of_devices_have_times_of_their_own() -> None:
    """Ranks 1 and 2 have GPUs. Rank 2's is twice as fast; on rank 1's the second layer gains more."""
    first, on_gpu = chain(6.0, 6.0), chain(3.0, 1.0)
    ranks = [
        RankFacts("a", 0, first, None, "cpu"),
        RankFacts("b", 0, replace(first, layers=on_gpu.layers), None, "gpu"),
        RankFacts("b", 1, replace(first, layers=chain(1.5, 0.5).layers), None, "gpu"),
        RankFacts("c", 0, first, None, "cpu"),
    ]
    cluster, profile = measured_cluster(ranks, {}), profile_of_kinds(ranks)
    assert [(device.speed, device.type) for device in cluster.devices] == [
        (1.0, ""),
        (3.0, "gpu"),
        (6.0, "gpu"),
        (1.0, ""),
    ]
    for facts, device in zip(ranks, cluster.devices, strict=True):
        assert profile.speed(device) == pytest.approx(device.speed)
        for there, measured in zip(profile.on(device.type).layers, facts.profile.layers, strict=True):
            assert there.forward_s / device.speed == pytest.approx(measured.forward_s)
            assert there.backward_s / device.speed == pytest.approx(measured.backward_s)
    assert Profile.from_json(profile.to_json()) == profile
    assert profile_of_kinds(ranks[:1]) == first


def test_a_cluster_of_one_rank() -> None:
    cluster = measured_cluster([RankFacts("a", 0, chain(1.0), 7)], {})
    assert cluster == Cluster((Host("a", (Device("a:0", 1.0, 7),)),))
