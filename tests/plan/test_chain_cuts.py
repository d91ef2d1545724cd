"""Cuts of a chain, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from hvpipe.plan.chain_cuts import ChainCutter
from hvpipe.plan.span_costs import Spans
from hvpipe.specs.cluster import equal_cluster
from model_graphs import chain


def test_cuts_where_little_crosses_lie_near_equal_times() -> None:
    """The cut after 3 of 8 equal layers sends least. An eighth of the model is a quarter of a stage."""
    sizes = (9, 9, 1, 9, 9, 9, 9, 0)
    layers = [
        replace(one, output_bytes=size) for one, size in zip(chain(*[3] * 8).layers, sizes, strict=True)
    ]
    profile = replace(chain(*[3] * 8), layers=tuple(layers))
    cutter = ChainCutter(profile, Spans(profile), equal_cluster(2))
    groups = (("h0",), ("h1",))
    assert cutter.narrow(groups, 0.1) == (4, 8)
    assert cutter.narrow(groups, 0.3) == (3, 8)
