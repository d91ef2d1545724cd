"""The schedule and micro-batches that a plan is made for, and how many micro-batches are in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hvpipe.errors import HvpipeError

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "interleaved")
"""Names of the schedules that a plan can be made for."""


def leads(gaps: Sequence[int]) -> tuple[int, ...]:
    """Return how many micro-batches each stage's forwards run ahead of its backwards under 1F1B.

    In the steady state, one micro-batch arrives per period. `gaps` has, for each stage, the periods from one
    micro-batch of a rank to its next; for equal replicas that is their number. A rank has this many periods
    for one micro-batch. So a backward returns at the earliest after the next stage's gap plus the next
    stage's lead. This stage's lead is that sum, rounded up to whole turns of its ranks. With less, later
    stages would wait for forwards.
    """
    return _leads(tuple(gaps))


@lru_cache(maxsize=256)
def _leads(gaps: tuple[int, ...]) -> tuple[int, ...]:
    found = [0]
    for gap, next_gap in zip(gaps[-2::-1], gaps[:0:-1], strict=True):
        found.append(gap * -(-(found[-1] + next_gap) // gap))
    return tuple(found[::-1])


@dataclass(frozen=True)
class Pipelining:
    """The schedule of a pipeline and its micro-batches. A profile's costs are for one micro-batch.

    Args:
        schedule: "gpipe", "1f1b", "eager-1f1b", "zb-h1" or "interleaved".
        microbatches: Micro-batches of a step, at least 1.
        recompute: Stages that keep only their inputs and run their forward again before the backward: True
            for all, False for none, or their numbers, from 0.
        chunks: Stages of each device: 2 or more with "interleaved", otherwise 1.

    Raises:
        HvpipeError: If a value is out of range.

    Example:
        ```python
        how = Pipelining("interleaved", microbatches=16, chunks=2)
        ```
    """

    schedule: str = "1f1b"
    microbatches: int = 8
    recompute: bool | tuple[int, ...] = False
    chunks: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "recompute", checked_recompute(self.recompute))
        if self.schedule not in SCHEDULES:
            raise HvpipeError(
                f"schedule should be one of {', '.join(SCHEDULES)}. Received: schedule={self.schedule!r}"
            )
        if self.microbatches < 1:
            raise HvpipeError(
                f"microbatches should be at least 1. Received: microbatches={self.microbatches}"
            )
        if self.chunks < 1 or (self.chunks > 1) != (self.schedule == "interleaved"):
            raise HvpipeError(
                "chunks should be 2 or more with schedule='interleaved', and 1 with any other schedule. "
                f"Received: schedule={self.schedule!r}, chunks={self.chunks}"
            )

    def recomputes(self, stage: int) -> bool:
        """Tell whether stage number `stage` runs its forward again."""
        return self.recompute if isinstance(self.recompute, bool) else stage in self.recompute

    @property
    def least_stages(self) -> int:
        """The least number of stages, given the stages that `recompute` names."""
        return 1 if isinstance(self.recompute, bool) else self.recompute[-1] + 1

    def in_flight(self, stage: int, replicas: Sequence[int]) -> int:
        """Return the most micro-batches whose activations a rank of stage number `stage` keeps.

        `replicas` are the numbers of ranks of all stages. The result is an estimate if ranks of a stage have
        unequal shares or a rank has several stages; `verify(schedule).peak_stash` counts exactly.
        """
        return _IN_FLIGHT[self.schedule](self, stage, replicas)

    def all_in_flight(self, replicas: Sequence[int]) -> list[int]:
        """Return `in_flight` of every stage."""
        counts = tuple(replicas)
        return [self.in_flight(stage, counts) for stage in range(len(counts))]


def checked_recompute(given: object) -> bool | tuple[int, ...]:
    """Return True, False, or the sorted numbers of stages; an empty sequence becomes False."""
    if isinstance(given, bool):
        return given
    numbers = tuple(given) if isinstance(given, (tuple, list, set, frozenset, range)) else None
    if numbers is None or not all(type(number) is int and number >= 0 for number in numbers):
        raise HvpipeError(
            f"recompute should be True, False or the numbers of stages, from 0. Received: recompute={given!r}"
        )
    return tuple(sorted(set(numbers))) or False


def _gpipe(how: Pipelining, stage: int, replicas: Sequence[int]) -> int:
    """Count all micro-batches of the rank (GPipe: Huang et al., 2019)."""
    return -(-how.microbatches // replicas[stage])


def _one_f_one_b(how: Pipelining, stage: int, replicas: Sequence[int]) -> int:
    """Count the forwards of the warm-up and one more (PipeDream-Flush: Narayanan et al., 2021)."""
    return min(_gpipe(how, stage, replicas), leads(replicas)[stage] // replicas[stage] + 1)


def _eager(how: Pipelining, stage: int, replicas: Sequence[int]) -> int:
    """Count twice the warm-up of 1F1B and one more (Zhuang et al., 2023)."""
    return min(_gpipe(how, stage, replicas), 2 * leads(replicas)[stage] // replicas[stage] + 1)


def _zb_h1(how: Pipelining, stage: int, replicas: Sequence[int]) -> int:
    """Count as in 1F1B, plus the micro-batches whose weight gradients are put off (Qi et al., 2024)."""
    put_off = sum(replicas[:stage]) // replicas[stage]
    return min(_gpipe(how, stage, replicas), leads(replicas)[stage] // replicas[stage] + 1 + put_off)


def _interleaved(how: Pipelining, stage: int, replicas: Sequence[int]) -> int:
    """Count an even part of what the rank stashes, rounded up (Narayanan et al., SC 2021)."""
    ranks = len(replicas) // how.chunks
    group = -(-how.microbatches // max(1, how.microbatches // ranks))
    stash = (how.chunks - 1) * group + 2 * (ranks - stage % ranks) - 1
    return min(how.microbatches, -(-stash // how.chunks))


_IN_FLIGHT: dict[str, Callable[[Pipelining, int, Sequence[int]], int]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "eager-1f1b": _eager,
    "zb-h1": _zb_h1,
    "interleaved": _interleaved,
}

DEFAULT_PIPELINING = Pipelining()
