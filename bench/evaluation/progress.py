"""The progress of an evaluation and the time left: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


class BarProgress(EvaluationProgress):
    """Shows the same as a bar at the bottom of the terminal."""

    def __init__(self, rounds: int) -> None:
        super().__init__(rounds)
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (BarColumn(), TextColumn("{task.description}"))
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("")

    def __enter__(self) -> BarProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def working_on(self, what: str) -> None:
        said = f"{self.describe()}  {what}"
        self._bar.update(self._task, completed=self._done, total=self._rounds, description=said)

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


@contextmanager
def shown(rounds: int) -> Iterator[EvaluationProgress]:
    """Yield a bar if standard error is a terminal and rich is installed, else plain lines."""
    try:
        import rich  # noqa: F401
    except ImportError:
        drawable = False
    else:
        drawable = sys.stderr.isatty()
    if not drawable:
        yield EvaluationProgress(rounds)
        return
    with BarProgress(rounds) as progress:
        yield progress


def format_left(seconds: float) -> str:
    """Format a duration as 1 h 5 min, 12 min or 40 s."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{round(seconds / 60)} min" if seconds >= 90 else f"{round(seconds)} s"
