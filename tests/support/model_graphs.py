"""Profiles and clusters that the planning tests share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from hvpipe.specs.cluster import Cluster, Link, equal_cluster
from hvpipe.specs.profile import LayerCost, Profile

MODELS = ("alexnet", "gnmt", "inception_v3", "resnet50", "vgg16")


@cache
def model(name: str) -> Profile:
    """Return the profile of a real model from PipeDream."""
    return Profile.read(Path(__file__).parents[1] / "data" / "profiles" / f"{name}.txt")


def chain(*seconds: float, output_bytes: int = 0, saved_bytes: int = 0, weight_bytes: int = 0) -> Profile:
    """Return a chain of layers a, b, ... A third of each layer's time is forward."""
    layers = tuple(
        LayerCost("abcdefghijkl"[i], s / 3, 2 * s / 3, weight_bytes, 0, output_bytes, saved_bytes)
        for i, s in enumerate(seconds)
    )
    return Profile(layers, tuple((i, i + 1) for i in range(len(layers) - 1)))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Generate small graphs with skip connections."""
    count = draw(st.integers(4, 14))
    sizes = st.integers(0, 50)
    layers = tuple(
        LayerCost(f"l{i}", *(draw(st.integers(0, 9)) / 10 for _ in "fb"), *(draw(sizes) for _ in "wsoa"))
        for i in range(count)
    )
    skips = draw(st.lists(st.tuples(st.integers(0, count - 2), st.integers(1, count)), max_size=5))
    edges = {(i, i + 1) for i in range(count - 1)} | {(i, min(i + n, count - 1)) for i, n in skips}
    return Profile(layers, tuple(sorted(edges)))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Generate clusters of 2 to 4 devices with up to two speeds, some with little memory."""
    speeds = tuple(draw(st.lists(st.sampled_from((1.0, 0.5, 0.25)), min_size=1, max_size=2)))
    memory_bytes = draw(st.none() | st.integers(300, 3000))
    link = Link(draw(st.sampled_from((0.0, 0.01))), draw(st.sampled_from((30.0, 1000.0))))
    return equal_cluster(draw(st.integers(2, 4)), link, speeds=speeds, memory_bytes=memory_bytes)
