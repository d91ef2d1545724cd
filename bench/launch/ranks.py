"""Benchmarks that start themselves as ranks and read rank 0's result from a file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from bench.errors import BenchError
from bench.launch import mpirun

if TYPE_CHECKING:
    from mpi4py import MPI

_ROOT = Path(__file__).parents[2]


def started_as_rank(result: Path | None) -> bool:
    """Return whether this process should measure, because run_ranks or a launcher started it."""
    from hvpipe.comm.discover import discover

    return result is not None or discover().launcher != "none"


def run_ranks(module: str, start: mpirun.Start, words: list[str], *, where: str, timeout_s: float) -> str:
    """Start `python -m module words` with the command line from `start`. Return what rank 0 wrote."""
    warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="hvpipe-ranks-") as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, "-m", module, *words, "--result", str(result), "--where", where]
        try:
            done = mpirun.run(
                start(command), timeout_s=timeout_s, env={"PYTHONPATH": str(_ROOT)}, capture=False
            )
        except subprocess.TimeoutExpired as error:
            raise BenchError(
                f"The ranks must end within --timeout. Received: none after {timeout_s:g} s"
            ) from error
        if done.returncode != 0 or not result.exists():
            raise BenchError(f"The ranks failed with status {done.returncode}: see their output")
        return result.read_text()


def warn_if_busy() -> None:
    """Warn if other processes use the cores, because figures measured beside them are worth little."""
    share = psutil.cpu_percent(interval=0.5) / 100
    if share > 0.1:
        print(f"other processes use {share:.0%} of the cores: expect noise", file=sys.stderr, flush=True)


@contextmanager
def ends_all_ranks() -> Iterator[MPI.Intracomm]:
    """Yield MPI's world. An exception in the block is printed and ends every rank."""
    from mpi4py import MPI

    try:
        yield MPI.COMM_WORLD
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
        raise
