"""The MPI world below the session: objects, clocks, communicators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hvpipe.environment.discover import discover
from hvpipe.environment.settings import Settings
from hvpipe.world.open import open_world
from hvpipe.world.world import World


@pytest.fixture(scope="module")
def comm() -> Iterator[World]:
    """Open a second world beside the session's."""
    world = open_world(discover(), Settings(timeout_s=30.0))
    yield world
    world.close()


def test_the_launcher_and_mpi_agree(comm: World) -> None:
    launch = discover()
    assert (launch.rank, launch.size) == (comm.rank, comm.size)
    assert launch.local_size in (None, comm.local_size)
    assert 0 <= comm.local_rank < comm.local_size <= comm.size


def test_objects_of_unequal_size_arrive_in_rank_order(comm: World) -> None:
    values = comm.allgather_object({"rank": comm.rank, "payload": b"x" * (100_000 * comm.rank)})
    assert [value["rank"] for value in values] == list(range(comm.size))
    assert [len(value["payload"]) for value in values] == [100_000 * rank for rank in range(comm.size)]
    assert comm.allgather_object(None) == [None] * comm.size


def test_ranks_of_one_host_have_one_clock(comm: World) -> None:
    assert abs(comm.clock_offset_s()) < 0.01


def test_a_world_without_mpi_has_no_engine(comm: World) -> None:
    engine = comm.make_engine(Settings(timeout_s=30.0))
    assert (engine is None) == (comm.library_version == "none")
    if engine is not None:
        assert (engine.rank, engine.size) == (comm.rank, comm.size)
        engine.stop()


def test_closing_twice() -> None:
    world = open_world(discover(), Settings(timeout_s=30.0))
    world.close()
    world.close()
