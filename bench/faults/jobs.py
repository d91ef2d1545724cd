"""What a trial found, and a job that runs to its end, or until it counts as a hang."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bench.launch.processes import started


@dataclass(frozen=True)
class Trial:
    """What happened. `problem` is "" if it is what must happen; `output` is what the job printed.

    `after_s` is from the fault, or from the deadline that it ran into, to the end of the job. If the job goes
    on, it is the time lost, 0 if that is not measured.
    """

    problem: str
    after_s: float = 0.0
    output: str = ""


@dataclass(frozen=True)
class Ended:
    """How a job ended, and when."""

    code: int | None  # None: it hung
    output: str
    at_s: float


def run_to_end(
    command: Sequence[str],
    environ: Mapping[str, str],
    limit_s: float,
    during: Callable[[subprocess.Popen[Any]], None] = lambda process: None,
) -> Ended:
    """Run a job, with `during` beside it, until it ends or hangs. None of its processes is left."""
    code: int | None = None
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        with started(command, environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output) as process:
            during(process)
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
            ended_s = time.time()
        output.seek(0)
        return Ended(code, output.read(), ended_s)
