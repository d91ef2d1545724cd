"""When a job is started again, with small programs in place of mpirun."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvpipe.commands import lost_hosts
from hvpipe.commands.hosts import HostSlots
from hvpipe.commands.join import Places
from hvpipe.commands.lost_hosts import is_this_host
from hvpipe.commands.restarts import Restarting
from hvpipe.environment.job_folder import Loss, read_end, read_loss, tell_checkpoints, tell_end, tell_loss
from hvpipe.errors import LaunchError

# Counts its starts in a file, then does what its arguments say for that start.
PROGRAM = """
import os, sys
from pathlib import Path
folder, counter = Path(os.environ["HVPIPE_JOB_FOLDER"]), Path(sys.argv[1])
start = int(counter.read_text()) if counter.exists() else 0
counter.write_text(str(start + 1))
what = sys.argv[2].split(",")[start]
if "c" in what: (folder / "checkpoint").write_text(f"run/{start}" if "l" not in what else "run/0000000020-ab")
if "e" in what: (folder / "error-1").write_text("ValueError on rank 1: a bug")
if "j" in what: (folder / "joined").touch()
if "d" in what: (folder / f"ended-{folder.name}").write_text("0")
if "s" in what: (folder / f"ended-{folder.name}").write_text("75")
if "w" in what: (folder / "wanted.json").write_text('{"pid": 1, "ranks": 3, "hosts": []}')
if "l" in what: (folder / f"lost-{folder.name}.json").write_text('{"ranks": [1], "step": 24}')
if "p" in what: (folder / "error-0").write_text("PeerError on rank 0: rank 1 is gone")
sys.exit(int(what.strip("cepljdws")))
"""


def run(tmp_path: Path, starts: str, restarts: int = 5) -> tuple[int, int]:
    """Return the exit code, and how often the program was started."""
    job = Restarting(argparse.Namespace(restarts=restarts, grace=1.0), Places(2))
    code = job([sys.executable, "-c", PROGRAM, str(tmp_path / "count"), starts], os.environ)
    return code, int((tmp_path / "count").read_text())


@pytest.mark.parametrize(
    ("starts", "code", "count", "says"),
    [
        ("0", 0, 1, ""),
        ("0jd", 0, 1, ""),
        ("0jc,0jd", 0, 2, "exit code 0, but no rank here ended properly: a host was lost"),
        ("75c", 75, 1, ""),  # asked to stop
        ("0jcs", 75, 1, ""),  # so they were, and a host was lost
        ("1c,137c,0", 0, 3, "Starting it again from run/0"),
        ("1,0", 0, 2, "Starting it again from the checkpoint that it finds"),
        ("1pc,0", 0, 2, "Starting it again from run/0"),
        ("1p,1p", 1, 2, "no new checkpoint was made between two failures"),
        ("1e", 1, 1, "the script failed before it made a new checkpoint: ValueError on rank 1: a bug"),
        ("1ec,1e", 1, 2, "the script failed before it made a new checkpoint"),
        ("1c,1c,1c,1c,1c,3c", 3, 6, "it has failed 6 times"),
    ],
)
def test_when_a_job_starts_again(
    starts: str, code: int, count: int, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, starts) == (code, count)
    told = capfd.readouterr().err
    assert says in told
    assert bool(told) == bool(says)


@pytest.mark.parametrize(
    ("starts", "says"),
    [
        ("75l", "starts again from the checkpoint that it finds, and repeats the steps since then"),
        ("75lc", "starts again from run/0000000020-ab, and repeats 3 finished steps"),
    ],
)
def test_a_pipeline_lost_a_rank(
    starts: str, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Restarting(argparse.Namespace(restarts=0, grace=1.0), Places(3))
    assert job([sys.executable, "-c", PROGRAM, str(tmp_path / "count"), starts], os.environ) == 75
    assert job.joined
    assert job.places == Places(2)
    assert f"rank 1 was lost in step 24. The pipeline {says}" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("starts", "code", "ranks", "says"),
    [
        ("75w,1,0jd", 0, [2, 3, 2], "could not start with 3 ranks. It goes back to 2 ranks"),
        ("75w,1j", 1, [2, 3], ""),  # it started, so the failure has another reason
        ("75w,0jd", 0, [2, 3], ""),
    ],
)
def test_a_job_that_cannot_start_with_more_ranks(
    starts: str, code: int, ranks: list[int], says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Restarting(argparse.Namespace(restarts=0, grace=1.0), Places(2))
    seen = []
    while True:
        seen.append(job.places.ranks)
        last = job([sys.executable, "-c", PROGRAM, str(tmp_path / "count"), starts], os.environ)
        if not job.joined:
            break
    assert (seen, last) == (ranks, code)
    assert says in capfd.readouterr().err


def on_hosts(tmp_path: Path, least: int, broken: str) -> Restarting:
    """Return an elastic job on a, b and c, of which one cannot be reached."""
    agent = tmp_path / "agent"
    agent.write_text(f"#!/bin/sh\ntest $1 != {broken} && shift && exec $*\n")
    agent.chmod(0o755)
    options = argparse.Namespace(restarts=0, grace=1.0, elastic=True, min_np=least, rsh_agent=str(agent))
    return Restarting(options, Places(4, (HostSlots("a", 1), HostSlots("b", 2), HostSlots("c", 1))))


@pytest.mark.parametrize(("start", "broken", "code"), [("0j", "none", 1), ("0", "none", 0), ("0", "b", 1)])
def test_no_rank_of_this_host_has_ended(start: str, broken: str, code: int, tmp_path: Path) -> None:
    """Regression: if no rank was here, the job counted as done although a host was lost."""
    job = on_hosts(tmp_path, 1, broken)
    assert job([sys.executable, "-c", PROGRAM, str(tmp_path / "count"), start], os.environ) == code
    assert job.joined == (broken == "b")


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        (socket.gethostname(), True),
        ("192.0.2.1", False),
    ],
)
def test_names_of_this_host(name: str, is_own: bool) -> None:
    assert is_this_host(name) == is_own


def test_no_other_host_is_this_one_if_sockets_bind_any_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_hosts, "_binds_any_address", lambda: True)
    monkeypatch.setattr(socket.socket, "bind", lambda *_: None)
    assert not is_this_host("192.0.2.1")
    assert is_this_host("127.0.0.1")


@pytest.mark.parametrize(
    ("name", "own", "here"),
    [("n1.invalid", "n1", True), ("n1", "n1.invalid", True), ("n2.invalid", "n1", False)],
)
def test_this_hosts_name_need_not_resolve(
    name: str, own: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the launcher's host counted as lost if only its name with another domain was known."""

    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    assert is_this_host(name) == here


