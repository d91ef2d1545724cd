"""Ranks of a round meet through files in the folder they share."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bench.rounds import job
from bench.rounds.job import RankJob
from bench.rounds.record import Task


def of_rank(rank: int, directory: Path) -> RankJob:
    return RankJob(Task("digits", 8), rank, 2, {}, directory)


def test_ranks_wait_for_each_other(tmp_path: Path) -> None:
    came: list[str] = []

    def second() -> None:
        came.append("second")
        of_rank(1, tmp_path).meet("built")

    starts = threading.Timer(0.1, second)
    starts.start()
    of_rank(0, tmp_path).meet("built")
    came.append("both")
    starts.join()
    assert came == ["second", "both"]


def test_ranks_are_found_by_listing_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared file system may cache for long that a file is missing, but it lists a folder anew."""
    monkeypatch.setattr(Path, "exists", lambda self: False)
    (tmp_path / "built-1").touch()
    of_rank(0, tmp_path).meet("built")


def test_a_rank_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_MEET_S", 0.05)
    with pytest.raises(TimeoutError, match=r"within 0.05 s. Received: no built-1"):
        of_rank(0, tmp_path).meet("built")
