"""Plain TCP around a ring of hosts: bytes go round, and a lost process is an error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.rounds.job import RankJob
from bench.rounds.record import Task
from bench.rounds.watch import cpu_s
from bench.systems.single import ring_stream


def _job(folder: Path, rank: int, size: int) -> RankJob:
    return RankJob(Task("digits", batch=4), rank, size, {}, folder)


@pytest.mark.parametrize("size", [2, 3])
def test_each_step_waits_for_its_bytes(size: int, tmp_path: Path) -> None:
    def steps(rank: int) -> int:
        job = _job(tmp_path, rank, size)
        with ring_stream(job, 3_000_000) as sends:
            assert sends is not None
            stream, size_bytes = sends
            for _ in range(3):
                stream.begin(size_bytes)
                stream.wait()
            mine_s, with_stream_s = cpu_s(), cpu_s(job.watch.helper)
            assert with_stream_s > mine_s
            return size_bytes

    with ThreadPoolExecutor(size) as ranks:
        sent = list(ranks.map(steps, range(size)))
    assert sent == [round(2 * (size - 1) / size * 3_000_000)] * size


def test_a_stream_that_ends_early_is_an_error(tmp_path: Path) -> None:
    def lost(rank: int) -> None:
        with ring_stream(_job(tmp_path, rank, 2), 0) as sends:
            assert sends is not None
            sends[0].process.kill()
            with pytest.raises(RuntimeError, match="Received: status -9"):
                sends[0].wait()

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(lost, range(2)))
