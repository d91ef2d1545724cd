"""`hvpipe bench` and `python -m bench`: flags, exit codes, files; and the error without a checkout."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from bench import __main__ as command
from bench.errors import BenchError
from bench.evaluation.host_selection import this_host
from bench.evaluation.outcome import EvaluationOutcome, Journal
from bench.hosts.hosts import ThisHost
from bench.launch.termination import ended_by_exception
from bench.report.readme import BEGIN, END
from bench.rounds.record import Case, Round
from bench_rounds import case, finished, outcome
from hvpipe import cli
from hvpipe.commands import bench as bench_command
from hvpipe.errors import LaunchError

TASK_FLAGS = [
    *("--batch", "--cluster", "--epochs", "--help", "--hosts", "--json", "--pixels", "--python", "--ranks"),
    *("--rounds", "--seed", "--steps", "--threads", "--warm-up", "--workload", "-h"),
]
FLAGS = {
    "run": [
        *("--cluster", "--help", "--hosts", "--json", "--out", "--plan", "--python"),
        *("--retry-failed", "--rounds", "--systems", "--threads", "-h"),
    ],
    "step": sorted([*TASK_FLAGS, "--out", "--systems"]),
    "tune": sorted([*TASK_FLAGS, "--keep", "--system"]),
    "report": ["--help", "--json", "--plot", "-h"],
    "advise": ["--help", "--json", "-h"],
    "readme": ["--file", "--help", "-h"],
}


def written(folder: Path, *rounds: Round) -> str:
    with Journal(folder, outcome().setting) as journal:
        for each in rounds:
            journal.add(each)
    return str(folder)


def test_the_flags_are_frozen() -> None:
    (commands,) = [a for a in command.make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert {name: sorted(p._option_string_actions) for name, p in commands.choices.items()} == FLAGS
    assert tuple(commands.choices) == bench_command.COMMANDS


SUITE = """
[[group]]
workload = "digits"
batch = 8
clusters = ["2x1gbit"]
systems = ["single", "horovod", "hvpipe-step"]
rounds = 1
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a suite for this host alone. Rounds take no time, and Horovod is not installed."""

    def run_round(case: Case, number: int, hosts: object, timeout_s: float, **_: object) -> Round:
        return finished(case, 2.0 if case.system == "hvpipe-step" else 1.0, number=number)

    monkeypatch.setattr("bench.rounds.round.run_round", run_round)
    monkeypatch.setattr(
        "bench.systems.System.missing", lambda self, python: "absent" if self.name == "horovod" else ""
    )
    monkeypatch.setattr(command, "virtual_clusters", lambda: this_host(note="on plain loopback"))
    (tmp_path / "mine.toml").write_text(SUITE)
    return str(tmp_path / "mine.toml")


@pytest.mark.parametrize(("words", "threads"), [([], 4), (["--threads", "3"], 3)])
def test_threads_are_the_cores_of_a_rank_by_default(
    words: list[str],
    threads: int,
    suite: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert command.main(["run", suite, "--plan", *words]) == 0
    told = f"3 systems, batch 8 a rank, {threads} threads an operation, 1 round of 3 + 8 steps, seed 20\n"
    assert told in capsys.readouterr().out
    assert command.main(["run", suite, "--out", str(tmp_path / "out"), *words]) == 0
    assert {each.case.task.threads for each in EvaluationOutcome.read(tmp_path / "out").rounds} == {threads}


def test_zero_threads_are_refused(suite: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", suite, "--threads", "0"]) == 2
    assert "--threads should be at least 1. Received: --threads 0" in capsys.readouterr().err


def test_run_measures_the_installed_systems_and_writes_the_files(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["run", suite, "--out", str(tmp_path / "out"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["step_s"] for each in shown["cases"]] == [1.0, 2.0]
    assert list(shown["not_measured"].values()) == ["skipped, Horovod: absent"]
    found = EvaluationOutcome.read(tmp_path / "out")
    assert [each.case.system for each in found.rounds if each.skipped] == ["horovod"]
    assert found.setting.notes == ("on plain loopback",)


def test_without_any_installed_system_the_exit_code_is_2(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["run", suite, "--out", str(tmp_path / "out"), "--systems", "horovod"]) == 2
    assert "should be installed. Received: Horovod: absent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--systems", "hvpipe-stpe"], "Received: ['hvpipe-stpe']"),
        (["--systems", ""], "Received: ['']"),
        (["--python", "/absent/python"], "--python should be a Python that runs. Received: '/absent/python'"),
        (["--out", "{file}"], "File exists"),
        (
            ["--hosts", "a,b", "--cluster", "2x1gbit"],
            "Give --hosts or --cluster. Received: 'a,b' and '2x1gbit'",
        ),
        (["--cluster", "cloud"], "or a TOML file, as in mine.toml. Received: 'cloud'"),
    ],
)
def test_bad_arguments_are_exit_code_2(
    words: list[str], says: str, suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert command.main(["run", suite, *(word.format(file=tmp_path / "file") for word in words)]) == 2
    assert says in capsys.readouterr().err


def test_systems_may_be_separated_by_a_comma_and_a_blank(suite: str, tmp_path: Path) -> None:
    words = ["run", suite, "--out", str(tmp_path / "out"), "--systems", "single, hvpipe-step"]
    assert command.main(words) == 0


def test_a_relative_python_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert command._python("bin/python") == str(tmp_path / "bin" / "python")


SLEEPER = """
import sys
from pathlib import Path
from bench import __main__ as command
from bench.evaluation.host_selection import this_host
from bench.launch.processes import Command, run_together
from bench.rounds import round
from bench_rounds import finished

