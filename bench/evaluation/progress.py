"""The progress of an evaluation and the time left, a line each."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class EvaluationProgress:
    """Prints lines of progress, with the time left by the mean of the rounds so far."""

    def __init__(self, rounds: int, out: TextIO | None = None) -> None:
        self._rounds = rounds
        self._done = 0
        self._began_s = time.monotonic()
        self._out = out if out is not None else sys.stderr

    def describe(self) -> str:
        """Say how many rounds are done, and after the first one how long the others will take."""
        said = f"{self._done} of {self._rounds} rounds"
        if not self._done:
            return said
        mean_s = (time.monotonic() - self._began_s) / self._done
        return f"{said}, {format_left(mean_s * (self._rounds - self._done))} left"

    def done(self) -> None:
        self._done += 1

    def leave_out(self, rounds: int) -> None:
        """Take rounds out that need not run."""
        self._rounds -= rounds

    def working_on(self, what: str) -> None:
        self.say(f"[{self.describe()}] {what}")

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def format_left(seconds: float) -> str:
    """Format a duration as 1 h 5 min, 12 min or 40 s."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{round(seconds / 60)} min" if seconds >= 90 else f"{round(seconds)} s"
