"""All-reduces during the backward: the ring formula, and buckets worked out by hand."""

from __future__ import annotations

import pytest

from hvpipe.forecast.gradient_reduce import BackwardSpan, Ring, RingGradients, reduce_beside
from hvpipe.plan.buckets import Gradient, plan_buckets
from hvpipe.specs.cluster import Cluster, Device, Host, Link, Rack, equal_cluster
from hvpipe.specs.layer_cost import LayerCost

MB4 = 4 << 20


def test_a_ring_takes_twice_n_minus_1_messages_of_an_nth_each() -> None:
    # 2 (4 - 1) messages of 25 bytes: 6 (0.5 + 25 / 50).
    assert Ring(4, Link(0.5, 50.0)).seconds(100) == pytest.approx(6)
    assert Ring(1, Link(0.5, 50.0)).seconds(100) == 0


def test_the_slowest_link_bounds_the_ring() -> None:
    bus, network = Link(0, 100.0), Link(0.5, 10.0)
    hosts = tuple(Host(h, (Device(f"{h}0"), Device(f"{h}1")), network, bus) for h in "xy")
    assert Ring.of(Cluster(hosts), ["x0", "x1"]) == Ring(2, bus)
    around = Ring.of(Cluster(hosts), ["x0", "y0", "x1"])
    assert (around.devices, around.link) == (3, network)
    # The two devices of x are neighbours in the ring, so it leaves and enters each host once.
    assert dict(around.ports) == {(way, host): network for way in ("out of", "into") for host in "xy"}
    assert len(around.ports) == 4
    assert Ring.of(equal_cluster(1), ["h0"]).seconds(100) == 0


def test_a_ring_that_goes_to_and_fro_between_racks_shares_their_links() -> None:
    """Regression: each crossing had the whole link of a rack."""

    def seconds(racks: str) -> float:
        hosts = tuple(
            Host(f"{rack}{place}", (Device(f"{rack}{place}"),), Link(0, 100.0), rack=rack)
            for place, rack in enumerate(racks)
        )
        cluster = Cluster(hosts, racks=tuple(Rack(rack, Link(0, 100.0)) for rack in "ab"))
        return Ring.of(cluster, [host.name for host in hosts]).seconds(400)

    assert seconds("abab") == 2 * seconds("aabb") == 2 * 6


def test_a_bucket_waits_until_it_is_final_on_all_ranks_and_the_one_before_is_done() -> None:
    """Layers c, b, a take 1, 2 and 1 s of the 4 s backward. The other device is 2 s behind.

    c's bucket is final at 1 and 3 s, b's at 3 and 5 s, a's at 4 and 6 s. Each reduce takes 2.5 s.
    """
    layers = [LayerCost(name, 0, seconds, MB4) for name, seconds in (("a", 1), ("b", 2), ("c", 1))]
    ring = Ring(2, Link(0, MB4 / 2.5))
    found = list(reduce_beside({7: RingGradients(layers, [BackwardSpan(0, 4), BackwardSpan(2, 6)], ring)}))
    assert [key for key, *_ in found] == [7, 7, 7]
    assert [(start, end) for _, start, end, _ in found] == [
        pytest.approx((3, 5.5)),
        pytest.approx((5.5, 8)),
        pytest.approx((8, 10.5)),
    ]


