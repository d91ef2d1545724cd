"""The progress of an evaluation and the time left, a line each."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class EvaluationProgress:
    """Prints lines of progress, with the time left by the mean of the rounds so far."""

    def __init__(self, rounds: int, out: TextIO | None = None) -> None:
        self._rounds, self._done = rounds, 0
        self._began_s = time.monotonic()
        self._out = sys.stderr if out is None else out

    def describe(self) -> str:
        """Say how many rounds are done, and after the first one how long the others will take."""
        said = f"{self._done} of {self._rounds} rounds"
        if not self._done:
            return said
        mean_s = (time.monotonic() - self._began_s) / self._done
        return f"{said}, {mean_s * (self._rounds - self._done) / 60:.0f} min left"

    def done(self) -> None:
        self._done += 1

    def leave_out(self, rounds: int) -> None:
        """Take rounds out that need not run."""
        self._rounds -= rounds

    def working_on(self, what: str) -> None:
        self.say(f"[{self.describe()}] {what}")

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)
