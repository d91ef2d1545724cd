"""What happened in one trial of a fault."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """What happened.

    Attributes:
        problem: "" if it is what must happen.
        after_s: From the fault, or from the deadline that it ran into, to the end of the job. If it goes on:
            the time lost, 0 if that is not measured.
        output: What the job printed.
    """

    problem: str
    after_s: float
    output: str
