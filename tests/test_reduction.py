"""All-reduces beside the backward: the ring's formula, and buckets worked out by hand."""

from __future__ import annotations

import pytest

from hvpipe.profile import LayerCost
from hvpipe.reduction import BUCKET_BYTES, Backward, Ring, reduce_beside
from hvpipe.topology import Cluster, Device, Host, Link, equal_cluster

MB4 = BUCKET_BYTES


def test_a_ring_takes_two_rounds_less_one_of_an_nth_each() -> None:
    # 2 (4 - 1) messages of 25 bytes: 6 (0.5 + 25 / 50).
    assert Ring(4, Link(0.5, 50.0)).seconds(100) == pytest.approx(6)
    assert Ring(1, Link(0.5, 50.0)).seconds(100) == 0


def test_the_slowest_link_of_the_ring_counts() -> None:
    bus, network = Link(0, 100.0), Link(0.5, 10.0)
    hosts = tuple(Host(h, (Device(f"{h}0"), Device(f"{h}1")), network, bus) for h in "xy")
    assert Ring.of(Cluster(hosts), ["x0", "x1"]) == Ring(2, bus)
    assert Ring.of(Cluster(hosts), ["x0", "y0", "x1"]) == Ring(3, network)
    assert Ring.of(equal_cluster(1), ["h0"]).seconds(100) == 0


def test_a_bucket_goes_when_it_is_final_on_all_and_the_one_before_is_done() -> None:
    """Layers c, b, a take 1, 2 and 1 of the backward's 4 s; the other device is two seconds behind.

    c's bucket is final at 1 and 3; b's at 3 and 5; a's at 4 and 6. Each takes 2.5 s.
    """
    layers = [LayerCost(name, 0, seconds, MB4) for name, seconds in (("a", 1), ("b", 2), ("c", 1))]
    ring = Ring(2, Link(0, MB4 / 2.5))
    found = list(reduce_beside(layers, [Backward(0, 4), Backward(2, 6)], ring))
    assert [(start, end) for start, end, _ in found] == [
        pytest.approx((3, 5.5)),
        pytest.approx((5.5, 8)),
        pytest.approx((8, 10.5)),
    ]


def test_small_gradients_travel_together_and_none_is_left_behind() -> None:
    sizes = [100, MB4 // 2, MB4 // 2, 0, 7]
    layers = [LayerCost(str(i), 0, 1, size) for i, size in enumerate(sizes)]
    found = list(reduce_beside(layers, [Backward(0, 5)], Ring(2, Link())))
    assert [size for _, _, size in found] == [MB4 + 7, 100]
    assert [start for start, _, _ in found] == pytest.approx([4, 5])


def test_no_gradients_no_reduce() -> None:
    assert list(reduce_beside([LayerCost("a", 1, 1)], [Backward(0, 1)], Ring(2, Link()))) == []
