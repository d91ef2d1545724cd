"""`hvpipe profile` before any rank runs: what it refuses, and what it passes to the ranks."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from hvpipe import cli
from hvpipe.commands import mpirun
from hvpipe.commands.mpirun import Mpirun
from hvpipe.errors import HvpipeError
from hvpipe.monitor import core_binding
from hvpipe.specs.profile_request import InputShape, ProfileTask, parse_input_shapes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a model file, on a host with 8 cores and Open MPI 5, without root or settings."""
    found = Mpirun("/mpi/mpirun", "Open MPI", (5, 0, 11))
    monkeypatch.setattr(mpirun, "find_mpirun", lambda *_: found)
    monkeypatch.setattr(core_binding, "affordable_cores", lambda: 8)
    monkeypatch.setattr(cli.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(cli.os, "environ", {"PATH": "/bin:/usr/bin"})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text("")
    return tmp_path


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main(["profile", "--dry-run", *arguments]) == 0
    return shlex.split(capsys.readouterr().out)


def test_ranks_on_this_host(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *command, task = dry_run(
        capsys,
        *("-np", "2", "nets.py:small", "--microbatch", "8", "--optimizer", "sgd", "--repeats", "3"),
        *("--input-shape", "image=8,8,3", "--input-shape", "tokens=64"),
    )
    assert command == [
        *("env", "HVPIPE_TIMEOUT=3600", "OMP_NUM_THREADS=4", "TF_NUM_INTRAOP_THREADS=4"),
        *("/mpi/mpirun", "-np", "2", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
        *(sys.executable, "-u", "-m", "hvpipe.keras.profiling.ranks"),
    ]
    assert ProfileTask.from_text(task) == ProfileTask(
        target="nets.py:small",
        profile_path=f"{folder}/profile.json",
        cluster_path=f"{folder}/cluster.json",
        microbatch=8,
        input_shapes=(InputShape("image", (8, 8, 3)), InputShape("tokens", (64,))),
        repeats=3,
        optimizer="sgd",
    )


def test_one_rank_needs_no_mpirun(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = dry_run(capsys, "package.nets:small", "--timeout", "60", "-o", "a.json", "--cluster", "b.json")
    assert command[:-1] == [
        "env",
        "HVPIPE_TIMEOUT=60",
        sys.executable,
        "-u",
        "-m",
        "hvpipe.keras.profiling.ranks",
    ]
    task = ProfileTask.from_text(command[-1])
    assert (task.profile_path, task.cluster_path) == (f"{folder}/a.json", f"{folder}/b.json")
    assert (task.place, task.function, task.is_file) == ("package.nets", "small", False)


def test_a_time_limit_in_the_environment_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.os, "environ", {"PATH": "/bin", "HVPIPE_TIMEOUT": "7"})
    assert "HVPIPE_TIMEOUT=3600" not in dry_run(capsys, "nets.py:small")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nets.py"], r"FILE\.py:FUNCTION or MODULE:FUNCTION.*Received: 'nets.py'"),
        ([":small"], "Received: ':small'"),
        (["nets.py:two words"], "Received: 'nets.py:two words'"),
        (["absent.py:small"], "absent.py should be a file. Received: 'absent.py:small'"),
        ([f"{'x' * 300}.py:small"], "should be a file. Received: "),
        (["nets.py:small", "-o", "x.json", "--cluster", "./x.json"], "Received: --output x.json"),
        (["nets.py:small", "--microbatch", "0"], "Received: --microbatch 0"),
        (["nets.py:small", "--repeats", "0"], "Received: --repeats 0"),
        (["nets.py:small", "-o", "absent/p.json"], "Received: --output 'absent/p.json'"),
        (["nets.py:small", "--cluster", "."], r"Received: --cluster '\.'"),
        (["nets.py:small", "--input-shape", "8,,3"], "Received: --input-shape '8,,3'"),
        (["nets.py:small", "-np", "0"], "Received: ranks=0"),
    ],
)
def test_refused_before_anything_starts(
    arguments: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("hvpipe profile: ")
    assert re.search(says, message)


def test_input_shapes() -> None:
    assert parse_input_shapes([]) == ()
    assert parse_input_shapes(["224,224,3"]) == (InputShape("", (224, 224, 3)),)
    assert parse_input_shapes(["a=b=5"]) == (InputShape("a=b", (5,)),)


@pytest.mark.parametrize("texts", [["=5"], ["0,5"], ["a=-1"], ["a=5", "a=6"], ["5", "b=6"], ["a"]])
def test_bad_input_shapes(texts: list[str]) -> None:
    with pytest.raises(HvpipeError, match=rf"Received: --input-shape .*{texts[0]}"):
        parse_input_shapes(texts)
