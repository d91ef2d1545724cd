"""Jobs that are stopped, killed and started again end with the weights of one that was not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint_files import newest_step
from distributed import environment, launch
from hvpipe.checkpoints import folder as folders
from hvpipe.checkpoints.every import parse_every
from hvpipe.checkpoints.manifest import read_manifest
from hvpipe.environment.settings import Settings
from hvpipe.keras.checkpoint.checkpointed_fit import CheckpointedFit, CheckpointOptions
from hvpipe.keras.checkpoint.preemption import StopRequest
from once import once_for_all_workers

JOB = Path(__file__).parents[2] / "support" / "checkpointed_job.py"
LIMIT_S = 240.0
# hvpipe run does not pass mpirun's flags for oversubscription on, but sets its own.
ENV = {"PYTHONUNBUFFERED": "1"}
RUN = (sys.executable, "-m", "hvpipe", "run", "-np", "2", "--no-summary")


def state_in(output: str) -> str:
    """Return the state that a job ended with."""
    (found,) = re.findall(r"^STATE (.*)$", output, re.MULTILINE)
    return str(found)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The state after a training that nothing interrupts."""

    def train(folder: Path) -> None:
        result = launch(2, [JOB, folder / "checkpoints"], limit_s=LIMIT_S, env=ENV)
        assert result.returncode == 0, result.describe()
        (folder / "state.txt").write_text(state_in(result.output))

    return (once_for_all_workers(tmp_path_factory, "whole", train) / "state.txt").read_text()


