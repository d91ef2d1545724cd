"""Slurm: the scripts of examples/ on two nodes. `make slurm-test` runs this.

The job is tests/support/checkpointed_job.py. With 4 ranks an epoch has 5 steps.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm import Slurm, running, wait_for

ROOT = Path(__file__).parents[2]
MPICH = ROOT / ".venv-mpich"
JOB = ROOT / "tests" / "support" / "checkpointed_job.py"
SMALL = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")
LIMIT_S = 240  # of one wait, on a busy machine

pytestmark = [
    pytest.mark.part,
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif("TEST_SLURM" not in os.environ, reason="needs a Slurm of its own: make slurm-test"),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with running() as cluster:
        yield cluster


class Submitted:
    """A script of examples/ in a folder that both nodes see, and the job that runs it.

    Args:
        slurm: The cluster.
        folder: The folder.
        example: The name of the script.
        changes: Texts of the script and what stands in their place, as a user would edit it.
        options: More options of sbatch.
    """

    def __init__(
        self, slurm: Slurm, folder: Path, example: str, changes: dict[str, str], *options: str
    ) -> None:
        self._slurm = slurm
        self._output = (
            folder / "out-%a.txt" if any("array" in each for each in options) else folder / "out.txt"
        )
        text = (ROOT / "examples" / example).read_text()
        for old, new in {"$HOME/venv": sys.prefix, **changes}.items():
            assert old in text, f"wanted: {old} in {example}"
            text = text.replace(old, new)
        script = folder / example
        script.write_text(text)
        self.number = slurm.sbatch(*SMALL, *options, f"--output={self._output}", script, cwd=folder)

    def output(self, index: int = 0) -> str:
        """Return what the job, or the one with this index of an array, has printed."""
        path = Path(str(self._output).replace("%a", str(index)))
        return path.read_text() if path.exists() else ""

    def prints(self, text: str, times: int = 1) -> None:
        """Wait until the job has printed a text so many times."""
        wait_for(
            f"{times} x {text!r}",
            lambda: self.output().count(text) >= times,
            LIMIT_S,
            lambda: f"{self.output()}\n{self._slurm.job(self.number)}\n{self._slurm.log()}",
        )

    def ends(self, state: str = "COMPLETED", code: int | None = 0) -> str:
        """Wait for the end; return the output."""
        job = self._slurm.wait(self.number, LIMIT_S)
        told = f"{job}\n{self.output()}\n{self._slurm.log()}"
        assert job.state == state, told
        assert code in (None, job.exit_code), told
        wait_for("no process left", lambda: not self._slurm.processes(JOB.name), 60)
        return self.output()


def training(folder: Path, epochs: int = 4, pause: float = 0.05, more: str = "") -> dict[str, str]:
    """Return the change of a script that trains with checkpoints in a folder."""
    return {"train.py": f"{JOB} {folder}/checkpoints --epochs {epochs} --pause {pause} {more}"}


def steps(output: str) -> list[int]:
    """Return the number of steps that each training ended with."""
    return [int(found) for found in re.findall(r"^STATE \w+ (\d+)$", output, re.MULTILINE)]


def newest(folder: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 without any."""
    found = [path.parent.name for path in (folder / "checkpoints").glob("*/manifest.json")]
    return max((int(name.partition("-")[0]) for name in found), default=0)


def test_srun_trains_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    train = f"{ROOT}/examples/train.py --epochs 1 --save model.keras"
    output = Submitted(slurm, tmp_path, "slurm.sh", {"train.py": train}).ends()
    assert "resnet on digits, 4 ranks" in output
    assert (tmp_path / "model.keras").exists()


def test_hvpipe_run_trains_in_an_allocation(slurm: Slurm, tmp_path: Path) -> None:
    output = Submitted(slurm, tmp_path, "slurm-run.sh", training(tmp_path)).ends()
    assert steps(output) == [20]
    assert "hvpipe: 4 ranks" in output


@pytest.mark.skipif(not (MPICH / "bin" / "hvpipe").exists(), reason="needs .venv-mpich: make slurm-test")
@pytest.mark.parametrize(
    ("example", "pmi"),
    [("slurm.sh", {"--mpi=pmix": "--mpi=pmi2", "# export": "export"}), ("slurm-run.sh", {})],
    ids=["slurm.sh", "slurm-run.sh"],
)
def test_mpich_trains_on_two_nodes(slurm: Slurm, tmp_path: Path, example: str, pmi: dict[str, str]) -> None:
    changes = {**training(tmp_path), **pmi, "$HOME/venv": str(MPICH)}
    output = Submitted(slurm, tmp_path, example, changes).ends()
    assert steps(output) == [20]
    assert "hvpipe: 4 ranks" in output


def test_restarts_go_on_from_a_checkpoint_after_a_rank_was_killed(slurm: Slurm, tmp_path: Path) -> None:
    # Rank 3, on the other node, dies in its 8th step; after the restart that is beyond the end.
    output = Submitted(
        slurm, tmp_path, "slurm-run.sh", training(tmp_path, epochs=2, more="--die-at 8")
    ).ends()
    assert steps(output) == [10], output
    assert "the job failed with exit code" in output
    assert "Starting it again from" in output


