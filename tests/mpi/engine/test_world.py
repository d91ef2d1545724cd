"""The world as every rank sees it."""

from __future__ import annotations

import os

import hvpipe


def test_ranks_are_numbered_from_zero() -> None:
    assert hvpipe.allgather_object(hvpipe.rank()) == list(range(hvpipe.size()))


def test_every_rank_is_a_process_of_its_own() -> None:
    assert len(set(hvpipe.allgather_object(os.getpid()))) == hvpipe.size()


def test_the_local_world_is_this_host() -> None:
    assert hvpipe.local_size() == hvpipe.size()
    assert hvpipe.local_rank() == hvpipe.rank()


def test_initialising_again_changes_nothing() -> None:
    before = (hvpipe.rank(), hvpipe.size())
    hvpipe.init()
    assert hvpipe.is_initialized()
    assert (hvpipe.rank(), hvpipe.size()) == before
