"""Seeds of layers that draw random numbers. In a pipeline, each rank with a copy of a layer has its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hvpipe.keras.compat import layers_in, seed_generators


def seeds_of(layers: Iterable[Any]) -> list[Any]:
    """Return the states of all seed generators in these layers, each once: int64[2], a seed and its draws."""
    found = {
        id(generator.state): generator.state
        for layer in layers
        for inner in layers_in(layer)
        for generator in seed_generators(inner)
    }
    return list(found.values())


def own_seed(state: Any, place: int) -> Any:
    """Return the seed state (int64[2]) for holder `place` of a shared layer. The first keeps `state`."""
    if place == 0:
        return state
    seed, draws = (int(number) for number in state)
    (mixed,) = np.random.SeedSequence([seed % 2**32, place]).generate_state(1)
    return np.array([mixed, draws], state.dtype)