def test_small_gradients_share_a_bucket_and_none_is_lost() -> None:
    """The large last layer raises the bucket limit to 4 MiB, as in training."""
    sizes = [100, MB4 // 2, MB4 // 2, 0, 7, 8 * MB4]
    layers = [LayerCost(str(i), 0, 1, size) for i, size in enumerate(sizes)]
    found = list(reduce_beside({0: RingGradients(layers, [BackwardSpan(0, 6)], Ring(2, Link()))}))
    assert [size for *_, size in found] == [8 * MB4, MB4 // 2 + 7, MB4 // 2 + 100]
    assert [start for _, start, _, _ in found] == pytest.approx([1, 4, 6])


def test_a_bucket_does_not_wait_for_layers_without_weights() -> None:
    """The gradients of `b` are final after 1 of 2 s. `a` has no weights."""
    layers = [LayerCost("a", 0, 1), LayerCost("b", 0, 1, 10)]
    ((_, start, _, _),) = reduce_beside({0: RingGradients(layers, [BackwardSpan(4, 6)], Ring(2, Link()))})
    assert start == 5


def test_a_forecast_uses_the_buckets_of_training() -> None:
    sizes = [3 << 20, 5 << 20, 1 << 20, 1 << 20, 2 << 20, 7, 30 << 20, 1 << 20]
    layers = [LayerCost(str(i), 0, 1, size) for i, size in enumerate(sizes)]
    forecast = RingGradients(layers, [BackwardSpan(0, 8)], Ring(2, Link())).buckets()
    training = plan_buckets([Gradient(str(i), (size // 4,), "float32") for i, size in enumerate(sizes)])
    assert [size // 4 for _, size in forecast] == [sum(bucket.counts) for bucket in training.buckets]


def test_a_model_without_gradients_has_no_reduce() -> None:
    assert (
        list(reduce_beside({0: RingGradients([LayerCost("a", 1, 1)], [BackwardSpan(0, 1)], Ring(2, Link()))}))
        == []
    )


def across(inner: Link) -> Cluster:
    """Build two hosts of two devices each, with 5 bytes/s between the hosts in each direction."""
    return Cluster(
        tuple(Host(h, (Device(f"{h}0"), Device(f"{h}1")), Link(0, 5.0), inner) for h in "xy"),
    )


def test_rings_between_the_same_hosts_take_turns() -> None:
    """Each ring sends 2 (2 - 1) / 2 x 10 bytes at 5 bytes/s: 2 s. Inside a host each pair has a link."""
    cluster, layers = across(Link(0, 5.0)), [LayerCost("a", 0, 1, 10)]
    for pairs, ends in (
        ([("x0", "y0"), ("x1", "y1")], [3, 5]),
        ([("x0", "x1"), ("y0", "y1")], [3, 3.5]),
    ):
        early, late = (Ring.of(cluster, pair) for pair in pairs)
        gradients = {
            0: RingGradients(layers, [BackwardSpan(0, 1.5)], late),
            1: RingGradients(layers, [BackwardSpan(0, 1)], early),
        }
        found = [(key, end) for key, _, end, _ in reduce_beside(gradients)]
        assert found == [(1, ends[0]), (0, ends[1])]


def test_a_ring_occupies_a_link_only_as_long_as_the_link_needs() -> None:
    """The ring of three takes 10 s on x's inner link. The link between the hosts needs only 4 / 3 x 2 s."""
    cluster, layers = across(Link(0, 4 / 3)), [LayerCost("a", 0, 1, 10)]
    rings = Ring.of(cluster, ["x0", "x1", "y0"]), Ring.of(cluster, ["x1", "y1"])
    found = list(
        reduce_beside({n: RingGradients(layers, [BackwardSpan(0, 0)], ring) for n, ring in enumerate(rings)})
    )
    assert [(start, end) for _, start, end, _ in found] == [
        pytest.approx((0, 10)),
        pytest.approx((8 / 3, 8 / 3 + 2)),
    ]


def test_a_ring_pauses_while_transfers_use_its_link() -> None:
    """The reduce needs 2 s from 1 s on. Transfers use x's link until 1.5 s and y's link from 2 to 3 s."""
    cluster = across(Link())
    one = RingGradients([LayerCost("a", 0, 1, 10)], [BackwardSpan(0, 1)], Ring.of(cluster, ["x0", "y0"]))
    taken = {("out of", "x"): [(0, 1.5)], ("into", "y"): [(2, 2.5), (2.25, 3)], ("out of", "z"): [(3, 9)]}
    ((_, start_s, end_s, _),) = reduce_beside({0: one}, taken)
    assert (start_s, end_s) == pytest.approx((1, 1 + 2 + 0.5 + 1))
