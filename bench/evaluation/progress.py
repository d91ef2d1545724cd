"""The progress of an evaluation and the time left: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class EvaluationProgress:
    """Prints lines of progress. It counts estimated seconds and corrects the time left by their errors."""

    def __init__(self, total_s: float, out: TextIO | None = None) -> None:
        self._total_s = total_s
        self._done_s = 0.0  # by the estimates
        self._taken_s = 0.0  # by the clock
        self._out = out if out is not None else sys.stderr

    @property
    def share(self) -> float:
        """The share that is done, 0 to 1."""
        left_s = self._total_s - self._done_s
        return self._done_s / self._total_s if left_s > 1e-6 else 1.0

    @property
    def left_s(self) -> float:
        """The time left by the estimates, corrected once a twentieth is done."""
        begun = self._done_s > max(0.0, 0.05 * self._total_s)
        factor = self._taken_s / self._done_s if begun else 1.0
        return max(0.0, self._total_s - self._done_s) * factor

    @contextmanager
    def part(self, what: str, estimated_s: float) -> Iterator[None]:
        """Count the block as done when it ends. A block that raises does not count."""
        begin = time.monotonic()
        self.working_on(what)
        yield
        self._done_s += estimated_s
        self._taken_s += time.monotonic() - begin
        self.moved()

    def leave_out(self, estimated_s: float) -> None:
        """Take a part out that need not run."""
        self._total_s -= estimated_s
        self.moved()

    def working_on(self, what: str) -> None:
        """Show what is being done."""
        self.say(f"[{self.share:4.0%}, {format_left(self.left_s)} left] {what}")

    def moved(self) -> None:
        """Show that a part is done."""

    def say(self, text: str) -> None:
        """Print a line that stays."""
        print(text, file=self._out, flush=True)


class BarProgress(EvaluationProgress):
    """Shows the same as a bar at the bottom of the terminal."""

    def __init__(self, total_s: float) -> None:
        super().__init__(total_s)
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %  {task.fields[left]}  {task.description}"),
        )
        self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=1.0, left="")

    def __enter__(self) -> BarProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def working_on(self, what: str) -> None:
        self._bar.update(self._task, description=what)
        self.moved()

    def moved(self) -> None:
        self._bar.update(self._task, completed=self.share, left=f"{format_left(self.left_s)} left")

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


@contextmanager
def shown(total_s: float) -> Iterator[EvaluationProgress]:
    """Yield a bar if standard error is a terminal and rich is installed, else plain lines."""
    try:
        import rich  # noqa: F401
    except ImportError:
        drawable = False
    else:
        drawable = sys.stderr.isatty()
    if not drawable:
        yield EvaluationProgress(total_s)
        return
    with BarProgress(total_s) as progress:
        yield progress


def format_left(seconds: float) -> str:
    """Format a duration as 1 h 5 min, 12 min or 40 s."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{round(seconds / 60)} min" if seconds >= 90 else f"{round(seconds)} s"
