"""The runner of distributed tests: it reports failures of single ranks and kills jobs at their time limit."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from distributed import expect_fatal, launch, run_cases

CONFTEST = """
from in_step import InStep

def pytest_configure(config):
    config.pluginmanager.register(InStep(), "in-step")
"""


def run_as_case(folder: Path, body: str, *, limit_s: float = 60.0) -> str:
    """Run one case on 2 ranks, with `rank` and `comm` defined. Return the error that run_cases raised."""
    cases = folder / "cases"
    cases.mkdir()
    (cases / "conftest.py").write_text(CONFTEST)
    lines = [
        "import os, time, pytest",
        "from mpi4py import MPI",
        "comm = MPI.COMM_WORLD",
        "rank = comm.rank",
        body,
    ]
    (cases / "test_case.py").write_text("\n".join(lines) + "\ndef test_after():\n    comm.Barrier()\n")
    (cases / "pytest.ini").write_text("[pytest]\n")
    with pytest.raises(AssertionError) as failure:
        run_cases(2, cases, folder / "logs", limit_s=limit_s, options=["-c", str(cases / "pytest.ini")])
    return str(failure.value)


def test_an_assertion_on_one_rank_is_reported_with_its_message(tmp_path: Path) -> None:
    told = run_as_case(tmp_path, "def test_x():\n    assert rank == 0, 'only zero'")
    assert "rank 1: call of test_case.py::test_x failed" in told
    assert "only zero" in told
    assert "1 failed, 1 passed in" in told


def test_a_fixture_that_fails_on_one_rank_keeps_the_ranks_in_step(tmp_path: Path) -> None:
    fixture = "@pytest.fixture\ndef half():\n    assert rank == 0\n"
    told = run_as_case(tmp_path, fixture + "def test_x(half):\n    comm.Barrier()")
    assert "rank 1: setup of test_case.py::test_x failed" in told


def test_ranks_that_skip_different_cases_fail(tmp_path: Path) -> None:
    told = run_as_case(tmp_path, "@pytest.mark.skipif(rank == 1, reason='one')\ndef test_x():\n    pass")
    assert "rank 1: setup of test_case.py::test_x skipped" in told


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    started = time.monotonic()
    told = run_as_case(tmp_path, "def test_x():\n    os._exit(7) if rank == 1 else comm.Barrier()")
    assert time.monotonic() - started < 30
    assert "--- rank-0" in told


def test_a_hang_is_killed_and_shows_where(tmp_path: Path) -> None:
    told = run_as_case(tmp_path, "def test_x():\n    time.sleep(600 * rank)", limit_s=8.0)
    assert "killed at its time limit" in told
    assert "in test_x" in told
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert not left


def test_expect_fatal_wants_a_failure_in_time(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import sys\nsys.exit('no such layer')\n")
    assert expect_fatal(2, script, says="no such layer", within_s=30).returncode != 0
    script.write_text("print('fine')\n")
    with pytest.raises(AssertionError, match="wanted: a failure"):
        expect_fatal(2, script, says="fine", within_s=30)


def test_a_launched_command_sees_this_python_and_its_size(tmp_path: Path) -> None:
    script = tmp_path / "world.py"
    script.write_text("import sys\nfrom mpi4py import MPI\nprint(MPI.COMM_WORLD.size, sys.executable)\n")
    result = launch(3, [script], limit_s=30)
    assert result.output.count(f"3 {sys.executable}") == 3, result.describe()
