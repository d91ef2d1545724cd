"""Counts how often a forward moves the averages of BatchNormalization layers, while its graph is made."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from hvpipe.keras import compat


def batch_normalizations(layers: Iterable[Any]) -> list[Any]:
    """Return the BatchNormalization layers among these layers and inside them, each once."""
    inner = {id(one): one for layer in layers for one in compat.layers_in(layer)}
    return [one for one in inner.values() if isinstance(one, keras.layers.BatchNormalization)]


@contextlib.contextmanager
def counted_moves(layers: Iterable[Any]) -> Iterator[Counter[int]]:
    """Count, by the layer's id, the calls that move its averages; a frozen layer moves none."""
    moves: Counter[int] = Counter()
    with contextlib.ExitStack() as stack:
        for layer in batch_normalizations(layers):
            stack.enter_context(compat.moments_counted(layer, functools.partial(moves.update, [id(layer)])))
        yield moves
