"""Rounds of the evaluation: processes that end together, where they run, the meter."""

from __future__ import annotations

import json
import math
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from bench import ROOT
from bench.errors import BenchError
from bench.evaluation.outcome import EvaluationOutcome, Journal
from bench.hosts.hosts import ThisHost
from bench.hosts.process_placement import Placement
from bench.hosts.real_hosts import RealHosts
from bench.launch.processes import Command, Ended, run_together
from bench.rounds.record import Case, RankRound, Task
from bench.rounds.round import run_round
from bench.rounds.watch import StepWatch, cpu_s, peak_bytes, sent_bytes
from bench.systems import SYSTEMS
from bench.training.workloads import check
from bench_rounds import outcome


def _python(name: str, code: str, directory: Path) -> Command:
    return Command(name, [sys.executable, "-c", code, str(directory)])


def _running(directory: Path) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or ()
        if any(str(directory) in word for word in words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def test_processes_end_when_all_are_done(tmp_path: Path) -> None:
    commands = [_python(name, "print('hello')", tmp_path) for name in ("a", "b")]
    assert run_together(commands, tmp_path, timeout_s=30).why == ""
    assert (tmp_path / "b.output").read_text() == "hello\n"


def test_the_deciding_process_ends_the_others(tmp_path: Path) -> None:
    commands = [_python("first", "", tmp_path), _python("server", "import time; time.sleep(60)", tmp_path)]
    began_s = time.monotonic()
    assert run_together(commands, tmp_path, timeout_s=50, decides=0).why == ""
    assert time.monotonic() - began_s < 30
    assert _running(tmp_path) == []


def test_a_failure_ends_all_and_is_reported_with_its_output(tmp_path: Path) -> None:
    commands = [
        _python("waits", "import time; time.sleep(60)", tmp_path),
        _python("fails", r"raise SystemExit('\033[1mno such\033[0m thing\r\n')", tmp_path),
    ]
    ended = run_together(commands, tmp_path, timeout_s=50)
    assert ended.why == "fails ended with status 1"
    assert ended.output == "no such thing\n\n"  # without terminal escapes
    assert _running(tmp_path) == []


def test_a_hang_ends_at_the_deadline_with_all_its_children(tmp_path: Path) -> None:
    # The child leaves the process group, as ranks of a launcher may.
    code = (
        "import subprocess, sys, time; print('here', flush=True); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', sys.argv[1]], "
        "start_new_session=True); time.sleep(60)"
    )
    ended = run_together([_python("hangs", code, tmp_path)], tmp_path, timeout_s=2)
    assert ended.why == "did not end within 2 s"
    assert "here" in ended.output
    assert _running(tmp_path) == []


ENDED = """
import sys
from bench.launch import processes

code = "import time; print('here', flush=True); time.sleep(300)"
processes.run([sys.executable, "-c", code, sys.argv[1]], capture=False)
"""


ENDED_EARLY = """
import signal, subprocess

class Popen(subprocess.Popen):
    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        signal.raise_signal(signal.SIGTERM)

subprocess.Popen = Popen
"""


def test_a_run_that_is_terminated_while_it_starts_a_process_ends_it(tmp_path: Path) -> None:
    line = [sys.executable, "-c", ENDED_EARLY + ENDED, str(tmp_path)]
    assert subprocess.run(line, cwd=ROOT, timeout=60, check=False).returncode == 128 + signal.SIGTERM
    assert _running(tmp_path) == []


def test_workers_and_servers_know_each_others_addresses(tmp_path: Path) -> None:
    commands = Placement(ThisHost(), 2).commands(SYSTEMS["tf-ps"], ["python", "-m"], tmp_path)
    assert [command.name for command in commands] == ["chief-0", "worker-0", "worker-1", "ps-0"]
    told = [json.loads(command.environment["TF_CONFIG"]) for command in commands]
    assert all(each["cluster"] == told[0]["cluster"] for each in told)
    assert {job: len(addresses) for job, addresses in told[0]["cluster"].items()} == {
        "chief": 1,
        "worker": 2,
        "ps": 1,
    }
    assert told[2]["task"] == {"type": "worker", "index": 1}


def test_over_ssh_workers_get_the_variables_that_mpirun_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/cuda/lib64:/a b",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "TF_CONFIG": "of another job",
        "PYTHONPATH": "/elsewhere",
        "HOME": "/root",
    }
    monkeypatch.setattr("os.environ", there)
    commands = Placement(RealHosts("a,b"), 2).commands(
        SYSTEMS["tf-mwms"], ["/peers/bin/python", "-m"], tmp_path
    )
    words = shlex.split(" ".join(commands[1].line[commands[1].line.index("b") + 1 :]))
    handed = dict(word.split("=", 1) for word in words if "=" in word)
    assert json.loads(handed.pop("TF_CONFIG"))["task"] == {"type": "worker", "index": 1}
    assert handed == {
        "PATH": "/peers/bin:/bin",
        "LD_LIBRARY_PATH": "/cuda/lib64:/a b",
        "PYTHONPATH": str(ROOT),
    }
    assert words[-4:] == ["-m", "bench.rounds.rank_process", str(tmp_path), "1"]


