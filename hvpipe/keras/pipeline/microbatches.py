"""A batch, and how it is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Batch:
    """A batch on this rank: flat model inputs, flat targets (then sample weights), and its samples."""

    inputs: Sequence[Any]
    targets: Sequence[Any]
    samples: int


def split_batch(samples: int, microbatches: int) -> list[slice]:
    """Cut a batch into micro-batches whose sizes differ by at most one; the larger ones come first."""
    ends = [0]
    for i in range(microbatches):
        ends.append(ends[-1] + samples // microbatches + (i < samples % microbatches))
    return [slice(a, b) for a, b in pairwise(ends)]