folder = Path(sys.argv[1])

def run_round(case, number, hosts, timeout_s, **_):
    if case.system == "single":
        return finished(case, 1.0)
    line = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(300)", str(folder)]
    run_together([Command("sleeper", line)], folder, timeout_s=300)

round.run_round = run_round
command.virtual_clusters = this_host
systems = ["--systems", "single,hvpipe-step"]
sys.exit(command.main(["run", str(folder / "mine.toml"), "--out", str(folder / "out"), *systems]))
"""


def test_a_signal_ends_the_running_round_and_keeps_finished_ones(suite: str, tmp_path: Path) -> None:
    line = [sys.executable, "-c", SLEEPER, str(tmp_path)]
    folders = f"{Path(command.__file__).parents[1]}:{Path(__file__).parents[1] / 'support'}"
    environment = {**os.environ, "PYTHONPATH": folders}
    said = tmp_path / "sleeper.output"
    with subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline_s = time.monotonic() + 60
        while not (said.exists() and said.read_text()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.terminate()
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "finished rounds are kept" in error
    running = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert not any(str(tmp_path) in words for words in running)
    assert [each.case.system for each in EvaluationOutcome.read(tmp_path / "out").rounds] == ["single"]


def test_a_hangup_that_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with ended_by_exception():
            assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with ended_by_exception():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_plan_shows_what_would_run_and_runs_nothing(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["run", suite, "--out", str(tmp_path / "out"), "--plan", "--systems", "single"]) == 0
    shown = capsys.readouterr().out
    assert "digits-64/8/loopback-2/weak: 1 systems, batch 8 a rank, " in shown
    assert "on plain loopback" in shown
    assert not (tmp_path / "out").exists()


def test_one_cluster_for_a_whole_suite(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.cluster.network.require_privileges", lambda: None)
    (tmp_path / "theirs.toml").write_text('[[host]]\nrate = "1.5gbit"\n[[host]]\nslots = 2\n')
    monkeypatch.chdir(tmp_path)
    assert command.main(["run", suite, "--plan", "--cluster", "theirs.toml"]) == 0
    assert "digits-64/8/theirs.toml-3/weak: " in capsys.readouterr().out


def test_report_prints_the_figures_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = (finished(case("single"), 1.0), finished(case("hvpipe-step"), 2.0))
    folder = written(tmp_path / "a", *rounds)
    assert command.main(["report", folder]) == 0
    assert EvaluationOutcome.read(tmp_path / "a") == outcome(*rounds)
    shown = capsys.readouterr().out
    assert "hvpipe-step   2 s" in shown
    assert command.main(["report", folder, folder]) == 2
    assert "in one of the runs" in capsys.readouterr().err
    assert command.main(["report", folder, "--json"]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert [(each["key"], each["efficiency"]) for each in cases] == [
        ("resnet50-64/8/2x1gbit-2/weak/single", 1.0),
        ("resnet50-64/8/2x1gbit-2/weak/hvpipe-step", 0.5),
    ]


def test_failed_rounds_are_exit_code_1_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = Round(case("horovod"), 0, error="first line\nSegmentation fault\n-----\n")
    skipped = Round(case("tf-ps"), 0, skipped="not installed")
    assert command.main(["report", written(tmp_path / "a", failed, skipped)]) == 1
    shown = capsys.readouterr().out
    assert "horovod: failed, Segmentation fault" in shown
    assert "tf-ps: skipped, not installed" in shown


def test_hosts_that_do_not_come_up_are_exit_code_1(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: ThisHost) -> None:
        raise BenchError("no such rate")

    words = ["run", suite, "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr(ThisHost, "__enter__", broken)
        assert command.main(words) == 1
    assert "skipped, the hosts were not up: no such rate" in capsys.readouterr().out
    assert command.main(words) == 0


def test_retry_failed_runs_failed_rounds_again(
    suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(case: Case, number: int, hosts: object, timeout_s: float, **_: object) -> Round:
        return Round(case, number, error="ssh: connection refused")

    words = ["run", suite, "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patched:
        patched.setattr("bench.rounds.round.run_round", fail)
        assert command.main(words) == 1
    assert "but with --retry-failed" in capsys.readouterr().err
    assert command.main(words) == 1
    assert command.main([*words, "--retry-failed"]) == 0


def test_an_interrupted_run_has_a_report_and_goes_into_the_readme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, finished(case("hvpipe-step"), 1.0))
    assert command.main(["report", str(tmp_path)]) == 0
    assert "hvpipe-step" in capsys.readouterr().out
    written(tmp_path, finished(case("hvpipe-step"), 5.0, number=1))
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    assert command.main(["readme", str(tmp_path), "--file", str(readme)]) == 0
    assert "3 s" in readme.read_text()


def test_the_comparison_goes_into_the_benchmarks_readme() -> None:
    options = command.make_parser().parse_args(["readme", "results"])
    assert options.file == Path(command.__file__).parent / "README.md"
    text = options.file.read_text(encoding="utf-8")
    assert (text.count(BEGIN), text.count(END)) == (1, 1)


def test_unreadable_results_are_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("hvpipe bench report: Results should be a file")
    (tmp_path / "results.jsonl").write_bytes(b"\xff")
    for words in (["report", str(tmp_path / "results.jsonl")], ["advise", str(tmp_path)]):
        assert command.main(words) == 2
        assert "Received: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        command.main(["walk"])
    assert caught.value.code == 2


def test_hvpipe_bench_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def record(program: str, line: list[str], environ: dict[str, str]) -> NoReturn:
        started.append([program, *line[1:], environ["PYTHONPATH"].split(":")[0]])
        raise SystemExit(7)

    monkeypatch.setattr("os.execve", record)
    with pytest.raises(SystemExit, match="7"):
        cli.main(["bench", "advise", "a.json", "--json"])
    checkout = str(Path(command.__file__).parents[1])
    assert started == [[sys.executable, "-m", "bench", "advise", "a.json", "--json", checkout]]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always looks into the current folder")
def test_a_bench_module_in_the_current_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "bench.py").write_text("raise SystemExit('mine')")
    start = "import os; from hvpipe.commands import bench; bench.bench(['--help'], os.environ)"
    environment = {**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[1])}
    line = [sys.executable, "-c", start]
    said = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (said.returncode, said.stderr) == (0, "")
    assert "side by side" in said.stdout


CLEANS_UP = """
import pathlib, threading, time
from bench.launch.termination import ended_by_exception, undisturbed

