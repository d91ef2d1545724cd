"""`hvpipe stop`: which ranks it asks, how long it waits, and how `hvpipe run` asks on other hosts."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hvpipe.commands import lost_hosts, stop
from hvpipe.commands.hosts import HostSlots
from hvpipe.environment import job_folder
from hvpipe.environment.job_folder import (
    asked_to_stop,
    away_folder,
    listening_away,
    new_job_folder,
    tell_joined,
)
from hvpipe.errors import HvpipeError

JOB = "/tmp/hvpipe-run-elsewhere"


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextmanager
def rank_elsewhere(
    tmp_path: Path, then: str = "", starter: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Run a rank whose job folder is on another host. It ends when asked, after the code `then`."""
    code = (
        "import sys, time; from hvpipe.environment.job_folder import *\n"
        f"with listening_away({JOB!r}, 3):\n"
        "    print('ready', flush=True)\n"
        f"    while not asked_to_stop(away_folder({JOB!r})): time.sleep(0.01)\n{then}"
    )
    command = [*starter, sys.executable, "-c", code]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def ask(job: str | None = None, wait: float | None = None) -> int:
    return stop.run(argparse.Namespace(job=job, wait=wait), {})


@pytest.mark.parametrize("job", [None, JOB, Path(JOB).name])
def test_a_rank_whose_job_folder_is_on_another_host_is_asked(job: str | None, tmp_path: Path) -> None:
    with rank_elsewhere(tmp_path) as process:
        assert ask(job, wait=30.0) == 0
        assert process.wait(10) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_rank_on_the_launchers_host_is_asked(tmp_path: Path) -> None:
    with new_job_folder() as folder, job_folder.listening(folder, 0):
        assert ask() == 0
        assert asked_to_stop(folder)


@pytest.mark.parametrize("job", ["hvpipe-run-other", "", ".."])
def test_only_the_job_that_is_named_is_asked(job: str, tmp_path: Path) -> None:
    with rank_elsewhere(tmp_path) as process:
        with pytest.raises(HvpipeError, match=rf"No rank of yours on this host .*Received: --job {job}"):
            ask(job)
        assert process.poll() is None


def test_nobody_listens() -> None:
    with pytest.raises(HvpipeError, match="No rank of yours on this host is in `fit`"):
        ask()


def test_the_daemon_of_mpi_is_awaited_too(tmp_path: Path) -> None:
    """Regression: the host went before the launcher knew the exit codes, and the job ended with 255."""
    daemon = tmp_path / "prted"
    daemon.write_text('#!/bin/sh\n"$@"\nsleep 1\ntouch "$0-has-ended"\n')
    daemon.chmod(0o755)
    with rank_elsewhere(tmp_path, starter=[str(daemon)]):
        assert ask(wait=30.0) == 0
        assert (tmp_path / "prted-has-ended").exists()


def test_a_rank_that_does_not_end_in_time(tmp_path: Path) -> None:
    with (
        rank_elsewhere(tmp_path, "time.sleep(60)") as process,
        pytest.raises(HvpipeError, match=rf"After --wait 0.5 seconds.*\[{process.pid}\]"),
    ):
        ask(wait=0.5)


@pytest.mark.parametrize("wait", [-1.0, float("nan"), float("inf")])
def test_a_strange_wait(wait: float) -> None:
    with pytest.raises(HvpipeError, match=rf"--wait should be a number of seconds. Received: --wait {wait}"):
        ask(wait=wait)


def test_a_folder_that_another_rank_listens_in_stays(tmp_path: Path) -> None:
    with listening_away(JOB, 0):
        with listening_away(JOB, 1):
            pass
        assert ask(JOB) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_somebody_has_removed() -> None:
    """Regression: of two ranks that ended together, one failed."""
    with listening_away(JOB, 0):
        shutil.rmtree(away_folder(JOB))


def test_ranks_of_other_hosts_are_asked_by_the_agent(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\necho "$1" >> "$0.hosts"; shift; exec sh -c "$*"\n')
    agent.chmod(0o755)
    hosts = (HostSlots("a.example", 2), HostSlots("b.example", 2))
    ask_hosts = stop.of_hosts(hosts, str(agent), Path(JOB), {"PYTHONPATH": "/a b"})
    assert ask_hosts is not None
    assert not ask_hosts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))
        with rank_elsewhere(tmp_path) as process:
            assert ask_hosts()
            assert process.wait(10) == 0
    assert sorted((tmp_path / "agent.hosts").read_text().split()) == ["a.example"] * 2 + ["b.example"] * 2


def test_no_other_host_is_asked_if_ranks_are_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lost_hosts, "on_hosts", lambda *_: pytest.fail("asked"))
    tell_joined(tmp_path)
    ask_hosts = stop.of_hosts((HostSlots("a.example", 1),), None, tmp_path, {})
    assert ask_hosts is not None
    assert not ask_hosts()
    assert stop.of_hosts((), None, tmp_path, {}) is None


@pytest.mark.parametrize(("code", "asked"), [(0, True), (1, False), (124, True), (127, False)])
def test_a_host_that_cannot_be_asked_is_named(
    code: int,
    asked: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After 124 the host may still ask its ranks."""
    monkeypatch.setattr(lost_hosts, "on_hosts", lambda *_: {"a.example": code})
    ask_hosts = stop.of_hosts((HostSlots("a.example", 1),), None, tmp_path, {})
    assert ask_hosts is not None
    assert ask_hosts() == asked
    assert (
        f"a.example may not write a checkpoint: `hvpipe stop` there, by ssh, ended with exit code {code}"
        in capsys.readouterr().err
    ) == (code > 1)
