"""A checkpoint is there whole or not at all, wherever writing is interrupted, and damage is noticed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint_files import RANKS, Alone, Died, dying_at, newest_step, snapshot, values, write
from hvpipe.checkpoints import folder as folders
from hvpipe.checkpoints import writer as writing
from hvpipe.checkpoints.arrays import read_arrays
from hvpipe.checkpoints.files import UnreadableError
from hvpipe.checkpoints.usable import newest_usable
from hvpipe.checkpoints.writer import Writer, WriterOptions
from hvpipe.errors import HvpipeError
from hvpipe.proc import boot_id


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert write(tmp_path, 7) == [None, None]
    found = newest_usable(tmp_path, Alone())
    assert found is not None
    place, manifest = found
    assert place.name == "0000000007-0000aa"
    assert (manifest.position.step, manifest.position.samples, manifest.ranks) == (7, 8 * 7 * RANKS, RANKS)
    for part in manifest.parts:
        read = read_arrays(place / part.file.name, part.names)
        for name, wanted in values(7, part.rank).items():
            np.testing.assert_array_equal(read[name], wanted)


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step, keep=2)
    assert [path.name[:10] for path in folders.complete(tmp_path)] == ["0000000004", "0000000003"]
    assert len(list(tmp_path.iterdir())) == 2


def test_an_unfinished_one_is_removed_once_a_later_one_is_complete(tmp_path: Path) -> None:
    (tmp_path / "0000000002-0000bb").mkdir()
    (tmp_path / "0000000009-0000bb").mkdir()
    write(tmp_path, 3)
    assert sorted(path.name[:10] for path in tmp_path.iterdir()) == ["0000000003", "0000000009"]


def die_while_writing(folder: Path, count: int, patch: pytest.MonkeyPatch) -> bool:
    """Write step 2 as rank 0 of one; return whether the process died."""
    writer = Writer(WriterOptions(folder, 0, 1, keep=1))
    with dying_at(count, patch):
        try:
            writer._run(snapshot(2, 0))
        except Died:
            return True
    return False


def test_death_at_any_file_operation_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop ends at the first operation that the writer does not reach."""
    seen = []
    for count in range(1, 200):
        folder = tmp_path / str(count)
        Writer(WriterOptions(folder, 0, 1)).wait()
        first = Writer(WriterOptions(folder, 0, 1))
        first.start(snapshot(1, 0))
        first.wait()
        died = die_while_writing(folder, count, monkeypatch)
        step = newest_step(folder)
        seen.append(step)
        again = Writer(WriterOptions(folder, 0, 1, keep=1))
        again.start(snapshot(3, 0, "0000bb"))
        assert again.wait() is None
        assert [path.name for path in folder.iterdir()] == ["0000000003-0000bb"]
        if not died:
            break
        shutil.rmtree(folder)
    else:
        raise AssertionError("the writer never ends")
    assert len(seen) > 20
    assert seen == sorted(seen)  # step 1 up to the manifest's rename, step 2 from there on
    assert set(seen) == {1, 2}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_falls_back_to_the_one_before(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Flipped bits, lost ends and missing files of the newest checkpoint."""
    folder = tmp_path_factory.mktemp("damage")
    write(folder, 1)
    write(folder, 2)
    newest = folders.complete(folder)[0]
    # rank-0.json and rank-1.json serve only while a checkpoint is written.
    file = newest / data.draw(st.sampled_from(["manifest.json", "rank-0.npz", "rank-1.npz"]))
    content = bytearray(file.read_bytes())
    how = data.draw(st.sampled_from(["flip", "cut", "remove", "replace"]))
    if how == "flip":
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif how == "replace":
        content = bytearray(data.draw(st.binary(max_size=60)))
    if how == "remove":
        file.unlink()
    else:
        file.write_bytes(content)
    assert newest_step(folder) == 1


def test_the_warning_names_file_and_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    with open(tmp_path / "0000000002-0000aa" / "rank-1.npz", "ab") as file:
        file.write(b"x")
    with caplog.at_level(logging.WARNING, "hvpipe"):
        assert newest_step(tmp_path) == 1
    (told,) = [record.getMessage() for record in caplog.records]
    assert "DAMAGED" in told
    assert "rank-1.npz has " in told
    assert "the one before it" in told
    assert (tmp_path / "0000000002-0000aa.damaged").is_dir()


def test_only_damaged_ones_are_an_error(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
        (tmp_path / f"{step:010d}-0000aa" / "rank-0.npz").write_bytes(b"")
    with pytest.raises(HvpipeError, match=r"all of them are damaged.*rank-0\.npz has 0 bytes"):
        newest_step(tmp_path)


def test_damaged_ones_stay_an_error_at_the_next_start(tmp_path: Path) -> None:
    """They were renamed at the start before, so that the job began anew without a word."""
    write(tmp_path, 1)
    (tmp_path / "0000000001-0000aa" / "rank-0.npz").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(HvpipeError, match=r"remove them.*Received: 0000000001-0000aa\.damaged"):
            newest_step(tmp_path)


def test_no_complete_one_is_a_fresh_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_step(tmp_path / "nowhere") is None
    (tmp_path / "0000000001-0000aa").mkdir()
    with caplog.at_level(logging.WARNING, "hvpipe"):
        assert newest_step(tmp_path) is None
    assert "has no complete checkpoint" in caplog.text


def test_a_rank_that_cannot_write_fails_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's disk is full: rank 0 gives up at once, the old checkpoint stays, and the next one works."""
    write(tmp_path, 1)
    real = writing.write_file

    def full(path: Path, write: Any) -> Any:
        if path.name.startswith("rank-1."):
            raise OSError(28, "No space left on device")
        return real(path, write)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_file", full)
        causes = write(tmp_path, 2)
    assert all("No space left on device" in str(cause) for cause in causes)
    assert newest_step(tmp_path) == 1
    assert write(tmp_path, 3) == [None, None]


def test_rank_0_does_not_wait_for_ever(tmp_path: Path) -> None:
    writer = Writer(WriterOptions(tmp_path, 0, 2, timeout_s=0.05))
    writer.start(snapshot(1, 0))
    assert "no rank-1.json" in str(writer.wait())


def test_rank_0_does_not_wait_for_a_lost_rank(tmp_path: Path) -> None:
    """A part that the lost rank had written counts."""
    writer = Writer(WriterOptions(tmp_path, 0, 2))
    writer.start(snapshot(1, 0))
    writer.lose([1])
    assert "rank 1 was lost before it had written its part" in str(writer.wait())
    other = Writer(WriterOptions(tmp_path, 1, 2))
    other.start(snapshot(2, 1))
    assert other.wait() is None
    writer.start(snapshot(2, 0))
    assert writer.wait() is None
    assert newest_step(tmp_path) == 2


def test_rank_0_does_not_wait_for_a_part_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it waited for its time limit, if the other rank could not even write that it had failed."""
    asked: list[int] = []
    writers = [
        Writer(WriterOptions(tmp_path, rank, 2, on_failure=lambda: asked.append(1))) for rank in range(2)
    ]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writers[0].start(snapshot(1, 0))
    writers[0].wait_for_part()
    monkeypatch.setattr("hvpipe.checkpoints.writer.write_file", full)
    monkeypatch.setattr(folders, "announce_part", full)
    writers[1].start(snapshot(1, 1))
    cause = writers[1].wait()
    assert cause is not None
    assert "No space left on device" in cause
    assert str(tmp_path) in cause  # which disk
    assert asked == [1]
    writers[0].share_failure(lambda mine: [mine, cause])
    assert str(writers[0].wait()) == f"rank 1: {cause}"
    monkeypatch.undo()
    for writer in writers[::-1]:
        writer.start(snapshot(2, writer._options.rank))
    assert [writer.wait() for writer in writers] == [None, None]
    assert newest_step(tmp_path) == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HvpipeError, match="needs a folder that can be written"):
        folders.check_folder(tmp_path / "file" / "run")


def test_two_processes_in_one_folder(tmp_path: Path) -> None:
    """Regression: two jobs mixed their checkpoints without a word."""
    code = "import sys, pathlib, hvpipe.checkpoints.folder as f; print(f.claim(pathlib.Path(sys.argv[1])))"

    def another() -> str:
        command = [sys.executable, "-c", code, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert another() == "locked\n"  # and its lock has ended with it
    assert [folders.claim(tmp_path), folders.claim(tmp_path)] == ["locked", "held"]
    assert another() == "taken\n"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert folders.holder(tmp_path) == (socket.gethostname(), str(os.getpid()), boot)


def test_a_lost_host_is_waited_for_also_if_another_has_its_name_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a pod that was made again on another machine gave up after 5 s."""
    for boot, limit in (("", "5"), (boot_id(), "5"), ("0-another-machine", "120")):
        (tmp_path / ".lock").write_text(f"{socket.gethostname()} 4242 {boot}")
        found = iter(["taken", "locked"])
        monkeypatch.setattr(folders, "claim", lambda folder, found=found: next(found))
        with caplog.at_level(logging.WARNING):
            folders.claim_or_refuse(tmp_path)
        assert f"Waiting {limit} s for its end" in caplog.messages[-1]


def test_a_second_job_in_one_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was only warned, and one of them lost its work. A job that ends refuses nobody."""
    monkeypatch.setattr(folders, "_ENDING_S", 0.2)
    monkeypatch.setattr(folders, "claim", lambda folder: "taken")
    (tmp_path / ".lock").write_text(f"{socket.gethostname()} 4242")
    with pytest.raises(HvpipeError, match=rf"process 4242 on {socket.gethostname()} writes checkpoints"):
        folders.claim_or_refuse(tmp_path)
    found = iter(["taken", "locked"])
    monkeypatch.setattr(folders, "claim", lambda folder: next(found))
    assert folders.claim_or_refuse(tmp_path) == "locked"


def test_an_error_of_any_kind_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the thread ended, and the checkpoint counted as written."""

    def no_memory(sink: object, values: object) -> None:
        raise MemoryError("no memory")

    writer = Writer(WriterOptions(tmp_path, 0, 1))
    with monkeypatch.context() as patch:
        patch.setattr("hvpipe.checkpoints.writer.write_arrays", no_memory)
        for step in (1, 2):  # the next one first removes what is left
            writer.start(snapshot(step, 0))
            assert writer.wait() == "MemoryError: no memory"
            assert [path.name[:10] for path in tmp_path.iterdir()] == [f"{step:010d}"]


def test_what_cannot_be_read_now_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one rank's network error had the newest checkpoint renamed, and training fell back."""
    write(tmp_path, 1)
    write(tmp_path, 2)

    def stale(path: Path, record: object) -> None:
        raise UnreadableError(f"{path} cannot be read: Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("hvpipe.checkpoints.usable.damage", stale)
        with pytest.raises(HvpipeError, match=r"Make it readable.*Received on rank 0: .*Stale file handle"):
            newest_step(tmp_path)
    assert newest_step(tmp_path) == 2


def test_a_manifest_of_another_version_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("hvpipe.checkpoints.manifest.VERSION", 2)
        write(tmp_path, 1)
    with pytest.raises(HvpipeError, match=r"should be of version 1.*Received: version=2"):
        newest_step(tmp_path)
    assert folders.complete(tmp_path)
