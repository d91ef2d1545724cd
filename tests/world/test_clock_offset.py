"""Clocks that differ by hours, between threads that act as ranks."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest

from hvpipe.world import clock_offset

HOURS = 3600.0


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 17, 64])
def test_each_rank_finds_its_distance_by_asking_one_other(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    me = threading.local()
    boxes: dict[tuple[int, int], queue.Queue[float]] = defaultdict(queue.Queue)
    partners: dict[int, set[int]] = defaultdict(set)
    found: dict[int, float] = {}
    own_clock = SimpleNamespace(monotonic=lambda: time.monotonic() + me.rank * HOURS)
    monkeypatch.setattr(clock_offset, "time", own_clock)

    def run(rank: int) -> None:
        me.rank = rank

        def send(other: int, number: float, _what: str) -> None:
            partners[rank].add(other)
            boxes[rank, other].put(number)

        def receive(other: int, _what: str) -> float:
            return boxes[other, rank].get(timeout=60)

        found[rank] = clock_offset.clock_offset_s(rank, size, send, receive)

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert found == {rank: pytest.approx(-rank * HOURS, abs=60) for rank in range(size)}
    assert all(len(others) <= (size - 1).bit_length() for others in partners.values())
