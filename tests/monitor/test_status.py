"""Status of running ranks: files, datagrams, and the reporter that writes and sends them."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hvpipe.comm.settings import Settings
from hvpipe.comm.world import SingleWorld
from hvpipe.monitor import status_datagrams, status_files
from hvpipe.monitor.status_datagrams import ReceiverAddress, StatusReceiver, StatusSender, near_addresses
from hvpipe.monitor.status_files import JOB_PREFIX, RankStatus, StatusFolder, read_jobs
from hvpipe.monitor.status_reporter import TrainingProgress, open_status_reporter
from hvpipe.trace.sample import GpuReading, Sample

NOW = RankStatus("a-1", "train.py", 0, 2, "a", at_s=1000.0, began_s=900.0, steps=7, step_s=0.5)


def test_files_are_read_as_written(tmp_path: Path) -> None:
    folders = [StatusFolder(str(tmp_path), "a-1", rank) for rank in (0, 1)]
    for rank, folder in enumerate(folders):
        folder.write(replace(NOW, rank=rank))
    (job,) = read_jobs(tmp_path, now_s=1001.0)
    assert (job.name, job.ranks) == ("a-1", (NOW, replace(NOW, rank=1)))
    assert read_jobs(tmp_path, now_s=1000.0 + status_files.GONE_S) == []
    folders[0].close(with_others=True)
    folders[1].close(with_others=False)
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_other_hosts_are_in_one_file_and_the_newest_status_counts(tmp_path: Path) -> None:
    folder = StatusFolder(str(tmp_path), "a-1", 0)
    folder.write(NOW)
    far = replace(NOW, rank=1, host="b", at_s=1002.0)
    folder.write_others([replace(NOW, at_s=999.0, steps=1), far])
    (job,) = read_jobs(tmp_path, now_s=1003.0)
    assert job.ranks == (NOW, far)
    folder.close(with_others=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_hosts_of_a_shared_folder_have_other_clocks(ahead_s: float, tmp_path: Path) -> None:
    """Regression: ranks of a host whose clock was behind were gone, and others never fell silent."""
    there_s = time.time() + ahead_s
    folder = StatusFolder(str(tmp_path), "a-1", 0)
    there = replace(NOW, at_s=there_s, began_s=there_s - 60)
    folder.write(there)
    StatusFolder(str(tmp_path), "a-1", 1).write(replace(there, rank=1, at_s=there_s + 3600))
    folder.write_others([replace(there, rank=2, at_s=there_s - 10)])
    (job,) = read_jobs(tmp_path)
    assert [time.time() - one.at_s for one in job.ranks] == pytest.approx([0, 0, 10], abs=5)
    assert time.time() - job.began_s == pytest.approx(60, abs=5)
    for path in tmp_path.rglob("*.json"):
        os.utime(path, (time.time() - status_files.GONE_S - 5,) * 2)
    assert read_jobs(tmp_path) == []


def test_a_folder_that_only_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StatusFolder(str(tmp_path), "a-1", 0).write(replace(NOW, at_s=time.time()))

    def refused(**_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(status_files.tempfile, "TemporaryFile", refused)
    assert len(read_jobs(tmp_path)) == 1


def test_the_newest_job_is_first(tmp_path: Path) -> None:
    for name, began_s in (("old", 1.0), ("new", 2.0)):
        StatusFolder(str(tmp_path), name, 0).write(replace(NOW, job=name, began_s=began_s))
    assert [job.name for job in read_jobs(tmp_path, now_s=1000.0)] == ["new", "old"]
    assert read_jobs(tmp_path / "absent") == []


def test_text_cannot_command_a_terminal(tmp_path: Path) -> None:
    StatusFolder(str(tmp_path), "a-1", 0).write(replace(NOW, host="a\x1b[2J"))
    (job,) = read_jobs(tmp_path, now_s=1001.0)
    assert job.ranks[0].host == "a?[2J"


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[1]", "null", '{"x": 1}', json.dumps({"rank": 0})),
        *(json.dumps({**NOW.to_json(), **odd}) for odd in ({"rank": "0"}, {"began_s": math.nan})),
        json.dumps({**NOW.to_json(), "at_s": 10**400}),
    ],
)
def test_files_that_no_rank_wrote_are_skipped(text: str, tmp_path: Path) -> None:
    StatusFolder(str(tmp_path), "a-1", 0).write(NOW)
    (tmp_path / f"{JOB_PREFIX}a-1" / "rank-1.json").write_text(text)
    (job,) = read_jobs(tmp_path, now_s=1000.0)
    assert job.ranks == (NOW,)


def test_files_of_a_killed_job_are_removed_and_nothing_else(tmp_path: Path) -> None:
    StatusFolder(str(tmp_path), "killed", 0).write(NOW)
    old = [tmp_path / f"{JOB_PREFIX}killed" / "rank-0.json", tmp_path / "photos" / "rank-0.json"]
    old[1].parent.mkdir()
    old[1].write_text("mine")
    old.append(old[0].with_name(".rank-1.json.123.partial"))  # killed while it wrote
    old[2].touch()
    for path in old:
        os.utime(path, (1.0, 1.0))
    StatusFolder(str(tmp_path), "next", 0).write(NOW)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{JOB_PREFIX}next", "photos"]
    assert old[1].read_text() == "mine"


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_files, "status_root", lambda _: tmp_path)
    monkeypatch.setattr(status_files.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError):
        StatusFolder(None, "a-1", 0)


def collected(receiver: StatusReceiver, count: int) -> list[RankStatus]:
    deadline_s = time.monotonic() + 30
    while len(found := receiver.collect()) < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return found


def test_datagrams_reach_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_datagrams, "interface_addresses", lambda: [("127.0.0.1", "255.0.0.0")])
    receiver = StatusReceiver(range(21_000, 21_100))
    assert 21_000 <= receiver.address.port < 21_100
    stranger = StatusSender(replace(receiver.address, token="guessed"))
    stranger.send(replace(NOW, rank=5))
    sender = StatusSender(receiver.address)
    for rank, steps in ((1, 8), (2, 8), (1, 9)):
        sender.send(replace(NOW, rank=rank, steps=steps))
    heard = {one.rank: one for one in collected(receiver, 2)}
    assert {rank: one.steps for rank, one in heard.items()} == {1: 9, 2: 8}
    assert all(abs(one.at_s - time.time()) < 60 for one in heard.values())  # in the clock of this host
    for end in (stranger, sender, receiver):
        end.close()


def test_public_addresses_are_not_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, outside = ("127.0.0.1", "255.0.0.0"), ("8.8.8.8", "255.255.255.0")
    monkeypatch.setattr(status_datagrams, "interface_addresses", lambda: [outside, inside])
    receiver = StatusReceiver()
    assert receiver.address.addresses == (inside,)
    receiver.close()
    monkeypatch.setattr(status_datagrams, "interface_addresses", lambda: [outside])
    with pytest.raises(OSError, match="no address inside a private network"):
        StatusReceiver()


def test_sending_without_a_receiver_is_no_error() -> None:
    sender = StatusSender(ReceiverAddress((("127.0.0.1", "255.0.0.0"),), 9, "token"))
    for _ in range(3):
        sender.send(NOW)
    sender.close()


def test_addresses_in_a_common_network_are_preferred() -> None:
    theirs = [("192.168.1.5", "255.255.255.0"), ("10.1.2.3", "255.255.0.0")]
    assert near_addresses(theirs, [("10.1.9.9", "255.255.0.0")]) == ["10.1.2.3"]
    assert near_addresses(theirs, [("172.16.0.1", "255.255.0.0")]) == ["192.168.1.5", "10.1.2.3"]


def sample(time_s: float, cores: float = 0.9) -> Sample:
    return Sample(time_s, cores, 0.5, 1_000, GpuReading(share=0.8, memory_bytes=5, power_w=300.0))


def test_a_report_is_written_twice_a_second(tmp_path: Path) -> None:
    done = [TrainingProgress(3, (0.4, 0.2, 0.3), 96.0, 1_000.0), TrainingProgress(5, (0.2,), 160.0, 3_000.0)]
    report = open_status_reporter(
        SingleWorld(), Settings(live=True, live_folder=str(tmp_path)), lambda: done[0]
    )
    assert report is not None
    report.publish(sample(10.0))
    (job,) = read_jobs(tmp_path)
    (first,) = job.ranks
    assert (first.steps, first.step_s, first.images_per_s, first.gpu_power_w) == (3, 0.3, None, 300.0)
    del done[0]
    report.publish(sample(10.4, cores=0.0))
    assert read_jobs(tmp_path)[0].ranks == (first,)  # too soon
    report.publish(sample(12.0))
    (second,) = read_jobs(tmp_path)[0].ranks
    assert (second.steps, second.images_per_s, second.sent_bytes_per_s) == (5, 32.0, 1_000.0)
    assert second.process_cores == 0.45  # the mean since the last report
    report.close()
    assert list(tmp_path.iterdir()) == []


def test_reporting_is_off_if_not_requested(tmp_path: Path) -> None:
    settings = Settings(live=False, live_folder=str(tmp_path))
    assert open_status_reporter(SingleWorld(), settings, lambda: TrainingProgress(0, (), 0.0, 0.0)) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    settings = Settings(live=True, live_folder=str(file))
    report = open_status_reporter(SingleWorld(), settings, lambda: TrainingProgress(1, (1.0,), 1.0, 1.0))
    assert report is not None
    report.publish(sample(1.0))
    report.close()