# Such as the one that draws progress: a signal may be handed to it instead of the one that cleans up.
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

try:
    with ended_by_exception():
        pathlib.Path("ready").touch()
        time.sleep(60)
finally:
    with undisturbed():
        pathlib.Path("cleaning").touch()
        time.sleep(0.3)
        pathlib.Path("clean").touch()
"""


def test_a_second_signal_waits_for_the_benchmark_to_clean_up(tmp_path: Path) -> None:
    (tmp_path / "bench" / "launch").mkdir(parents=True)
    (tmp_path / "bench" / "__init__.py").touch()
    (tmp_path / "bench" / "__main__.py").write_text(CLEANS_UP)
    real = Path(command.__file__).parents[1]
    termination = Path("bench", "launch", "termination.py")
    (tmp_path / termination).write_text((real / termination).read_text())
    start = "import os; from pathlib import Path; from hvpipe.commands import bench as b; "
    start += "b.find_checkout = lambda *_: Path.cwd(); b.bench(['run'], os.environ)"
    environment = {**os.environ, "PYTHONPATH": str(real)}
    process = subprocess.Popen([sys.executable, "-c", start], cwd=tmp_path, env=environment)
    with process:
        for sign in ("ready", "cleaning"):
            deadline_s = time.monotonic() + 60
            while not (tmp_path / sign).exists() and time.monotonic() < deadline_s:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
        process.wait(60)
    assert (tmp_path / "clean").exists()


def test_without_a_checkout_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"clone the repository.*There is no bench/ in "):
        bench_command.find_checkout(tmp_path, tmp_path)
    for part in ("bench/__main__.py", "hvpipe/__init__.py"):
        (tmp_path / "clone" / part).parent.mkdir(parents=True)
        (tmp_path / "clone" / part).touch()
    below = tmp_path / "clone" / "bench"
    assert bench_command.find_checkout(tmp_path, below) == tmp_path / "clone"


def test_step_prints_a_row_for_each_system(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["step", "--systems", "single,hvpipe-step", "--rounds", "2", "--out", str(tmp_path / "out")]
    assert command.main([*words, "--batch", "16"]) == 0
    lines = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert [cells for cells in lines if cells[3:] == ["0%"]] == [
        ["single", "1", "s", "0%"],
        ["hvpipe-step", "2", "s", "0%"],
    ]
    rounds = EvaluationOutcome.read(tmp_path / "out").rounds
    assert {(each.case.task.batch, each.case.ranks, each.case.cluster) for each in rounds} == {
        (16, 2, "loopback")
    }
    assert [(each.number, each.case.system) for each in rounds] == [
        (0, "single"),
        (0, "hvpipe-step"),
        (1, "hvpipe-step"),
        (1, "single"),
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--systems", "single,hvpipe-stpe"], "Received: ['single', 'hvpipe-stpe']"),
        (["--systems", "single,single"], "each once. Received: ['single', 'single']"),
        (
            ["--systems", "horovod"],
            "of the systems should be installed. Received: Horovod: absent",
        ),
        (["--batch", "0"], "must be at least 1. Received: Task("),
        (["--ranks", "0"], "--ranks should be at least 1. Received: --ranks 0"),
        (["--ranks", "2", "--cluster", "2x1gbit"], "Received: --ranks 2 with --hosts or --cluster"),
        (["--hosts", "a", "--cluster", "2x1gbit"], "Give --hosts or --cluster"),
    ],
)
def test_a_step_that_cannot_be_measured_is_named(
    words: list[str], says: str, suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["step", *words]) == 2
    assert says in capsys.readouterr().err
