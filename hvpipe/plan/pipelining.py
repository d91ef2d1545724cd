"""How micro-batches run through the stages, as far as a plan depends on it: how many are in flight where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvpipe.errors import HvpipeError

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved")


def leads(gaps: Sequence[int]) -> list[int]:
    """How far each stage's forwards run ahead of its backwards under 1F1B, in numbers of micro-batches.

    In a steady state one micro-batch comes in each period, and a rank takes as many periods for one of its
    own as there are to its next: `gaps`, the number of a stage's ranks where they are equal. So a backward
    comes back at the earliest after the gap of the next stage and what that runs ahead; the lead is as much,
    in whole turns of this stage's ranks. Less would let the stages behind wait for forwards.
    """
    found = [0]
    for gap, next_gap in zip(gaps[-2::-1], gaps[:0:-1], strict=True):
        found.insert(0, gap * -(-(found[0] + next_gap) // gap))
    return found


@dataclass(frozen=True)
class Pipelining:
    """The schedule and how many micro-batches a step has; a profile's costs are those of one of them.

    With `recompute`, a stage keeps only what it received and runs its forward again before the backward: all
    stages, or those of which it has the numbers.
    `chunks`, 2 or more, is how many stages each device has under "interleaved"; elsewhere it is 1.
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
                "chunks should be 2 or more with schedule='interleaved', and 1 with every other. "
                f"Received: schedule={self.schedule!r}, chunks={self.chunks}"
            )

    def recomputes(self, stage: int) -> bool:
        """Whether stage number `stage` runs its forward again."""
        return self.recompute if isinstance(self.recompute, bool) else stage in self.recompute

    @property
    def least_stages(self) -> int:
        """How many stages there must be at least, of those that are named."""
        return 1 if isinstance(self.recompute, bool) else self.recompute[-1] + 1

    def in_flight(self, stage: int, replicas: Sequence[int]) -> int:
        """How many micro-batches a rank of stage number `stage` keeps activations of, at most.

        `replicas` are the numbers of ranks of all stages. Where these have unequal shares, or a rank several
        stages, it is an estimate: `verify.peak_stash` counts.
        """
        return _IN_FLIGHT[self.schedule](self, stage, replicas)


def checked_recompute(given: object) -> bool | tuple[int, ...]:
    """All or none, or the numbers of stages in order, of which none is none."""
    if isinstance(given, bool):
        return given
    numbers = tuple(given) if isinstance(given, (tuple, list, set, frozenset, range)) else None
    if numbers is None or not all(type(number) is int and number >= 0 for number in numbers):
        raise HvpipeError(
            f"recompute should be True, False or the numbers of stages, from 0. Received: recompute={given!r}"
        )
    return tuple(sorted(set(numbers))) or False


def _gpipe(how: Pipelining, stage: int, replicas: Sequence[int]) -> int:
    """All that it has (Huang et al., 2019)."""
    return -(-how.microbatches // replicas[stage])


def _one_f_one_b(how: Pipelining, stage: int, replicas: Sequence[int]) -> int:
    """One more than it warms up with (PipeDream-Flush: Narayanan et al., 2021)."""
    return min(_gpipe(how, stage, replicas), leads(replicas)[stage] // replicas[stage] + 1)


def _zb_h1(how: Pipelining, stage: int, replicas: Sequence[int]) -> int:
    """As 1F1B, and those whose weight gradients are put off (Qi et al., 2024)."""
    put_off = sum(replicas[:stage]) // replicas[stage]
    return min(_gpipe(how, stage, replicas), leads(replicas)[stage] // replicas[stage] + 1 + put_off)


def _interleaved(how: Pipelining, stage: int, replicas: Sequence[int]) -> int:
    """An even part of what its rank stashes, rounded up (Narayanan et al., SC 2021)."""
    ranks = len(replicas) // how.chunks
    group = -(-how.microbatches // max(1, how.microbatches // ranks))
    stash = (how.chunks - 1) * group + 2 * (ranks - stage % ranks) - 1
    return min(how.microbatches, -(-stash // how.chunks))


_IN_FLIGHT: dict[str, Callable[[Pipelining, int, Sequence[int]], int]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "zb-h1": _zb_h1,
    "interleaved": _interleaved,
}

DEFAULT_PIPELINING = Pipelining()