@pytest.mark.parametrize("here", [True, False])
def test_what_ranks_of_another_host_tell_goes_through_the_folder_that_the_hosts_share(
    tmp_path: Path, here: bool
) -> None:
    """Regression: if the ranks of this host were lost, nobody told of a loss or of the job's end."""
    job, checkpoints = tmp_path / "hvpipe-run-x", tmp_path / "checkpoints"
    job.mkdir()
    checkpoints.mkdir()
    tell_checkpoints(job, checkpoints)
    name = str(job)
    if not here:
        job.rename(tmp_path / "elsewhere")
    tell_loss(name, checkpoints, [1], 24)
    tell_end(name, checkpoints, 75)
    if not here:
        (tmp_path / "elsewhere").rename(job)
    assert read_loss(job) == Loss((1,), 24)
    assert read_loss(job) is None
    assert read_end(job) == 75
    assert read_end(job) is None
    assert not any(checkpoints.iterdir())
    tell_end(str(tmp_path / "elsewhere"), None)  # nobody could be told


@pytest.mark.parametrize(("least", "code", "left"), [(2, 1, 2), (3, 69, 4)])
def test_a_host_cannot_be_reached(
    least: int, code: int, left: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The agent reaches only a and c. The host that a job loses may be the only reason of its failure."""
    job = on_hosts(tmp_path, least, "b")
    assert job([sys.executable, "-c", PROGRAM, str(tmp_path / "count"), "0j"], os.environ) == code
    assert job.places.ranks == left
    assert job.joined == (least == 2)
    assert "hvpipe run: b cannot be reached." in capfd.readouterr().err


def test_without_restarts_nothing_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "1c", restarts=0) == (1, 1)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("restarts", "grace"), [(-1, 1.0), (1, -1.0), (1, float("nan"))])
def test_bad_options(restarts: int, grace: float) -> None:
    with pytest.raises(LaunchError, match="Received: "):
        Restarting(argparse.Namespace(restarts=restarts, grace=grace), Places(2))


def test_the_verdict_is_about_the_ranks_that_went_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: after a loss that the job survived, it was about that loss."""
    read: list[str] = []

    def read_records(folder: Path) -> SimpleNamespace:
        read.append(folder.name)
        return SimpleNamespace(flights=())

    monkeypatch.setattr("hvpipe.blackbox.story.read_records", read_records)
    for name in ("flight", "flight-3-ranks"):
        (tmp_path / name).mkdir()
    Restarting(argparse.Namespace(restarts=0, grace=1.0), Places(4))._what_happened(tmp_path, set(), 1)
    assert read == ["flight-3-ranks"]
