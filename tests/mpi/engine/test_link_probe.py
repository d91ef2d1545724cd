"""Measured links between ranks of one host: one for each pair, equal on all ranks, and plausible."""

from __future__ import annotations

import time
from itertools import combinations

import pytest

import hvpipe
from hvpipe.engine.link_probe import _repeated, measure_links
from hvpipe.errors import HvpipeError
from hvpipe.session import current


def test_every_pair_has_a_link_that_all_ranks_know() -> None:
    engine = current().engine
    links = measure_links(engine, sizes_bytes=(1, 10_000, 1_000_000), repeats=3)
    assert sorted(links) == list(combinations(range(hvpipe.size()), 2))
    assert all(found == links for found in engine.allgather_object(links, "test"))


def test_selected_pairs() -> None:
    pairs = [(0, rank) for rank in range(1, hvpipe.size()) if rank != 2]
    assert sorted(measure_links(current().engine, sizes_bytes=(1, 1000), repeats=1, pairs=pairs)) == pairs
    with pytest.raises(HvpipeError, match=r"0 <= a < b < .*Received: \[\(1, 0\)\]"):
        measure_links(current().engine, pairs=[(1, 0)])


def test_links_are_measured_while_ranks_compute() -> None:
    calls = [0]

    def compute() -> None:
        calls[0] += 1
        time.sleep(0.001)

    pairs = list(combinations(range(hvpipe.size()), 2))[:1]
    measure_links(current().engine, sizes_bytes=(1, 1000), repeats=1, pairs=pairs, computing=compute)
    assert (calls[0] > 0) == any(hvpipe.rank() in pair for pair in pairs)
    ended_at = calls[0]
    time.sleep(0.05)
    assert calls[0] == ended_at


def test_an_error_of_the_computation_is_raised() -> None:
    """Regression: the computing thread ended, and the link was measured as if nothing computed beside it."""
    with pytest.raises(ZeroDivisionError), _repeated(lambda: 1 / 0):
        time.sleep(0.01)


def test_a_link_within_a_machine_moves_a_megabyte_in_less_than_a_second() -> None:
    """The upper bounds are generous, because other work may take most of the host."""
    for link in measure_links(current().engine).values():
        assert 1e-7 < link.time_s(1) < 1.0
        assert 1e-5 < link.time_s(1 << 20) < 1.0
        assert link.time_s(1) < link.time_s(4 << 20)


@pytest.mark.parametrize(("sizes_bytes", "repeats"), [((1, 2), 0), ((5,), 1), ((0, 1), 1)])
def test_too_little_to_measure(sizes_bytes: tuple[int, ...], repeats: int) -> None:
    with pytest.raises(HvpipeError, match=r"at least two sizes\. Received: sizes_bytes="):
        measure_links(current().engine, sizes_bytes=sizes_bytes, repeats=repeats)
