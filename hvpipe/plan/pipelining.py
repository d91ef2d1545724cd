"""How micro-batches run through the stages, as far as a plan depends on it: how many are in flight where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvpipe.errors import HvpipeError

IN_FLIGHT: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda stage, stages, microbatches: microbatches,
    "1f1b": lambda stage, stages, microbatches: min(microbatches, stages - stage),
    "zb-h1": lambda stage, stages, microbatches: min(microbatches, stages - stage),
}
"""For each schedule, how many micro-batches a stage holds at most, by (stage, stages, microbatches).

GPipe: Huang et al., 2019. 1F1B: Narayanan et al. (PipeDream-Flush), 2021. ZB-H1: Qi et al., 2023.
"""


@dataclass(frozen=True)
class Pipelining:
    """The schedule and how many micro-batches a step has; a profile's costs are those of one of them.

    With `recompute`, a stage keeps only what it received and runs its forward again before the backward.
    """

    schedule: str = "1f1b"
    microbatches: int = 8
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in IN_FLIGHT:
            raise HvpipeError(
                f"schedule should be one of {', '.join(IN_FLIGHT)}. Received: schedule={self.schedule!r}"
            )
        if self.microbatches < 1:
            raise HvpipeError(
                f"microbatches should be at least 1. Received: microbatches={self.microbatches}"
            )

    def in_flight(self, stage: int, stages: int) -> int:
        """How many micro-batches stage number `stage` of `stages` keeps activations of, at most."""
        return IN_FLIGHT[self.schedule](stage, stages, self.microbatches)


DEFAULT_PIPELINING = Pipelining()
