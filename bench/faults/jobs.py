"""What a trial found, and a job that runs to its end, or until it counts as a hang."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.launch.processes import started


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
    during: Callable[[subprocess.Popen[Any]], None] | None = None,
) -> Ended:
    """Run a job, with `during` beside it, until it ends or hangs. None of its processes is left."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        with started(command, environ, **pipes) as process:
            if during is not None:
                during(process)
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            ended_s = time.time()
        output.seek(0)
        return Ended(code, output.read(), ended_s)