def test_join_goes_on_with_more_ranks(slurm: Slurm, tmp_path: Path) -> None:
    changes = {**training(tmp_path, epochs=40, pause=0.1), "--restarts 10": "-np 3"}
    job = Submitted(slurm, tmp_path, "slurm-run.sh", changes)
    job.prints("TRAINING")
    join = ("srun", f"--jobid={job.number}", "--overlap", "--nodes=1", "--ntasks=1", "-w", "n1")
    told = slurm(*join, f"{sys.prefix}/bin/hvpipe", "join", "-np", "4")
    assert "goes on from it with 4 ranks (it had 3 ranks)" in told
    output = job.ends()
    assert "hvpipe: 4 ranks" in output
    assert output.count("TRAINING") == 2


@pytest.mark.parametrize("example", ["slurm.sh", "slurm-run.sh"])
def test_scancel_leaves_no_process(slurm: Slurm, tmp_path: Path, example: str) -> None:
    long = training(tmp_path, epochs=200, pause=0.1, more="--every 1000steps")
    job = Submitted(slurm, tmp_path, example, long)
    job.prints("TRAINING")
    slurm("scancel", job.number)
    job.ends("CANCELLED", None)
    # Slurm ends Open MPI's daemons at once, and they end the ranks. With srun there are none.
    assert (newest(tmp_path) > 0) == (example == "slurm.sh")


def test_ranks_on_other_nodes_end_if_hvpipe_run_is_killed(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, "slurm-run.sh", training(tmp_path, epochs=200, pause=0.1))
    job.prints("TRAINING")
    slurm("pkill", "-KILL", "-f", f"hvpipe run .*{tmp_path}")
    job.ends("FAILED", 137)


@pytest.mark.parametrize("example", ["slurm.sh", "slurm-run.sh"])
def test_a_preempted_job_is_requeued_and_resumes(slurm: Slurm, tmp_path: Path, example: str) -> None:
    long = training(tmp_path, epochs=40, pause=0.1, more="--every 1000steps")
    job = Submitted(slurm, tmp_path, example, long)
    job.prints("TRAINING")
    slurm("srun", "--partition=urgent", "--nodes=2", "--exclusive", "true", limit_s=120)
    step = newest(tmp_path)
    assert 0 < step < 200, job.output()
    output = job.ends()
    assert f"step {step}, epoch {step // 5 + 1}" in output
    assert (output.count("TRAINING"), steps(output)) == (2, [200])
    assert slurm.job(job.number).restarts == 1


def test_a_job_that_loses_a_node_is_requeued_and_resumes(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, "slurm.sh", training(tmp_path, epochs=40, pause=0.1))
    job.prints("TRAINING")
    wait_for("a checkpoint", lambda: newest(tmp_path), 60)
    slurm.lose_node("n2")
    wait_for("the job waits", lambda: slurm.job(job.number).state == "PENDING", LIMIT_S)
    slurm.start_node("n2")
    output = job.ends()
    assert "training resumes from" in output
    assert (output.count("TRAINING"), steps(output)) == (2, [200])


def test_an_elastic_job_goes_on_without_a_lost_node(slurm: Slurm, tmp_path: Path) -> None:
    changes = {**training(tmp_path, epochs=40, pause=0.1), "--restarts 10": "--elastic"}
    job = Submitted(slurm, tmp_path, "slurm-run.sh", changes, "--no-kill")
    job.prints("TRAINING")
    wait_for("a checkpoint", lambda: newest(tmp_path), 60)
    slurm.lose_node("n2")
    output = job.ends()
    slurm.start_node("n2")
    slurm.wait_idle()
    assert "n2 cannot be reached. The job starts again without these hosts" in output
    assert "the job goes on with 2 ranks" in output
    assert output.count("TRAINING") == 2


@pytest.mark.parametrize("example", ["slurm.sh", "slurm-run.sh"])
def test_a_script_with_an_error_is_not_requeued(slurm: Slurm, tmp_path: Path, example: str) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        "import hvpipe\nimport hvpipe.keras\nhvpipe.init()\nassert hvpipe.rank() != 3\nhvpipe.barrier()\n"
    )
    job = Submitted(slurm, tmp_path, example, {"train.py": str(script)})
    output = job.ends("FAILED", None)
    assert "AssertionError" in output
    assert slurm.job(job.number).restarts == 0


def test_a_job_ends_on_a_node_that_is_drained(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, "slurm-run.sh", training(tmp_path))
    job.prints("TRAINING")
    slurm("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    assert steps(job.ends()) == [20]
    slurm("scontrol", "update", "NodeName=n2", "State=RESUME")
    slurm.wait_idle()


def test_a_job_array_trains_apart(slurm: Slurm, tmp_path: Path) -> None:
    changes = training(Path(f"{tmp_path}/$SLURM_ARRAY_TASK_ID"), epochs=2)
    job = Submitted(slurm, tmp_path, "slurm-run.sh", changes, "--array=0-1", "--nodes=1")
    slurm.wait(f"{job.number}_0", LIMIT_S)
    slurm.wait(f"{job.number}_1", LIMIT_S)
    for index in range(2):
        assert steps(job.output(index)) == [10], job.output(index)
        assert newest(tmp_path / str(index)) == 10


def test_top_shows_the_job(slurm: Slurm, tmp_path: Path) -> None:
    job = Submitted(slurm, tmp_path, "slurm.sh", training(tmp_path, epochs=200, pause=0.1))
    job.prints("TRAINING")
    top = ("srun", f"--jobid={job.number}", "--overlap", "--nodes=1", "--ntasks=1", "-w", "n1")
    told = json.loads(slurm(*top, f"{sys.prefix}/bin/hvpipe", "top", "--json"))
    assert len(told["ranks"]) == 4
    slurm("scancel", job.number)
    job.ends("CANCELLED", None)
