"""`hvpipe bench` and `python -m bench`: flags, exit codes, files; and where there is no checkout."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench import command
from bench.evaluation import Sites
from bench.files import write_outputs
from bench.journal import Journal
from bench.outcome import Outcome
from bench.record import Case, Round
from bench_rounds import case, finished, outcome
from hvpipe import bench_command, cli
from hvpipe.errors import LaunchError

FLAGS = {
    "run": ["--help", "--hosts", "--json", "--out", "--plan", "--python", "--systems", "-h"],
    "report": ["--help", "--json", "-h"],
    "compare": ["--help", "--json", "-h"],
    "readme": ["--file", "--help", "-h"],
}


def written(folder: Path, *rounds: Round) -> str:
    folder.mkdir()
    write_outputs(outcome(*rounds), folder)
    return str(folder)


def test_the_flags_are_frozen() -> None:
    (commands,) = [a for a in command.make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert {name: sorted(p._option_string_actions) for name, p in commands.choices.items()} == FLAGS


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
    """A suite for this host alone; rounds take no time, and Horovod is not there."""

    def run_round(case: Case, number: int, place: object, timeout_s: float, *, python: str) -> Round:
        return finished(case, 2.0 if case.system == "hvpipe-step" else 1.0, number=number)

    monkeypatch.setattr("bench.rounds.run_round", run_round)
    monkeypatch.setattr(
        "bench.systems.System.missing", lambda self, python: "absent" if self.name == "horovod" else ""
    )
    monkeypatch.setattr(command, "find_sites", lambda hosts: Sites(loopback=True, note="on plain loopback"))
    (tmp_path / "mine.toml").write_text(SUITE)
    return str(tmp_path / "mine.toml")


def test_run_measures_what_is_there_and_writes_the_files(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["run", suite, "--out", str(tmp_path / "out"), "--json"]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert [each["step_s"] for each in cases] == [1.0, 2.0]
    assert "absent" in (tmp_path / "out" / "report.html").read_text()
    found = Outcome.read(tmp_path / "out")
    assert [each.case.system for each in found.rounds if each.skipped] == ["horovod"]
    assert found.setting.notes == ("on plain loopback",)


def test_a_plan_says_what_would_run_and_runs_nothing(
    suite: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["run", suite, "--out", str(tmp_path / "out"), "--plan", "--systems", "single"]) == 0
    shown = capsys.readouterr().out
    assert "digits-64/8/loopback-2/weak: 1 systems, 1 rounds" in shown
    assert "on plain loopback" in shown
    assert not (tmp_path / "out").exists()


def test_report_writes_the_files_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = (finished(case("single"), 1.0), finished(case("hvpipe-step"), 2.0))
    folder = written(tmp_path / "a", *rounds)
    for name in ("report.html", "results.csv"):
        (tmp_path / "a" / name).unlink()
    assert command.main(["report", folder]) == 0
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        *("report.html", "results.csv", "results.json"),
    ]
    assert Outcome.read(tmp_path / "a") == outcome(*rounds)
    shown = capsys.readouterr().out
    assert "hvpipe-step   2 s" in shown
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


def test_a_report_of_a_run_that_was_interrupted(tmp_path: Path) -> None:
    journal = Journal(tmp_path, outcome().setting)
    journal.add_round(finished(case("hvpipe-step"), 2.0))
    assert command.main(["report", str(tmp_path)]) == 0
    assert "hvpipe-step" in (tmp_path / "results.csv").read_text()
    journal.add_round(finished(case("tf-mwms"), 3.0))
    assert command.main(["report", str(tmp_path)]) == 0
    assert len(Outcome.read(tmp_path).rounds) == 2


def test_compare_is_exit_code_1_where_something_is_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = written(tmp_path / "a", finished(case("hvpipe-step"), 1.0, 1.0))
    after = written(tmp_path / "b", finished(case("hvpipe-step"), 2.0, 2.0))
    assert command.main(["compare", before, f"{after}/results.json"]) == 1
    assert "1 slower" in capsys.readouterr().out
    assert command.main(["compare", after, before, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["changes"][0]["verdict"], found["regressed"]) == ("faster", False)


def test_what_cannot_be_read_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("hvpipe bench report: Results should be a file")
    with pytest.raises(SystemExit) as caught:
        command.main(["walk"])
    assert caught.value.code == 2


def test_hvpipe_bench_hands_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def record(line: list[str], environ: dict[str, str], grace_s: float) -> int:
        started.append([*line[1:], environ["PYTHONPATH"].split(":")[0]])
        return 7

    monkeypatch.setattr(bench_command, "supervise", record)
    assert cli.main(["bench", "compare", "a.json", "b.json", "--json"]) == 7
    checkout = str(Path(command.__file__).parents[1])
    assert started == [["-m", "bench", "compare", "a.json", "b.json", "--json", checkout]]


def test_without_a_checkout_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"clone the repository.*Received: no bench/ in "):
        bench_command.find_checkout(tmp_path, tmp_path)
    for part in ("bench/__main__.py", "hvpipe/__init__.py"):
        (tmp_path / "clone" / part).parent.mkdir(parents=True)
        (tmp_path / "clone" / part).touch()
    below = tmp_path / "clone" / "bench"
    assert bench_command.find_checkout(tmp_path, below) == tmp_path / "clone"
