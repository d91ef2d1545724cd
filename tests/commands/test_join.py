"""`hvpipe join`: which job it finds, what it asks of it, and what it refuses."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvpipe.commands import join, lost_hosts, stop
from hvpipe.commands.hosts import HostSlots, parse_hosts
from hvpipe.commands.join import Places
from hvpipe.environment.job_folder import PREFIX, new_job_folder
from hvpipe.errors import HvpipeError

TWO_HOSTS = Places(4, (HostSlots("a", 2), HostSlots("b", 2)))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of a job that runs, as `hvpipe run` and a rank with a checkpoint leave it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        lost_hosts, "unreachable", lambda hosts, agent: [h.name for h in hosts if h.name == "far"]
    )
    with new_job_folder() as folder:
        join.register(folder, TWO_HOSTS, "agent", 3)
        (folder / "listening-0").write_text(str(os.getpid()))
        yield folder


def ask(hosts: str | None = None, ranks: int | None = None, pid: int | None = None) -> int:
    return join.run(argparse.Namespace(hosts=hosts, ranks=ranks, job=pid), {})


@pytest.mark.parametrize(
    ("before", "hosts", "ranks", "after"),
    [
        (TWO_HOSTS, "c:3", None, "7 ranks on a:2,b:2,c:3"),
        (TWO_HOSTS, "c:3", 5, "5 ranks on a:2,b:2,c:3"),
        (TWO_HOSTS, "b:4,c", None, "7 ranks on a:2,b:4,c:1"),  # b has been repaired
        (TWO_HOSTS, None, 2, "2 ranks on a:2,b:2"),
        (Places(2), None, 3, "3 ranks"),
    ],
)
def test_ranks_and_hosts_afterwards(before: Places, hosts: str | None, ranks: int | None, after: str) -> None:
    assert str(before.with_more(parse_hosts(hosts) if hosts else (), ranks)) == after


@pytest.mark.parametrize(
    ("before", "lost", "after"),
    [
        (Places(3), [1], "2 ranks"),
        (TWO_HOSTS, [1], "3 ranks on a:1,b:2"),
        (TWO_HOSTS, [3, 2], "2 ranks on a:2"),  # the whole host
        (Places(3, TWO_HOSTS.hosts), [2], "2 ranks on a:2"),
        (Places(2, TWO_HOSTS.hosts), [0], "1 rank on a:1,b:2"),
    ],
)
def test_ranks_and_hosts_after_a_loss(before: Places, lost: list[int], after: str) -> None:
    assert str(before.without(lost)) == after


def test_the_job_is_asked_to_stop(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert join.wanted(job) is None
    assert ask("c:2") == 0
    assert "6 ranks on a:2,b:2,c:2 (it had 4 ranks on a:2,b:2)" in capsys.readouterr().out
    assert (job / "stop").exists()
    assert join.wanted(job) == Places(6, (*TWO_HOSTS.hosts, HostSlots("c", 2)))


@pytest.mark.parametrize(
    ("hosts", "ranks", "pid", "says"),
    [
        (None, None, None, "Give the hosts that join, or -np"),
        ("c:0", None, None, "--hosts should be host:slots"),
        ("c:1", 6, None, "-np should be 1 to 5, the number of slots. Received: -np 6"),
        (None, 0, None, "-np should be 1 to 4"),
        (None, 4, None, "should get other ranks or hosts. Received: 4 ranks on a:2,b:2, as it has"),
        (None, 2, None, r"at least 3 ranks \(--min-np\). Received: 2"),
        ("c:1", None, 1, "--job should be the PID of an `hvpipe run` on this host. Received: 1; running: "),
    ],
)
def test_what_is_refused(job: Path, hosts: str | None, ranks: int | None, pid: int | None, says: str) -> None:
    with pytest.raises(HvpipeError, match=says):
        ask(hosts, ranks, pid)
    assert not (job / "stop").exists()


def test_more_ranks_than_a_slurm_allocation_has_are_refused(job: Path) -> None:
    """Regression: the job stopped, could not start, and went back to its old ranks."""
    join.register(job, Places(3), None, 1, 4)
    with pytest.raises(HvpipeError, match="-np should be at most 4, the number of tasks of the Slurm alloc"):
        ask(None, 5)
    assert not (job / "stop").exists()
    assert ask(None, 4) == 0


def test_a_host_that_cannot_be_reached_does_not_end_the_job(job: Path) -> None:
    with pytest.raises(HvpipeError, match=r"Received: far, which cannot be reached; the job goes on"):
        ask("far:2")
    assert not (job / "stop").exists()


def test_ranks_of_other_hosts_are_asked_if_none_is_here(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a job whose launcher has no rank could not grow."""
    asked = []
    monkeypatch.setattr(stop, "of_hosts", lambda *given: lambda: asked.append(given) or True)
    (job / "listening-0").unlink()
    assert ask("c:2") == 0
    assert asked == [(TWO_HOSTS.hosts, "agent", job, {})]
    assert join.wanted(job) == Places(6, (*TWO_HOSTS.hosts, HostSlots("c", 2)))


def test_jobs_that_cannot_go_on(job: Path) -> None:
    (job / "listening-0").write_text(str(2**22 + 1))  # more than any PID: the rank was killed
    with pytest.raises(HvpipeError, match=r"No rank of the job is in `fit` with hk.Checkpoint"):
        ask("c:1")
    assert join.wanted(job) is None
    copied = job.with_name(f"{PREFIX}killed")  # nobody holds its lock
    shutil.copytree(job, copied)
    (job / "running.json").unlink()
    with pytest.raises(HvpipeError, match=r"One `hvpipe run` should run .* Running: none"):
        ask("c:1")
    with pytest.raises(HvpipeError, match="The job runs on one host"):
        Places(2).with_more(parse_hosts("c:1"), None)


def test_folders_of_other_users_are_not_trusted(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: anybody could name the command that asks a host, or keep every job from starting."""
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(HvpipeError, match=r"One `hvpipe run` should run .* Running: none"):
        ask("c:1")
    pipe = job.with_name(f"{PREFIX}pipe")
    os.mkfifo(pipe)
    os.utime(pipe, (0, 0))
    os.utime(job, (0, 0))
    with new_job_folder():
        assert pipe.exists()
        assert job.exists()


def test_folders_that_killed_jobs_have_left_are_removed(job: Path) -> None:
    for name, age_s in (("killed", 2 * 24 * 3600), ("new", 0)):
        left = job.with_name(f"{PREFIX}{name}")
        left.mkdir()
        os.utime(left, (time.time() - age_s,) * 2)
    os.utime(job, (0, 0))  # runs for long
    with new_job_folder() as folder:
        found = {path.name for path in job.parent.iterdir()}
    assert found == {job.name, folder.name, f"{PREFIX}new"}
