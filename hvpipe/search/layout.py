"""A point of the search: which devices run which layers, under which schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from hvpipe.plan.replication import Group


@dataclass(frozen=True)
class StageLayout:
    """A pipeline to judge.

    Args:
        groups: The devices of each stage. With chunks, each has one device, and the stages go round them in a
            circle.
        ends: The end of each stage's layers, the last one the number of layers.
        schedule: The name of the schedule.
        chunks: Stages of each device.
    """

    groups: tuple[Group, ...]
    ends: tuple[int, ...]
    schedule: str
    chunks: int = 1

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.groups, self.ends, self.schedule, self.chunks))

    @property
    def placement(self) -> list[tuple[Group, range]]:
        """The devices and layers of each stage."""
        spans = pairwise((0, *self.ends))
        return [(group, range(*span)) for group, span in zip(self.groups * self.chunks, spans, strict=True)]

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices in use."""
        return tuple(name for group in self.groups for name in group)

    @property
    def mode(self) -> str:
        """The mode: "pipeline", "hybrid" if a stage has replicas, "data" if that is the only stage."""
        if max(map(len, self.groups)) == 1:
            return "pipeline"
        return "hybrid" if len(self.groups) > 1 else "data"


def even_ends(layers: int, stages: int) -> tuple[int, ...]:
    """Return ends that give every stage the same number of layers, as nearly as possible."""
    return tuple(layers * (stage + 1) // stages for stage in range(stages))


def are_ends(ends: Sequence[int], layers: int) -> bool:
    """Tell whether every stage has a layer and the last ends with the model."""
    return ends[-1] == layers and all(a < b for a, b in pairwise((0, *ends)))
