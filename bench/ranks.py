"""A benchmark starts itself as ranks, which hand rank 0's result back in a file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench import mpirun
from bench.cluster_spec import ClusterError

if TYPE_CHECKING:
    from mpi4py import MPI

_ROOT = Path(__file__).parents[1]


def started_as_rank(result: Path | None) -> bool:
    """Whether this process is to measure: started by run_ranks, or by a launcher."""
    from hvpipe.comm.discover import discover

    return result is not None or discover().launcher != "none"


def run_ranks(module: str, start: mpirun.Start, words: list[str], *, where: str, timeout_s: float) -> str:
    """Start `python -m module words` by the command line that `start` makes; the text of its result."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, "-m", module, *words, "--result", str(result), "--where", where]
        try:
            done = mpirun.run(
                start(command), timeout_s=timeout_s, env={"PYTHONPATH": str(_ROOT)}, capture=False
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"The ranks must end within --timeout. Received: none after {timeout_s:g} s"
            ) from error
        if done.returncode != 0 or not result.exists():
            raise ClusterError(f"The ranks failed with status {done.returncode}; their output is above")
        return result.read_text()


@contextmanager
def ends_all_ranks() -> Iterator[MPI.Intracomm]:
    """MPI's world; an exception in the block is printed and ends every rank."""
    from mpi4py import MPI

    try:
        yield MPI.COMM_WORLD
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
        raise
