"""A schedule as plain numbers, for simulations that run thousands of schedules or millions of actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from hvpipe.schedule.action import Action
from hvpipe.schedule.algorithms import Turn
from hvpipe.schedule.schedule import Schedule, turns

FORWARD, BACKWARD, INPUTS, WEIGHTS = range(4)
KIND_NUMBERS = {"F": FORWARD, "B": BACKWARD, "I": INPUTS, "W": WEIGHTS}
_CHANGE = (1, -1, 0, -1)
"""How many micro-batches more a rank holds after F, B, I and W."""


@dataclass(frozen=True)
class CodedSchedule:
    """A schedule whose actions are numbers.

    Micro-batch i of stage s has number n = s * microbatches + i. Its forward has the code 2 n, its backward
    (B or I) the code 2 n + 1. The codes of W's come behind those of all forwards and backwards.

    Args:
        stages: Number of stages.
        microbatches: Number of micro-batches of a step.
        codes: For each rank the codes of its actions, in order.
        jobs: For each rank and action 4 x stage + kind, where kinds are F, B, I, W from 0.
        home: The rank of each number n.
    """

    stages: int
    microbatches: int
    codes: tuple[list[int], ...]
    jobs: tuple[list[int], ...]
    home: list[int]

    @staticmethod
    def of(schedule: Schedule) -> CodedSchedule:
        """Return the coded form of a schedule that `verify` accepts."""
        return CodedSchedule.from_turns(
            ([(a.kind, a.microbatch, a.stage) for a in actions] for actions in schedule.actions),
            schedule.stages,
            schedule.microbatches,
        )

    @staticmethod
    def from_turns(orders: Iterable[Iterable[Turn]], stages: int, microbatches: int) -> CodedSchedule:
        """Code the turns of each rank."""
        first_w = 2 * stages * microbatches
        home = [0] * (stages * microbatches)
        all_codes, all_jobs = [], []
        for rank, order in enumerate(orders):
            codes, jobs = [], []
            for kind, i, stage in order:
                number = stage * microbatches + i
                if kind == "F":
                    codes.append(2 * number)
                    home[number] = rank
                else:
                    codes.append(first_w + number if kind == "W" else 2 * number + 1)
                jobs.append(4 * stage + KIND_NUMBERS[kind])
            all_codes.append(codes)
            all_jobs.append(jobs)
        return CodedSchedule(stages, microbatches, tuple(all_codes), tuple(all_jobs), home)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.codes)

    @cached_property
    def actions(self) -> int:
        """Number of actions of all ranks."""
        return sum(map(len, self.codes))

    @cached_property
    def jobs_of(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the distinct jobs, sorted."""
        return tuple(tuple(sorted(set(jobs))) for jobs in self.jobs)

    @cached_property
    def ranks_of(self) -> tuple[tuple[int, ...], ...]:
        """For each stage its ranks, in order."""
        m = self.microbatches
        return tuple(
            tuple(sorted(set(self.home[stage * m : (stage + 1) * m]))) for stage in range(self.stages)
        )

    @cached_property
    def _peaks(self) -> tuple[int, ...]:
        return tuple(
            max(accumulate(_CHANGE[job & 3] for job in jobs)) if len({j >> 2 for j in of}) == 1 else 0
            for jobs, of in zip(self.jobs, self.jobs_of, strict=True)
        )

    def peak_stash(self, sizes: Sequence[int]) -> list[int]:
        """Return the most that each rank holds at one time. I frees some memory, which is not counted.

        Args:
            sizes: What a micro-batch of each stage holds from F until B or W.
        """
        found = []
        for jobs, of, peak in zip(self.jobs, self.jobs_of, self._peaks, strict=True):
            if peak:
                found.append(peak * sizes[of[0] >> 2])
            else:
                change: Mapping[int, int] = {job: _CHANGE[job & 3] * sizes[job >> 2] for job in of}
                found.append(max(accumulate(map(change.__getitem__, jobs))))
        return found

    @cached_property
    def most_in_flight(self) -> tuple[int, ...]:
        """For each stage the most micro-batches that its ranks hold, each at its fullest."""
        found = [0] * self.stages
        for jobs, of, peak in zip(self.jobs, self.jobs_of, self._peaks, strict=True):
            for stage in {job >> 2 for job in of}:
                mine = (_CHANGE[job & 3] for job in jobs if job >> 2 == stage)
                found[stage] += peak or max(accumulate(mine))
        return tuple(found)

    def actions_of(self, rank: int) -> Iterator[Action]:
        """Yield the actions of a rank, in order."""
        first_w = 2 * len(self.home)
        for job, code in zip(self.jobs[rank], self.codes[rank], strict=True):
            number = code - first_w if code >= first_w else code >> 1
            yield Action("FBIW"[job & 3], number % self.microbatches, job >> 2)


@lru_cache(maxsize=64)
def coded_schedule(
    name: str,
    counts: tuple[int, ...],
    microbatches: int,
    chunks: int = 1,
    shares: tuple[tuple[float, ...], ...] | None = None,
) -> CodedSchedule:
    """Return the coded form of `make_schedule(name, counts, microbatches, chunks, shares=shares)`."""
    ranks = len(counts) // chunks if chunks > 1 else counts
    orders = turns(name, ranks, microbatches, chunks, shares=shares)
    return CodedSchedule.from_turns(orders, len(counts), microbatches)