class Job:
    """A running `hvpipe run` of the job."""

    def __init__(self, folder: Path, options: Sequence[str], run_options: Sequence[str] = ()) -> None:
        self.output = ""
        self._process = subprocess.Popen(
            [*RUN, *run_options, str(JOB), str(folder), *options],
            env=environment(ENV),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_until_training(self) -> None:
        """Wait for the first step."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line
            if line.startswith("TRAINING"):
                return
        raise AssertionError(f"wanted: a first step. Received: {self.output}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        rest, _ = self._process.communicate(timeout=LIMIT_S)
        self.output += rest
        return self._process.returncode


def test_sigterm_to_hvpipe_run(tmp_path: Path, wanted: str) -> None:
    """All ranks finish the step, write a checkpoint and exit with 75; the next start ends as planned."""
    job = Job(tmp_path, ["--every", "1000steps", "--pause", "0.3"])
    job.wait_until_training()
    job.send(signal.SIGTERM)
    assert job.end() == 75, job.output
    assert "a rank was asked to stop" in job.output
    assert "STATE" not in job.output
    result = launch(2, [JOB, tmp_path], limit_s=LIMIT_S, env=ENV)
    assert result.returncode == 0, result.describe()
    assert "training resumes from" in result.output
    assert state_in(result.output) == wanted


def test_a_rank_joins(tmp_path: Path) -> None:
    """Two ranks write a checkpoint, and three go on from it."""
    job = Job(tmp_path, ["--every", "1000steps", "--pause", "0.3"])
    job.wait_until_training()
    command = [sys.executable, "-m", "hvpipe", "join", "--job", str(job.pid), "-np", "3"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    assert job.end() == 0, job.output
    assert "the job goes on with 3 ranks" in job.output
    assert "training resumes from" in job.output
    assert re.search("STATE .*", job.output), job.output


def test_restarts_after_a_rank_was_killed(tmp_path: Path, wanted: str) -> None:
    """Each start makes eight steps of fifteen, then a rank dies: one restart is enough, or two at most."""
    options = ["--every", "2steps", "--pause", "0.1", "--die-at", "8"]
    job = Job(tmp_path, options, ["--restarts", "5"])
    assert job.end() == 0, job.output
    assert state_in(job.output) == wanted
    assert job.output.count("Starting it again from") in (1, 2), job.output
    says = r"Rank 1 on .* ended first, having begun 8 steps, without a word"
    assert re.search(says, job.output), job.output


class StandIn:
    """What a CheckpointedFit sees of its session, engine and state, on rank 0 of two."""

    kind, shares_data, lost = "data_parallel", True, None
    settings = Settings()
    trained = 0.0

    def __init__(self) -> None:
        self.session = self.engine = self
        self.world = SimpleNamespace(rank=0, size=2)

    def __getattr__(self, name: str) -> Any:
        """Return a call that does nothing, or returns what one rank alone would."""
        alone: dict[str, Any] = {
            "agree": lambda what, value=0.0: [value],
            "allgather_object": lambda value, what: [value],
            "batch": lambda counted: counted,
            "broadcast_object": lambda value, what="": value,
            "can_write": lambda: True,
            "description": dict,
            "notes": lambda counted: {},
            "requests": lambda: 0,
            "run_section": lambda call: call(),
            "samples": lambda: self.trained,
            "to_write": dict,
            "too_few": lambda: self.world.size < 2,
        }
        return alone.get(name, lambda *_: None)


def fit_of(standin: StandIn, folder: Path, every: str, monkeypatch: pytest.MonkeyPatch) -> CheckpointedFit:
    """Return a `fit` that trains nothing, and writes checkpoints of the stand-in."""
    monkeypatch.setattr("hvpipe.keras.checkpoint.checkpointed_fit.training_state", lambda model: standin)
    model = SimpleNamespace(train_function=lambda batches: {}, steps_per_execution=1, stop_training=False)
    return CheckpointedFit(CheckpointOptions(folder, parse_every(every), 3), model, [])


def test_a_checkpoint_that_a_lost_rank_was_writing_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: too few ranks were left, and said that it was complete. The old writer waited for 300 s."""
    standin = StandIn()
    fit = fit_of(standin, tmp_path, "1epoch", monkeypatch)
    fit.begin({"steps": 1})
    fit.begin_epoch(0)
    assert fit._train(None) == {}
    monkeypatch.setattr(fit._timer, "due", lambda step, epochs: True)
    fit.end_epoch(0)  # rank 1 is lost before it has written its part
    standin.world = SimpleNamespace(rank=0, size=1)
    with pytest.raises(SystemExit) as ended:
        fit.at_boundary()
    fit.leave_model()
    assert ended.value.code == 69
    assert newest_step(tmp_path) == 1


@pytest.mark.parametrize(("epochs", "batches", "samples"), [(0, 5, 36), (1, 3, 52), (1, 1, 36)])
def test_the_samples_of_a_lost_rank_count(
    epochs: int, batches: int, samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a resume on fewer ranks or more began too early. The last step is without that rank.

    Epochs before this one have 4 batches of 4 samples on each rank.
    """
    standin = StandIn()
    fit = fit_of(standin, tmp_path, "1000steps", monkeypatch)
    fit.begin({"steps": 4})
    for epoch in range(epochs + 1):
        fit.begin_epoch(epoch)
        for _ in range(4 if epoch < epochs else batches):
            fit._train(None)
            standin.trained += 4
        if epoch < epochs:
            fit.end_epoch(epoch)
    standin.world = SimpleNamespace(rank=0, size=1)
    with pytest.raises(SystemExit):
        fit.at_boundary()
    fit.leave_model()  # here, not where another thread collects garbage
    (place,) = folders.complete(tmp_path)
    assert read_manifest(place).position.samples == samples


def test_the_recorder_notices_sigterm_after_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: Python set its handler, or the default action, in place of the recorder's."""
    before, marked = signal.getsignal(signal.SIGTERM), []
    core = SimpleNamespace(mark_signals=lambda: marked.append(signal.getsignal(signal.SIGTERM)))
    monkeypatch.setattr("hvpipe.failures.flight_record._core", core)
    with StopRequest(None, 0).listening():
        assert marked[0] not in (before, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        assert marked[1:] == [before]
    assert marked[1:] == [before, before]


@pytest.mark.parametrize("too_late", [False, True])
def test_a_signal_after_the_ranks_have_agreed_is_not_lost(too_late: bool) -> None:
    """Regression: it came too late to stop the ranks together, and `fit` dropped it."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        stop = StopRequest(None, 0)
        with stop.listening():
            stop.too_late = too_late
            os.kill(os.getpid(), signal.SIGTERM)
            assert not got
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM] * too_late
