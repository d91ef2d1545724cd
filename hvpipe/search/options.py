"""What a search may choose: schedule, recomputation, number of stages, modes."""

from __future__ import annotations

from dataclasses import dataclass

from hvpipe.errors import HvpipeError
from hvpipe.plan.pipelining import SCHEDULES, Pipelining, checked_recompute

AUTO_SCHEDULES = (("1f1b", 1), ("eager-1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2))
"""The schedules, with their chunks, that "auto" stands for; the first is the usual one."""


@dataclass(frozen=True)
class PipeliningChoice:
    """How micro-batches may run; what is "auto" is chosen with the plan, by the forecast of its step.

    Args:
        schedule: A name as `Pipelining` takes it, or "auto".
        microbatches: Micro-batches of a step, at least 1. A profile's costs are for one.
        recompute: True, False or numbers of stages as `Pipelining` takes them. "auto" recomputes in the
            stages that would not fit otherwise.
        chunks: Stages of each device of an interleaved schedule. With schedule "auto" and 2, the best
            pipelines are also tried with more.

    Raises:
        HvpipeError: If a value is out of range.

    Example:
        ```python
        best = choose(profile, cluster, PipeliningChoice(microbatches=16))
        ```
    """

    schedule: str = "auto"
    microbatches: int = 8
    recompute: bool | tuple[int, ...] | str = "auto"
    chunks: int = 2

    def __post_init__(self) -> None:
        if self.schedule not in ("auto", *SCHEDULES):
            raise HvpipeError(
                f"schedule should be auto, {', '.join(SCHEDULES)}. Received: schedule={self.schedule!r}"
            )
        if self.recompute != "auto":
            object.__setattr__(self, "recompute", checked_recompute(self.recompute))
        for name, chunks in self.schedules:
            Pipelining(name, self.microbatches, self.recompute != "auto" and self.fixed_recompute, chunks)

    @staticmethod
    def of(given: Pipelining | PipeliningChoice) -> PipeliningChoice:
        """Return the choice that leaves nothing open but what `given` does."""
        if isinstance(given, PipeliningChoice):
            return given
        return PipeliningChoice(given.schedule, given.microbatches, given.recompute, given.chunks)

    @property
    def schedules(self) -> tuple[tuple[str, int], ...]:
        """The schedules to try, each with its chunks."""
        if self.schedule == "auto":
            return tuple((name, self.chunks if chunks > 1 else 1) for name, chunks in AUTO_SCHEDULES)
        return ((self.schedule, self.chunks if self.schedule == "interleaved" else 1),)

    @property
    def fixed_recompute(self) -> bool | tuple[int, ...]:
        """The stages that recompute in any case."""
        return False if isinstance(self.recompute, str) else self.recompute

    @property
    def usual(self) -> Pipelining:
        """The first schedule to try, with the recomputation that is fixed."""
        name, chunks = self.schedules[0]
        return Pipelining(name, self.microbatches, self.fixed_recompute, chunks)


AUTO = PipeliningChoice()
"""Everything open, with 8 micro-batches."""
