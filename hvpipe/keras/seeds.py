"""Seeds of layers that draw random numbers: which there are, and one for each rank that holds a copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def seeds_of(layers: Iterable[Any]) -> list[Any]:
    """The states of the seed generators of these layers, each once: int64[2], a seed and a count of draws."""
    found = {
        id(generator.state): generator.state
        for layer in layers
        for inner in layer._flatten_layers()
        for generator in inner._seed_generators
    }
    return list(found.values())


def own_seed(state: Any, place: int) -> Any:
    """The state (int64[2]) that the holder at `place` makes of one that several hold: the first keeps it."""
    if place == 0:
        return state
    seed, draws = (int(number) for number in state)
    (mixed,) = np.random.SeedSequence([seed % 2**32, place]).generate_state(1)
    return np.array([mixed, draws], state.dtype)
