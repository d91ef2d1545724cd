"""Status of running ranks: their files, and the reporter that writes them and tells rank 0."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hvpipe.engine.engine import EngineClient
from hvpipe.environment.settings import Settings
from hvpipe.monitor import status_files
from hvpipe.monitor.status_files import JOB_PREFIX, RankStatus, StatusFolder, read_jobs
from hvpipe.monitor.status_reporter import (
    JobInfo,
    StatusReporter,
    TrainingProgress,
    open_status_reporter,
)
from hvpipe.trace.sample import GpuReading, Sample
from hvpipe.world.world import SingleWorld

NOW = RankStatus("a-1", "train.py", 0, 2, "a", at_s=1000.0, began_s=900.0, steps=7, step_s=0.5)


def timeless(*ranks: RankStatus) -> list[RankStatus]:
    """Return statuses without their times, which tests of other things leave open."""
    return [replace(one, at_s=0.0, began_s=0.0) for one in ranks]


def test_files_are_read_as_written(tmp_path: Path) -> None:
    folders = [StatusFolder(str(tmp_path), "a-1", rank) for rank in (0, 1)]
    for rank, folder in enumerate(folders):
        folder.write(replace(NOW, rank=rank))
    (job,) = read_jobs(tmp_path)
    assert (job.name, timeless(*job.ranks)) == ("a-1", timeless(NOW, replace(NOW, rank=1)))
    for folder in folders:
        folder.close()
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_other_hosts_are_in_rank_0s_file_and_the_newest_status_counts(tmp_path: Path) -> None:
    folders = [StatusFolder(str(tmp_path), "a-1", rank) for rank in (0, 1)]
    far = [replace(NOW, rank=rank, host="b", at_s=990.0, steps=1) for rank in (1, 2)]
    folders[0].write(NOW, far)
    folders[1].write(replace(far[0], steps=2))  # a folder of both hosts
    (job,) = read_jobs(tmp_path)
    assert [(one.rank, one.steps) for one in job.ranks] == [(0, 7), (1, 2), (2, 1)]
    for folder in folders:
        folder.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_hosts_of_a_shared_folder_have_other_clocks(ahead_s: float, tmp_path: Path) -> None:
    """Regression: ranks of a host whose clock was behind were gone, and others never fell silent."""
    there_s = time.time() + ahead_s
    there = replace(NOW, at_s=there_s, began_s=there_s - 60)
    StatusFolder(str(tmp_path), "a-1", 0).write(there, [replace(there, rank=2, at_s=there_s - 10)])
    later = replace(there, rank=1, at_s=there_s + 3600, began_s=there_s + 3540)
    StatusFolder(str(tmp_path), "a-1", 1).write(later)
    (job,) = read_jobs(tmp_path)
    assert [time.time() - one.at_s for one in job.ranks] == pytest.approx([0, 0, 10], abs=5)
    assert time.time() - job.began_s == pytest.approx(60, abs=5)
    for path in tmp_path.rglob("*.json"):
        os.utime(path, (time.time() - status_files.GONE_S - 5,) * 2)
    assert read_jobs(tmp_path) == []


def test_a_folder_that_only_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StatusFolder(str(tmp_path), "a-1", 0).write(NOW)

    def refused(**_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(status_files.tempfile, "TemporaryFile", refused)
    assert len(read_jobs(tmp_path)) == 1


def test_the_newest_job_is_first(tmp_path: Path) -> None:
    for name, began_s in (("new", 950.0), ("old", 900.0)):
        StatusFolder(str(tmp_path), name, 0).write(replace(NOW, job=name, began_s=began_s))
    assert [job.name for job in read_jobs(tmp_path)] == ["new", "old"]
    assert read_jobs(tmp_path / "absent") == []


def test_text_cannot_command_a_terminal(tmp_path: Path) -> None:
    StatusFolder(str(tmp_path), "a-1", 0).write(replace(NOW, host="a\x1b[2J"))
    (job,) = read_jobs(tmp_path)
    assert job.ranks[0].host == "a?[2J"


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[1]", "null", '[{"x": 1}]', json.dumps([{"rank": 0}]), json.dumps(NOW.to_json())),
        *(json.dumps([{**NOW.to_json(), **odd}]) for odd in ({"rank": "0"}, {"began_s": math.nan})),
        json.dumps([{**NOW.to_json(), "at_s": 10**400}]),
    ],
)
def test_files_that_no_rank_wrote_are_skipped(text: str, tmp_path: Path) -> None:
    StatusFolder(str(tmp_path), "a-1", 0).write(NOW)
    (tmp_path / f"{JOB_PREFIX}a-1" / "rank-1.json").write_text(text)
    (job,) = read_jobs(tmp_path)
    assert timeless(*job.ranks) == timeless(NOW)


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
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match=f"{tmp_path} belongs to"):
        StatusFolder(None, "a-1", 0)


class EngineOnHost(EngineClient):
    """An engine that keeps what its rank tells rank 0, and hands over what others have told."""

    def __init__(self, host: str = "a", rank: int = 0) -> None:
        world = SingleWorld()
        world.host, world.rank = host, rank
        super().__init__(world, Settings())
        self.told: list[str] = []
        self.heard: list[bytes] = []

    def tell_rank_0(self, status: str) -> None:
        self.told.append(status)

    def take_statuses(self) -> list[bytes]:
        heard, self.heard = self.heard, []
        return heard


ONE_STEP = TrainingProgress(1, (1.0,), 1.0, 1.0)


def sample(time_s: float, cores: float = 0.9) -> Sample:
    return Sample(time_s, cores, 0.5, 1_000, GpuReading(share=0.8, memory_bytes=5, power_w=300.0))


def test_a_report_is_written_twice_a_second(tmp_path: Path) -> None:
    done = [TrainingProgress(3, (0.4, 0.2, 0.3), 96.0, 1_000.0), TrainingProgress(5, (0.2,), 160.0, 3_000.0)]
    report = open_status_reporter(
        EngineOnHost(), Settings(live=True, live_folder=str(tmp_path)), lambda: done[0]
    )
    assert report is not None
    report.publish(sample(10.0))
    (job,) = read_jobs(tmp_path)
    (first,) = job.ranks
    assert (first.steps, first.step_s, first.images_per_s, first.gpu_power_w) == (3, 0.3, None, 300.0)
    del done[0]
    report.publish(sample(10.4, cores=0.0))
    assert timeless(*read_jobs(tmp_path)[0].ranks) == timeless(first)  # too soon
    report.publish(sample(12.0))
    (second,) = read_jobs(tmp_path)[0].ranks
    assert (second.steps, second.images_per_s, second.sent_bytes_per_s) == (5, 32.0, 1_000.0)
    assert second.process_cores == 0.45  # the mean since the last report
    report.close()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_of_another_host_tells_rank_0_which_writes_it(tmp_path: Path) -> None:
    here, there = EngineOnHost("a"), EngineOnHost("b", rank=1)
    job = JobInfo("a-1", "train.py", "a")
    reports = [
        StatusReporter(engine, job, str(tmp_path / engine.world.host), lambda: ONE_STEP)
        for engine in (here, there)
    ]
    for report in reversed(reports):
        report.publish(sample(10.0))
    assert here.told == []
    (told,) = there.told
    here.heard = [b"{", b"\xff", b"[]", told.encode()]
    reports[0].publish(sample(11.0))
    reports[0].publish(sample(12.0))
    (found,) = read_jobs(tmp_path / "a")
    assert [(one.rank, one.host, one.steps) for one in found.ranks] == [(0, "a", 1), (1, "b", 1)]
    assert found.ranks[0].at_s >= found.ranks[1].at_s
    assert found.ranks[0].began_s == found.ranks[1].began_s


def test_reporting_is_off_if_not_requested(tmp_path: Path) -> None:
    settings = Settings(live=False, live_folder=str(tmp_path))
    assert open_status_reporter(EngineOnHost(), settings, lambda: ONE_STEP) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    report = open_status_reporter(
        EngineOnHost(), Settings(live=True, live_folder=str(file)), lambda: ONE_STEP
    )
    assert report is not None
    report.publish(sample(1.0))
    report.close()
