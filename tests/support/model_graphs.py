"""Profiles and clusters that the planning tests share."""

from __future__ import annotations

import string
from dataclasses import replace
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from hvpipe.specs.cluster import Cluster, Link, equal_cluster
from hvpipe.specs.layer_cost import LayerCost, OutputTensor
from hvpipe.specs.profile import Profile

MODELS = ("alexnet", "gnmt", "inception_v3", "resnet50", "vgg16")


@cache
def model(name: str) -> Profile:
    """Return the profile of a real model from PipeDream."""
    return Profile.read(Path(__file__).parents[1] / "data" / "profiles" / f"{name}.txt")


def chain(*seconds: float, output_bytes: int = 0, saved_bytes: int = 0, weight_bytes: int = 0) -> Profile:
    """Return a chain of layers a, b, ..., z, l26, ... A third of each layer's time is forward."""
    names = [*string.ascii_lowercase, *(f"l{i}" for i in range(26, len(seconds)))]
    layers = tuple(
        LayerCost(names[i], s / 3, 2 * s / 3, weight_bytes, 0, output_bytes, saved_bytes)
        for i, s in enumerate(seconds)
    )
    return Profile(layers, tuple((i, i + 1) for i in range(len(layers) - 1)))


@st.composite
def profiles(draw: st.DrawFn, most: int = 14) -> Profile:
    """Generate small graphs with skip connections, gradients of other sizes, and outputs of two tensors."""
    count = draw(st.integers(4, most))
    sizes = st.integers(0, 50)
    layers = tuple(
        LayerCost(f"l{i}", *(draw(st.integers(0, 9)) / 10 for _ in "fb"), *(draw(sizes) for _ in "wsoa"))
        for i in range(count)
    )
    skips = draw(st.lists(st.tuples(st.integers(0, count - 2), st.integers(1, count)), max_size=5))
    edges = {(i, i + 1) for i in range(count - 1)} | {(i, min(i + n, count - 1)) for i, n in skips}
    whole = Profile(layers, tuple(sorted(edges)))
    made = zip(layers, whole.users, strict=True)
    return replace(whole, layers=tuple(draw(_outputs(layer, users)) for layer, users in made))


@st.composite
def _outputs(draw: st.DrawFn, layer: LayerCost, users: tuple[int, ...]) -> LayerCost:
    """Give a layer's gradient a size of its own, or split its output into two tensors."""
    sizes = st.none() | st.integers(0, 50)
    if len(users) < 2 or draw(st.booleans()):
        return replace(layer, gradient_bytes=draw(sizes))
    names = tuple(f"l{user}" for user in users)
    cut, shared = draw(st.integers(1, len(names) - 1)), draw(st.integers(0, 1))
    of_tensors = (names[: cut + shared], names[cut:])
    tensors = (OutputTensor(draw(st.integers(0, 50)), of, draw(sizes)) for of in of_tensors)
    return replace(layer, tensors=tuple(tensors))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Generate clusters of 2 to 4 devices with up to two speeds, some with little memory."""
    speeds = tuple(draw(st.lists(st.sampled_from((1.0, 0.5, 0.25)), min_size=1, max_size=2)))
    memory_bytes = draw(st.none() | st.integers(300, 3000))
    link = Link(draw(st.sampled_from((0.0, 0.01))), draw(st.sampled_from((30.0, 1000.0))))
    return equal_cluster(draw(st.integers(2, 4)), link, speeds=speeds, memory_bytes=memory_bytes)
