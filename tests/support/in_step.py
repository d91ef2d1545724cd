"""Pytest plugin that keeps the ranks of an MPI job in step while all run the same cases."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpi4py import MPI

# Longer than HVPIPE_TIMEOUT in the tests, so that a peer waiting in hvpipe gets hvpipe's own error first.
DEADLINE_S = 180.0


class InStep:
    """Exchanges the outcome of every phase. A case that fails on one rank then fails on all ranks."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm: MPI.Intracomm = MPI.COMM_WORLD.Dup()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[pytest.TestReport]:
        """Replace the outcome of a phase by the outcome over all ranks."""
        report: pytest.TestReport = yield
        self._wait_for_all(f"{item.nodeid} ({report.when})")
        told = self._comm.allgather((item.nodeid, report.when, report.outcome, report.longreprtext))
        mine = told[self._comm.rank]
        if all(other[:3] == mine[:3] and other[2] != "failed" for other in told):
            return report
        # Print now: pytest prints reports at its end, which it may never reach after hvpipe has failed.
        print(f"\n{mine[0]} {mine[2]} ({mine[1]})\n{mine[3]}", file=sys.__stderr__, flush=True)
        report.outcome = "failed"
        report.longrepr = "\n\n".join(
            f"rank {rank}: {when} of {case} {outcome}\n{text}"
            for rank, (case, when, outcome, text) in enumerate(told)
        )
        return report

    def _wait_for_all(self, where: str) -> None:
        """Wait for all ranks. A rank that reaches the deadline aborts the job."""
        request = self._comm.Ibarrier()
        deadline = time.monotonic() + DEADLINE_S
        pause_s = 1e-4
        while not request.Test():
            if time.monotonic() > deadline:
                print(
                    f"rank {self._comm.rank} waited {DEADLINE_S} s for the others after {where}", flush=True
                )
                self._comm.Abort(1)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
