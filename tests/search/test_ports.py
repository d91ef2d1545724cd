"""How long ports are busy, worked out by hand."""

from __future__ import annotations

import pytest

from hvpipe.search.judge import Judge
from hvpipe.search.layout import StageLayout
from hvpipe.search.options import PipeliningChoice
from hvpipe.search.ports import PortTimes
from hvpipe.specs.cluster import Cluster, Device, Host, Link
from model_graphs import chain


def test_the_busiest_port_is_a_bound_of_the_step() -> None:
    """8 micro-batches of 1 MB leave h0 over 1 MB/s, each way; then 2 MB of gradients go round h1 and h2."""
    hosts = tuple(Host(f"h{i}", (Device(f"d{i}"),), Link(0, 1e6)) for i in range(3))
    profile = chain(3, 3, output_bytes=10**6, weight_bytes=2 * 10**6)
    judge = Judge(profile, Cluster(hosts), PipeliningChoice("1f1b", 8), 10**6)
    layout = StageLayout((("d0",), ("d1", "d2")), (1, 2), "1f1b")
    assert PortTimes(judge.model, 8).busiest_s(layout) == pytest.approx(8)
    small = StageLayout((("d0",), ("d1",)), (1, 2), "1f1b")
    assert PortTimes(judge.model, 2).busiest_s(small) == pytest.approx(2)
    one = judge.judge(layout)
    assert one is not None
    assert one.step_s >= 8