def test_horovodrun_starts_ranks_on_this_host_over_gloo(tmp_path: Path) -> None:
    (command,) = Placement(ThisHost(), 2).commands(
        SYSTEMS["horovod-gloo"], ["/venv/bin/python", "-m"], tmp_path
    )
    assert list(command.line) == [
        *("/venv/bin/horovodrun", "--gloo", "-np", "2", "-H", "localhost:2"),
        *("/venv/bin/python", "-m", "bench.rounds.rank_process", str(tmp_path)),
    ]


def test_plain_tcp_is_skipped_on_one_host() -> None:
    round_ = run_round(Case("single-beside-tcp", "one host", 2, Task("digits", 8)), 0, ThisHost(), 10)
    assert round_.skipped.endswith("wants steps, not epochs, and several hosts")


def test_bytes_of_a_bond_or_a_bridge_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = {"lo": 1, "eth0": 10, "eth1": 100, "bond0": 110, "docker0": 1000}
    counted = {name: SimpleNamespace(bytes_sent=count) for name, count in sent.items()}
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: counted)
    assert sent_bytes(tmp_path) == 1220  # a network namespace has no adapters
    for adapter in ("eth0", "eth1"):
        (tmp_path / adapter / "device").mkdir(parents=True)
    assert sent_bytes(tmp_path) == 110


def test_the_meter_counts_this_process() -> None:
    before_s = cpu_s()
    began_s = time.process_time()
    while time.process_time() - began_s < 0.05:
        pass
    assert cpu_s() - before_s >= 0.05
    assert peak_bytes() >= psutil.Process().memory_info().rss * 0.5


def test_time_for_evaluation_is_not_part_of_the_timed_steps() -> None:
    def evaluate() -> tuple[float, float]:
        time.sleep(0.3)
        return 1.0, 0.5

    watch = StepWatch(open_after=2)
    watch.begin()
    watch.step()
    watch.epoch(evaluate)  # in epochs of one step, the first epoch ends before the timed part begins
    watch.step()
    watch.step()
    watch.epoch(evaluate)
    watch.drained()
    assert 0 <= watch.rank_round().wall_s < 0.2


@pytest.mark.parametrize(
    ("task", "received"),
    [
        (Task("resnet51", 8), "workload='resnet51'"),
        (Task("vgg16", 8, pixels=16), "pixels=16"),
        (Task("resnet50", 8, epochs=2), "workload='resnet50'"),
        (Task("digits", 0), "batch=0"),
    ],
)
def test_a_task_that_cannot_be_trained_is_named(task: Task, received: str) -> None:
    with pytest.raises(BenchError, match=f"Received: .*{received}"):
        check(task)


def test_the_description_of_a_task_says_what_is_trained() -> None:
    task = Task("digits", 8, threads=3, epochs=2)
    assert task.describe([1]) == "batch 8 a rank, 3 threads an operation, 1 round of 2 epochs, seed 20"


def test_step_times_that_are_not_finite_are_an_error_and_the_journal_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(commands: object, directory: Path, **_: object) -> Ended:
        rank = asdict(RankRound([1.0, math.nan], 1.0, 0.5, 1))
        (directory / "rank-0.json").write_text(json.dumps({"rank": rank, "versions": {}}))
        return Ended("", "")

    monkeypatch.setattr("bench.rounds.round.run_together", end)
    monkeypatch.setattr("bench.systems.System.missing", lambda self, python: "")
    round_ = run_round(Case("single", "c", 1, Task("digits", 8)), 0, ThisHost(), 10)
    assert "A rank's steps should be finite seconds. Received: step_s=[1.0, nan], 1.0" in round_.error
    with Journal(tmp_path, outcome().setting) as journal:
        journal.add(round_)
    assert EvaluationOutcome.read(tmp_path) == journal.outcome


def test_a_system_that_is_not_installed_is_skipped_by_name(tmp_path: Path) -> None:
    python = tmp_path / "python"  # without any packages
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    round_ = run_round(Case("horovod", "c", 1, Task("digits", 8)), 0, ThisHost(), 10, python=str(python))
    assert not round_.ok
    assert "horovod" in round_.skipped
    assert "make peers" in round_.skipped
    jax = replace(SYSTEMS["keras-jax"], own_environment=str(tmp_path / "none"))
    case = Case("keras-jax", "c", 2, Task("digits", 8))
    assert "make rivals" in run_round(case, 0, ThisHost(), 10, systems={"keras-jax": jax}).skipped
    epochs = replace(case, task=replace(case.task, epochs=1))
    assert "wants steps, not epochs" in run_round(epochs, 0, ThisHost(), 10).skipped
