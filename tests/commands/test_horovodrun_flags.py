"""The flags of horovodrun, as `hvpipe run --dry-run` passes them on."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from hvpipe import cli
from hvpipe.commands.horovodrun_flags import WITHOUT_EFFECT


@pytest.fixture
def mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Stand in for the launcher, which --dry-run only identifies."""
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    program.chmod(0o755)
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        monkeypatch.setenv(name, "1")
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return str(program)


def dry_run(mpirun: str, arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return the printed command, and what was said on stderr."""
    words = ["run", "--mpirun", mpirun, "--dry-run", "--no-summary", *shlex.split(arguments)]
    assert cli.main([*words, sys.executable, "train.py"]) == 0
    told = capsys.readouterr()
    return told.out, told.err


@pytest.mark.parametrize(
    ("flag", "same_as"),
    [
        ("--num-proc 2", "-np 2"),
        ("-np 2 -hostfile hosts", "-np 2 --hostfile hosts"),
        ("-np 2 --mpi", "-np 2"),
        ("-np 2 --network-interfaces eth1", "-np 2 --net eth1"),
        ("-np 2 --network-interface eth1", "-np 2 --net eth1"),
        ("-np 2 --mpi-args='--tag-output'", "-np 2 --launcher-args='--tag-output'"),
        ("-np 2 --timeline-filename t.json", "-np 2 --trace t.json"),
        ("-np 2 --start-timeout 60", "-np 2 --timeout 60"),
        ("-np 2 --verbose", "-np 2"),
    ],
)
def test_the_same_under_another_name(
    flag: str, same_as: str, mpirun: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("hosts").write_text("a slots=2\n")
    assert dry_run(mpirun, flag, capsys) == dry_run(mpirun, same_as, capsys)


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--fusion-threshold-mb 32", "HVPIPE_BUCKET_BYTES=33554432"),
        ("--fusion-threshold-mb 0.5", "HVPIPE_BUCKET_BYTES=524288"),
        ("--fusion-threshold-mb 0", "HVPIPE_BUCKET_BYTES=1"),
        ("--log-level TRACE", "HVPIPE_LOG_LEVEL=debug"),
        ("--log-level WARNING", "HVPIPE_LOG_LEVEL=warning"),
        ("--stall-check-shutdown-time-seconds 600", "HVPIPE_TIMEOUT=600"),
        ("--stall-check-shutdown-time-seconds 600 --timeout 44", "HVPIPE_TIMEOUT=44"),
        (
            "--stall-check-shutdown-time-seconds 20 --stall-check-warning-time-seconds 10",
            "HVPIPE_TIMEOUT=20",
        ),
        ("--stall-check-warning-time-seconds 30", "HVPIPE_STALL_WARN=30"),
        ("--no-stall-check", "HVPIPE_STALL_WARN=0"),
    ],
)
def test_settings(flag: str, setting: str, mpirun: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert setting in dry_run(mpirun, f"-np 2 {flag}", capsys)[0].split()


def test_the_port_and_key_of_ssh(
    mpirun: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ssh = Path(mpirun).with_name("ssh")
    ssh.write_text("#!/bin/sh\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(ssh.parent), prepend=":")
    printed, _ = dry_run(mpirun, "-np 2 -H a:2 -p 2222 -i my-key", capsys)
    words = shlex.split(printed)
    assert words[words.index("plm_ssh_agent") + 1] == f"{ssh} -p 2222 -i my-key"


def test_flags_without_effect_are_named(mpirun: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"{flag} {'1' * values}" for flag, values in WITHOUT_EFFECT.items()]
    printed, told = dry_run(mpirun, f"-np 2 {' '.join(given)}", capsys)
    assert printed == dry_run(mpirun, "-np 2", capsys)[0]
    assert told == f"hvpipe run: these flags have no effect here: {', '.join(WITHOUT_EFFECT)}\n"


@pytest.mark.parametrize(
    "others", ["20", "600 --no-stall-check", "600 --stall-check-warning-time-seconds 601"]
)
def test_a_shutdown_time_that_horovod_ignores(
    others: str, mpirun: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--stall-check-shutdown-time-seconds"
    printed, told = dry_run(mpirun, f"-np 2 {flag} {others}", capsys)
    assert "HVPIPE_TIMEOUT" not in printed
    assert told.endswith(f"{flag}\n")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--gloo", "omit --gloo. Received: --gloo"),
        (
            "--fusion-threshold-mb=-1",
            "--fusion-threshold-mb should be 0 or a positive number. Received: -1.0",
        ),
        ("--fusion-threshold-mb nan", "Received: nan"),
        ("--config-file a.yaml", "as flags, such as --fusion-threshold-mb. Received: --config-file 'a.yaml'"),
        ("--rsh-agent /agent -p 22", "Received: --rsh-agent '/agent' and -p 22"),
    ],
)
def test_refused(flags: str, says: str, mpirun: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--mpirun", mpirun, "--dry-run", "-np", "2", *shlex.split(flags), "train.py"]
    assert cli.main(words) == 2
    assert says in capsys.readouterr().err


def test_output_files_take_each_rank_through_the_copier(
    mpirun: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, _ = dry_run(mpirun, "-np 2 --output-filename logs", capsys)
    ends = ["-m", "hvpipe.commands.rank_output", f"{tmp_path}/logs", sys.executable, "-u", "train.py"]
    assert shlex.split(printed)[-7:] == [sys.executable, *ends]
    assert not (tmp_path / "logs").exists()


def test_check_build_needs_no_script(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--check-build"])
    assert "mpirun" in capfd.readouterr().out
