"""What Slurm says of an allocation."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest

from hvpipe.commands.join import Places
from hvpipe.commands.restarts import Restarting
from hvpipe.commands.slurm import slots, smaller

BEGAN = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_CPUS_PER_NODE": "8(x3)",
}


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the nodes that the job has now, for stand-ins of Slurm's commands."""
    left = tmp_path / "left"
    programs = {
        "squeue": f"cat {left}",
        "scontrol": 'case $3 in "n[1-3]") echo "n1 n2 n3";; "n[1,3]") echo "n1 n3";; *) echo $3;; esac',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return left


@pytest.mark.parametrize(
    ("text", "found"),
    [("2(x2)", (2, 2)), ("2(x3),1", (2, 2, 2, 1)), ("4", (4,)), ("", ()), ("two", ()), ("2(x", ())],
)
def test_the_tasks_of_each_host(text: str, found: tuple[int, ...]) -> None:
    assert slots({"SLURM_TASKS_PER_NODE": text}) == found
    assert slots({}) == ()


def test_what_is_left_of_an_allocation(nodes: Path) -> None:
    nodes.write_text("n[1,3]\n")
    left = smaller(BEGAN)
    assert left is not None
    assert (left.lost, left.slots) == (("n2",), 3)
    assert left.environ == {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n1,n3",
        "SLURM_NODELIST": "n1,n3",
        "SLURM_NTASKS": "3",
        "SLURM_NPROCS": "3",
        "SLURM_TASKS_PER_NODE": "2,1",
        "SLURM_JOB_CPUS_PER_NODE": "8,8",
    }


@pytest.mark.parametrize("left", ["n[1-3]", "", "x"])
def test_nothing_is_lost_or_nobody_knows(nodes: Path, left: str) -> None:
    nodes.write_text(f"{left}\n")
    assert smaller(BEGAN) is None
    assert smaller({}) is None
    nodes.with_name("squeue").write_text("#!/bin/sh\nexit 1\n")
    assert smaller(BEGAN) is None


@pytest.mark.parametrize(("least", "code", "ranks"), [(1, 1, 3), (4, 69, 5)])
def test_an_elastic_job_goes_on_in_what_is_left(
    nodes: Path, least: int, code: int, ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes.write_text("n[1,3]\n")
    job = Restarting(argparse.Namespace(restarts=0, grace=1.0, elastic=True, min_np=least), Places(5))
    assert job([sys.executable, "-c", "raise SystemExit(1)"], {**os.environ, **BEGAN}) == code
    assert (job.joined, job.places) == (least == 1, Places(ranks))
    assert "n2 cannot be reached" in capfd.readouterr().err
