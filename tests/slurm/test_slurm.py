"""Slurm: the scripts of examples/ on two nodes. `make slurm-test` runs this."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm import Slurm, running

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SMALL = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "-c", "1", f"--export=ALL,VENV={sys.prefix}")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="needs Slurm: make slurm-test"),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with running() as cluster:
        yield cluster


def test_srun_trains_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    number = slurm.sbatch(
        *SMALL, EXAMPLES / "slurm.sh", EXAMPLES / "train.py", "--epochs", "1", "--save", "m.keras", cwd=tmp_path
    )
    job = slurm.wait(number, 200)
    output = (tmp_path / f"slurm-{number}.out").read_text()
    assert (job.state, job.exit_code) == ("COMPLETED", 0), output + slurm.log()
    assert "4 ranks" in output
    assert (tmp_path / "m.keras").exists()
