"""The command line: its flags, its exit codes, and what it passes to mpirun."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvpipe import cli
from hvpipe.commands import launch_options, mpirun
from hvpipe.commands.horovodrun_flags import WITHOUT_EFFECT
from hvpipe.commands.mpirun import Mpirun
from hvpipe.environment.native import BuildInfo
from hvpipe.monitor import core_binding
from hvpipe.specs.cluster import equal_cluster
from hvpipe.trace.events import Event, Trace
from model_graphs import chain

HOROVODRUN = [
    *(
        "--check-build",
        "-cb",
        "--min-num-proc",
        "--config-file",
        "--fusion-threshold-mb",
        "--gloo",
        "--log-level",
        "--mpi",
        "--mpi-args",
    ),
    *("--no-stall-check", "--num-proc", "--output-filename", "--stall-check-warning-time-seconds"),
    *("--network-interface", "--network-interfaces", "--ssh-identity-file", "--ssh-port", "--start-timeout"),
    *("--stall-check-shutdown-time-seconds", "--timeline-filename", "--verbose", "-i", "-p", *WITHOUT_EFFECT),
]
LAUNCH = [
    *("--bind", "--dry-run", "--help", "--host", "--hostfile", "--hosts", "--launcher-args", "--mpirun"),
    *("--net", "--ports", "--rsh-agent", "--timeout", "-H", "-h", "-n", "-np", "-hostfile"),
]
FLAGS = {
    "": ["--help", "--version", "-h"],
    "run": [
        *LAUNCH,
        *("--module", "--no-summary", "--trace", "--utilization", "--utilization-hz", "-m"),
        *("--elastic", "--grace", "--lr-scaling", "--min-np", "--nonfinite", "--restarts", "--verify"),
        *("--flight-recorder", "--stall-abort", "--stall-warn", "--strict"),
        *HOROVODRUN,
    ],
    "blackbox": ["--help", "--json", "-h"],
    "join": ["--help", "--job", "-h", "-np"],
    "stop": ["--help", "--job", "--wait", "-h"],
    "top": ["--help", "--interval", "--json", "-h"],
    "doctor": [*LAUNCH, "--all-hosts", "--json"],
    "report": ["--help", "--json", "-h"],
    "profile": [
        *LAUNCH,
        *("--cluster", "--input-shape", "--microbatch", "--optimizer", "--output", "--repeats", "-o"),
    ],
    "tune": [*LAUNCH, "--output", "-o"],
    "plan": [
        *("--batch-size", "--chunks", "--cluster", "--explain", "--graph-batch-size", "--help", "--json"),
        *(
            "--method",
            "--microbatches",
            "--mode",
            "--no-baselines",
            "--output",
            "--png",
            "--recompute",
            "--recompute-stages",
        ),
        *("--schedule", "--seed", "--stages", "-h", "-o"),
    ],
    "bench": ["--help", "-h"],
}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a script. The host has 8 cores, Open MPI 5, no root user and no hvpipe settings."""
    found = Mpirun("/mpi/mpirun", "Open MPI", (5, 0, 11))
    monkeypatch.setattr(mpirun, "find_mpirun", lambda *_: found)
    monkeypatch.setattr(core_binding, "affordable_cores", lambda: 8)
    monkeypatch.setattr(cli.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(cli.os, "environ", {"PATH": "/bin:/usr/bin"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main(["run", "--dry-run", *arguments]) == 0
    return shlex.split(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["run", *arguments]) == 2
    return capsys.readouterr().err


def test_the_flags_are_frozen() -> None:
    parser = cli.make_parser()
    (commands,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    parsers = {"": parser, **commands.choices}
    found = {name: sorted(p._option_string_actions) for name, p in parsers.items()}
    assert found == {name: sorted(flags) for name, flags in FLAGS.items()}


WORDS = st.one_of(
    st.sampled_from(["", "-1", "0", "nan", "1e999", "\ud800", "a:2,b", "every=0", "train.py", "a=b", "--"]),
    st.text(max_size=4),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_words_end_with_an_exit_code(script: str, data: st.DataObject) -> None:
    command = data.draw(st.sampled_from(["run", "profile", "tune", "plan", "blackbox", "report"]))
    starts = ["--dry-run"] if command in ("run", "profile", "tune") else []
    words = data.draw(st.lists(st.one_of(st.sampled_from(FLAGS[command]), WORDS), max_size=6))
    try:
        code = cli.main([command, *starts, *words])
    except SystemExit as left:
        code = left.code
    assert code in (0, 1, 2)


@pytest.mark.parametrize("steps", ["50", "every=50"])
def test_steps_between_two_comparisons(steps: str, script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = dry_run(capsys, "-np", "2", "--verify", steps, "--strict", script)
    assert all(any(wanted in word for word in words) for wanted in ("HVPIPE_VERIFY=50", "HVPIPE_STRICT=1"))


def test_ranks_here(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(capsys, "-np", "2", script, "--epochs", "3", "-np", "7") == [
        *("env", "HVPIPE_SUMMARY=1", "OMP_NUM_THREADS=4", "TF_NUM_INTRAOP_THREADS=4"),
        *("/mpi/mpirun", "-np", "2", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
        *(sys.executable, "-u", "train.py", "--epochs", "3", "-np", "7"),
    ]


def test_files_are_absolute_and_settings_reach_other_hosts(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--trace", "t.json", "--utilization", "u.json", "--timeout", "2.5", "--no-summary"]
    options += ["--utilization-hz", "2"]
    assert dry_run(capsys, "--hosts", "a:2,b:2", *options, script) == [
        *(
            "env",
            "HVPIPE_TIMEOUT=2.5",
            f"HVPIPE_TRACE={tmp_path}/t.json",
            f"HVPIPE_UTILIZATION={tmp_path}/u.json",
            "HVPIPE_UTILIZATION_HZ=2",
        ),
        *("/mpi/mpirun", "-np", "4", "--host", "a:2,b:2", "--bind-to", "none"),
        *("-x", "HVPIPE_TIMEOUT", "-x", "HVPIPE_TRACE", "-x", "HVPIPE_UTILIZATION"),
        *("-x", "HVPIPE_UTILIZATION_HZ", "-x", "PATH", "-x", "PYTEST_CURRENT_TEST"),
        *(sys.executable, "-u", "train.py"),
    ]


def test_a_module(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(capsys, "-np", "1", "-m", "package.train", "--", "--epochs", "3")[-5:] == [
        *("-u", "-m", "package.train", "--epochs", "3"),
    ]


@pytest.mark.parametrize("python", ["python", "python3", sys.executable])
def test_python_may_stand_before_the_script(
    python: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(capsys, "-np", "2", python, script, "--epochs", "3")[-5:] == [
        *(sys.executable, "-u", "train.py", "--epochs", "3"),
    ]


def test_pythons_own_options_are_passed_on(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = dry_run(capsys, "-np", "2", "python", "-W", "error", "-m", "package.train", "-np", "7")
    assert command[-8:] == [sys.executable, "-u", "-W", "error", "-m", "package.train", "-np", "7"]


def test_a_script_that_is_called_python(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "python").write_text("")
    assert dry_run(capsys, "-np", "2", "python", script)[-2:] == ["python", "train.py"]


@pytest.mark.parametrize(
    "hosts", [["-H", "a:2,b:2"], ["--host", "a:2,b:2"], ["--hostfile", "hosts"], ["--hostfile", "a.txt"]]
)
def test_hosts_as_mpirun_and_horovodrun_take_them(
    hosts: list[str], script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    (tmp_path / "a.txt").write_text("a\na\nb\nb\n")
    command = dry_run(capsys, *hosts, script)
    assert command[command.index("/mpi/mpirun") :][:5] == ["/mpi/mpirun", "-np", "4", "--host", "a:2,b:2"]


def test_profile_takes_a_hostfile(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts").write_text("a slots=2\n")
    assert cli.main(["profile", "--dry-run", "--hostfile", "hosts", f"{script}:build"]) == 0
    assert "-np 2 --host a:2" in capsys.readouterr().out


def test_a_slurm_job_has_its_tasks_as_ranks(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "6")
    command = dry_run(capsys, script)
    assert command[command.index("-np") + 1] == "6"


def test_an_agent_is_made_absolute(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = tmp_path / "agent"
    agent.write_text("#!/bin/sh\n")
    agent.chmod(0o755)
    command = dry_run(capsys, "--hosts", "a", "--rsh-agent", "./agent", "--net", "eth0", script)
    assert command[command.index("plm_ssh_agent") + 1] == str(agent)
    assert command[command.index("btl_tcp_if_include") + 1] == "eth0"


def test_mpiruns_own_arguments(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = dry_run(capsys, "-np", "2", "--launcher-args", "--mca pml 'ob1'", script)
    assert command[-6:-3] == ["--mca", "pml", "ob1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train.py"], "Give the number of ranks, hvpipe run -np 2 .*, or --hosts"),
        (["-np", "0", "train.py"], "Received: ranks=0"),
        (["-np", "2", "absent.py"], "Received: script='absent.py'"),
        (["-np", "2", "python"], "The script should be a file. Received: script=''"),
        (["-np", "2", "python3", "absent.py"], "Received: script='absent.py'"),
        (["-np", "2", "python2", "train.py"], "omit the Python.*Received: python2, and hvpipe in"),
        (["-np", "2", "/other/bin/python", "train.py"], "Received: /other/bin/python, and hvpipe in"),
        (["--hostfile", "absent", "train.py"], "Received: --hostfile 'absent'"),
        (["--hostfile", "train.py", "train.py"], "--hostfile names no host: train.py should"),
        (["-np", "5", "--hosts", "a:2,b:2", "train.py"], "Received: -np 5 with 4 slots"),
        (["--hosts", "a:x", "train.py"], "Received: --hosts 'a:x'"),
        (["-np", "2", "--timeout", "0", "train.py"], "Received: 0"),
        (["-np", "2", "--utilization-hz", "0", "train.py"], "--utilization-hz should be .*Received: 0"),
        (["-np", "2", "--trace", "absent/t.json", "train.py"], "Received: --trace 'absent/t.json'"),
        (["-np", "2", "--trace", "x" * 300, "train.py"], "File name too long"),
        (["-np", "2", "x" * 300], "The script should be a file"),
        (["-np", "2", "--trace", ".", "train.py"], r"Received: --trace '\.'"),
        (
            ["-np", "2", "--output-filename", "train.py", "train.py"],
            "Received: --output-filename 'train.py': File",
        ),
        (["-np", "2", "--rsh-agent", "./absent", "train.py"], "Received: --rsh-agent './absent'"),
        (["-np", "2", "--mpirun", "/absent", "train.py"], "Received: --mpirun '/absent'"),
        (["-np", "2", "--launcher-args", "'a", "train.py"], "--launcher-args should have balanced quotes"),
        (["-np", "2", "--rsh-agent", '"a', "train.py"], "--rsh-agent should have balanced quotes"),
    ],
)
def test_refused_before_anything_starts(
    arguments: list[str], says: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refusal(capsys, *arguments)
    assert message.startswith("hvpipe run: ")
    assert re.search(says, message)


@pytest.mark.parametrize(
    "arguments",
    [
        *(["run", "-np", "two", "train.py"], ["run", "-np", "2"], ["walk"]),
        ["run", "-H", "a:2", "--hostfile", "hosts", "train.py"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "exit codes" in capsys.readouterr().out


def test_an_mpirun_of_another_mpi_than_the_build_causes_a_warning(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = BuildInfo(None, "MPICH Version: 4.2.3", None)
    monkeypatch.setattr(launch_options, "read_build_info", lambda: build)
    assert cli.main(["run", "--dry-run", "-np", "1", script]) == 0
    assert (
        "built with MPICH Version: 4.2.3, but the only mpirun found is Open MPI 5.0.11"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("option", ["--trace", "--utilization"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_starts(
    option: str, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def deny(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", deny)
    says = f"Received: {option} 't.json': Permission denied"
    assert says in refusal(capsys, "-np", "2", option, "t.json", script)


def test_trying_a_file_leaves_none(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "traces").mkdir()
    dry_run(capsys, "-np", "2", "--trace", str(tmp_path / "traces" / "t.json"), script)
    assert list((tmp_path / "traces").iterdir()) == []


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = tuple(Event("step", "step", 0, "step", float(i), i + 0.5) for i in range(3))
    Trace(steps).write(tmp_path / "t.json")
    assert cli.main(["report", str(tmp_path / "t.json")]) == 0
    shown = capsys.readouterr().out
    assert "step                  500 ms" in shown
    assert "no advice: nothing was reduced over ranks" in shown
    assert cli.main(["report", "--json", str(tmp_path / "t.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    why_not = "nothing was reduced over ranks"
    assert (found["step_s"], found["advice"]) == (0.5, {"step": None, "changes": [], "why_not": why_not})


def test_report_advises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans = {"step": (0.0, 1.0), "forward": (0.0, 0.2), "backward": (0.2, 0.5), "reduce": (0.5, 1.0)}
    events = [
        Event(name, name, 0, "compute", n + start_s, n + end_s)
        for n in range(8)
        for name, (start_s, end_s) in spans.items()
    ]
    trained_with = {"overlap": "none", "compression": None}
    Trace(tuple(events), {"trained_with": trained_with}).write(tmp_path / "t.json")
    assert cli.main(["report", str(tmp_path / "t.json")]) == 0
    shown = capsys.readouterr().out
    assert "a step of rank 0: computing 50%, link 50%, update 0%" in shown
    assert '  overlap="step": 2.00x\n' in shown
    assert cli.main(["report", "--json", str(tmp_path / "t.json")]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert advice["step"]["step_s"] == pytest.approx(1.0)
    assert {each["what"] for each in advice["changes"]} >= {'overlap="step"'}


def test_report_of_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "absent.json")]) == 1
    assert "hvpipe report: A trace should be" in capsys.readouterr().err


def test_ctrl_c_is_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.report, "run", interrupted)
    assert cli.main(["report", "trace.json"]) == 130
    assert capsys.readouterr().err == ""


def test_letters_that_a_terminal_lacks(tmp_path: Path) -> None:
    """Regression: UnicodeEncodeError."""
    replace(chain(1), model="\N{SNOWMAN}").write(tmp_path / "profile.json")
    equal_cluster(1).write(tmp_path / "cluster.json")
    files = (str(tmp_path / "profile.json"), "--cluster", str(tmp_path / "cluster.json"))
    command = [sys.executable, "-m", "hvpipe", "plan", *files, "--method", "even", "--no-baselines"]
    result = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "latin-1"}, capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.startswith(rb"\u2603, 1 layer")


def test_output_that_nobody_reads_to_its_end() -> None:
    """As in `hvpipe doctor | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "hvpipe", "doctor"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize(("arguments", "unbuffered"), [("doctor", ""), ("doctor", "1"), ("top --help", "")])
def test_output_that_cannot_be_written(arguments: str, unbuffered: str) -> None:
    """Regression: a full disk ended in a traceback, or in exit code 120 and "Exception ignored"."""
    command = [sys.executable, "-m", "hvpipe", *arguments.split()]
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environ
        )
    message = "hvpipe: Cannot write output: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, message)


def test_a_full_disk_of_another_file_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: it was reported as an output that cannot be written."""

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "folder/file")

    monkeypatch.setattr("hvpipe.commands.doctor.run", fail)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "hvpipe: No space left on device: folder/file\n"
