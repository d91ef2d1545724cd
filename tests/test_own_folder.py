"""What other users put in hvpipe's way, folders, links and pipes, is not written, read or obeyed."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed import launch
from hvpipe.atomic_file import atomic_file, target_of
from hvpipe.blackbox import story
from hvpipe.checkpoints import folder as checkpoints
from hvpipe.checkpoints.files import FileRecord, UnreadableError, damage
from hvpipe.commands import join, launch_options, rank_output
from hvpipe.environment import job_folder
from hvpipe.environment.settings import Settings, strange_job_folder
from hvpipe.environment.settings import job_folder as job_folder_of
from hvpipe.errors import HvpipeError, LaunchError
from hvpipe.failures.flight_record import flight_path
from hvpipe.monitor import status_files
from hvpipe.own_folder import make_own, open_plain, read_own, read_plain, user_on
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.pipedream import read_graph
from hvpipe.trace.events import Trace
from hvpipe.world.world import SingleWorld

NOBODY = 65534
# A pipe that a test waits for ends it soon.
pytestmark = pytest.mark.timeout(180)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make what another user owns")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a folder like /tmp: anybody writes, and removes only what is his own."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def laid(folder: Path, victim: Path, *names: str) -> Path:
    """Make a folder of another user, with links to a file of this one under these names."""
    folder.mkdir()
    folder.chmod(0o777)
    for name in names:
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(victim)
    for path in [folder, *folder.rglob("*")]:
        os.lchown(path, NOBODY, NOBODY)
    return folder


def contents(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


# --- Folders ------------------------------------------------------------------------------------------------


@as_root
def test_a_job_folder_of_a_stranger_is_neither_written_nor_obeyed(shared: Path, victim: Path) -> None:
    """Regression: on other hosts anybody could make it first, with links to what should be overwritten."""
    names = ("stop", "aborting", "joined", "checkpoint", "checkpoints", "flight/rank-0.flight", "error-0")
    strange = laid(shared / "hvpipe-run-1", victim, *names, "listening-0", "wanted.json", "running.json")
    before = contents(strange)
    environ = {"HVPIPE_JOB_FOLDER": str(strange)}
    assert job_folder_of(environ) is None
    assert f"{strange} belongs to nobody (user {NOBODY}), not to root" in str(strange_job_folder(environ))
    assert not any(
        told(strange)
        for told in (
            *(job_folder.asked_to_stop, job_folder.any_aborts, job_folder.any_joined, job_folder.any_listens),
            *(job_folder.last_checkpoint, job_folder.told_by_rank, job_folder.read_end, job_folder.read_loss),
            join.wanted,
        )
    )
    with pytest.raises(PermissionError, match="belongs to nobody"):
        job_folder.ask_to_stop(strange)
    job_folder.tell_end(str(strange), None)
    job_folder.tell_error(strange, 0, "text", "more")
    job_folder.tell_joined(strange)
    job_folder.tell_checkpoint(strange, victim)
    job_folder.tell_checkpoints(strange, victim)
    with job_folder.listening(strange, 0):
        pass
    with pytest.raises(PermissionError, match="belongs to nobody"):
        make_own(strange)
    assert contents(strange) == before
    assert victim.read_text() == "precious"


@as_root
def test_ranks_go_on_without_the_job_folder_of_a_stranger(shared: Path, victim: Path) -> None:
    strange = laid(
        shared / "hvpipe-run-1", victim, "stop", "aborting", *(f"flight/rank-{i}.flight" for i in (0, 1))
    )
    before = contents(strange)
    script = shared / "script.py"
    script.write_text(
        "import hvpipe, numpy\n"
        "hvpipe.init()\nhvpipe.allreduce(numpy.ones(3, numpy.float32))\nhvpipe.shutdown()\n"
    )
    done = launch(2, [script], limit_s=60, env={"HVPIPE_JOB_FOLDER": str(strange)})
    assert done.returncode == 0, done.describe()
    says = f"HVPIPE_JOB_FOLDER is not used on .* Received: {strange} belongs to nobody"
    assert len([line for line in done.output.splitlines() if "HVPIPE_JOB_FOLDER" in line]) == 1, (
        done.describe()
    )
    assert re.search(says, done.output), done.describe()
    assert contents(strange) == before
    assert victim.read_text() == "precious"


@as_root
def test_what_counts_for_another_user_than_root() -> None:
    """Its own folders, and links of its own and of root."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # where that user may go
        top = Path(name)
        top.chmod(0o1777)
        (top / "of-root").mkdir()
        (top / "target").write_text("old")
        os.chown(top / "target", NOBODY, NOBODY)
        (top / "link").symlink_to(top / "target")
        (top / "link-of-a-stranger").symlink_to(top / "target")
        os.lchown(top / "link-of-a-stranger", NOBODY - 1, NOBODY - 1)
        os.seteuid(NOBODY)
        try:
            make_own(top / "mine")
            make_own(top / "mine")
            assert user_on(top / "mine") == NOBODY
            with pytest.raises(PermissionError, match=r"of-root belongs to root \(user 0\), not to nobody"):
                make_own(top / "of-root")
            assert job_folder_of({"HVPIPE_JOB_FOLDER": str(top / "mine")}) == top / "mine"
            for file in rank_output.open_files(top / "rank.0", append=False).values():
                os.close(file)
            with atomic_file(top / "link") as opened:
                opened.write(b"new")
            with pytest.raises(PermissionError, match="stranger is a symbolic link of user 65533"):
                target_of(top / "link-of-a-stranger")
        finally:
            os.seteuid(0)
        assert (top / "target").read_text() == "new"
        assert (top / "target").stat().st_uid == NOBODY


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_where_others_write_is_not_own(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=f"others can write to {folder} of"):
        make_own(folder)
    folder.chmod(0o755)
    make_own(folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(PermissionError, match=f"{link} is a symbolic link of .*, not a folder"):
        make_own(link)
    make_own(tmp_path / "new")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


@as_root
def test_live_status_is_not_written_through_links(
    shared: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a link to a folder of this user counted as this user's."""
    home = victim.with_name("home")
    home.mkdir()
    (shared / "hvpipe-0").symlink_to(home)
    monkeypatch.setattr(status_files, "status_root", lambda named: Path(named or shared / "hvpipe-0"))
    with pytest.raises(PermissionError, match="hvpipe-0 is a symbolic link of root"):
        status_files.StatusFolder(None, "a-1", 0)
    strange = laid(shared / f"{status_files.JOB_PREFIX}a-1", victim, "rank-0.json")
    with pytest.raises(PermissionError, match=f"{strange} belongs to nobody"):
        status_files.StatusFolder(str(shared), "a-1", 0)
    # What killed jobs have left is not removed through a link, nor in another user's folder.
    old = home / "rank-3.json"
    old.touch()
    (shared / f"{status_files.JOB_PREFIX}b-1").symlink_to(home)
    os.utime(old, (0, 0))
    status_files.StatusFolder(str(shared), "c-1", 0)
    assert old.exists()
    assert contents(home) == ["rank-3.json"]
    assert victim.read_text() == "precious"


@as_root
def test_recorders_and_outputs_are_not_written_through_links(
    shared: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvpipe.failures.flight_record.time.strftime", lambda _: "now")
    monkeypatch.setattr("hvpipe.failures.flight_record.os.urandom", bytes)
    strange = laid(shared / f"now-{bytes(8).hex()}", victim, "rank-0.flight")
    settings = Settings(flight_folder=str(shared))
    with pytest.raises(HvpipeError, match=f"every rank can write.*{strange} belongs to nobody"):
        flight_path(settings, SingleWorld())
    outputs = laid(shared / "rank.0", victim, "stdout")
    with pytest.raises(PermissionError, match=f"{outputs} belongs to nobody"):
        rank_output.open_files(outputs, append=False)
    mine = shared / "rank.1"
    mine.mkdir()
    mine.chmod(0o777)
    (mine / "stdout").symlink_to(victim)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        rank_output.open_files(mine, append=False)
    (mine / "stdout").unlink()
    os.mkfifo(mine / "stdout")
    with pytest.raises(OSError, match="No such device or address"):  # nobody reads it
        rank_output.open_files(mine, append=False)
    (mine / "stdout").unlink()
    (mine / "stdout").touch()
    os.chown(mine / "stdout", NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="stdout of nobody"):
        rank_output.open_files(mine, append=False)
    assert victim.read_text() == "precious"


@as_root
def test_a_file_is_not_written_through_the_link_of_a_stranger(shared: Path, victim: Path) -> None:
    link = shared / "trace.json"
    link.symlink_to(victim)
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=r"trace.json is a symbolic link of nobody"), atomic_file(link):
        pass
    with pytest.raises(LaunchError, match=r"--trace should be a file .*symbolic link of nobody"):
        launch_options.output_path("--trace", str(link))
    mine = shared / "mine.json"
    mine.symlink_to(link)  # a link to his link
    with pytest.raises(PermissionError, match=r"trace.json is a symbolic link of nobody"), atomic_file(mine):
        pass
    link.unlink()
    os.mkfifo(link)
    os.chown(link, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=r"trace.json is a named pipe of nobody"), atomic_file(mine):
        pass
    link.unlink()
    link.touch(0o666)
    link.chmod(0o4777)
    os.chown(link, NOBODY, NOBODY)
    with atomic_file(link) as file:
        file.write(b"new")
    assert link.stat().st_uid == 0
    assert stat.S_IMODE(link.stat().st_mode) & 0o7022 == 0, "it has the permissions that a stranger gave"
    assert victim.read_text() == "precious"


@as_root
def test_a_checkpoint_is_not_written_where_a_stranger_waits(
    shared: Path, victim: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strange = laid(shared / "0000000005-0000aa", victim, "rank-0.npz")
    with pytest.raises(PermissionError, match=f"{strange} belongs to nobody"):
        checkpoints.begin(shared, 5, "0000aa")
    strange.rename(shared / "private")
    for folder, says in ((shared, "root (user 0): drwxrwxrwt"), (shared / "private", "nobody (user 65534)")):
        caplog.clear()
        checkpoints.check_folder(folder)
        assert f"other users can change the checkpoints in {folder}, which belongs to {says}" in caplog.text
    caplog.clear()
    checkpoints.check_folder(victim.with_name("new"))
    assert not caplog.text
    (shared / ".lock").symlink_to(victim)
    assert checkpoints.claim(shared) == "unknown"
    assert victim.read_text() == "precious"


@as_root
def test_a_loss_that_a_stranger_tells_does_not_count(shared: Path) -> None:
    """Ranks of other hosts tell it beside the checkpoints, where others may write."""
    job = shared / "hvpipe-run-1"
    make_own(job)
    job_folder.tell_checkpoints(job, shared)
    told = shared / "lost-hvpipe-run-1.json"
    told.write_text(json.dumps({"ranks": [0], "step": 3}))
    os.chown(told, NOBODY, NOBODY)
    assert job_folder.read_loss(job) is None
    os.chown(told, 0, 0)
    assert job_folder.read_loss(job) == job_folder.Loss((0,), 3)
    assert not told.exists()


@as_root
def test_jobs_of_strangers_are_not_joined(
    shared: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    laid(shared / f"{job_folder.PREFIX}1", victim, "running.json", "listening-0")
    with pytest.raises(HvpipeError, match=r"One `hvpipe run` should run .* Running: none"):
        join.run(argparse.Namespace(hosts="c:1", ranks=None, job=None), {})


# --- Files --------------------------------------------------------------------------------------------------


def test_only_plain_files_of_this_user_count(tmp_path: Path) -> None:
    path = tmp_path / "told"
    path.write_text("text")
    assert read_own(path, 10) == b"text"
    assert read_own(path, 3) is None
    link = tmp_path / "link"
    link.symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for odd in (link, tmp_path / "pipe", tmp_path, tmp_path / "missing"):
        assert read_own(odd, 10) is None


def _blackbox(path: Path) -> object:
    path.with_suffix(".flight").unlink(missing_ok=True)
    os.symlink(path, path.with_suffix(".flight"))
    (problem,) = story.read_records(path.parent).problems
    raise HvpipeError(problem)


READERS: dict[str, Callable[[Path], object]] = {
    "plan": Plan.read,
    "trace": Trace.read,
    "pipedream": lambda path: read_graph(path, 1.0),
    "blackbox": _blackbox,
    "hostfile": lambda path: launch_options._hosts(argparse.Namespace(hosts=None, hostfile=str(path))),
    "checkpoint": lambda path: damage(path.parent, FileRecord(path.name, 0, "")),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_or_device_holds_nobody_up(name: str, tmp_path: Path) -> None:
    """Regression: `hvpipe blackbox`, and all that read a file, waited for ever for somebody to write."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises((HvpipeError, UnreadableError), match="a named pipe instead of a plain file"):
        READERS[name](path)
    path.unlink()
    path.symlink_to("/dev/zero")  # never ends
    with pytest.raises((HvpipeError, UnreadableError), match="a device instead of a plain file"):
        READERS[name](path)


def test_what_a_shell_hands_over_is_read(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"text")
    os.close(writing)
    assert read_plain(f"/dev/fd/{reading}", 100) == b"text"
    os.close(reading)
    with pytest.raises(IsADirectoryError):
        open_plain(tmp_path)


def test_a_small_file_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.json.gz"
    with gzip.open(trace, "wb", 1) as file:
        file.write(bytes(1 << 20))
    assert trace.stat().st_size < 1 << 14
    assert (sys.modules["hvpipe.trace.events"]._MOST_BYTES, status_files._MOST_BYTES) == (1 << 30, 64 << 20)
    monkeypatch.setattr(sys.modules["hvpipe.trace.events"], "_MOST_BYTES", 1 << 16)
    with pytest.raises(HvpipeError, match="more than 65,536 bytes"):
        Trace.read(trace)
    plan = tmp_path / "plan.json"
    with plan.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(HvpipeError, match="more than 268,435,456 bytes"):
        Plan.read(plan)
    jobs = status_files.StatusFolder(str(tmp_path), "a-1", 0)
    now_s = time.time()
    jobs.write(status_files.RankStatus("a-1", "train.py", 0, 1, "here", now_s, now_s))
    os.mkfifo(tmp_path / f"{status_files.JOB_PREFIX}a-1" / "rank-1.json")
    assert len(status_files.read_jobs(tmp_path)) == 1
    monkeypatch.setattr(status_files, "_MOST_BYTES", 10)
    assert not status_files.read_jobs(tmp_path)
    plan.rename(tmp_path / "rank-0.flight")
    assert "more than" in story.read_records(tmp_path).problems[0]
