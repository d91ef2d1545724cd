"""The MPI world below the session: objects, clocks, communicators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hvpipe.comm.discover import discover
from hvpipe.comm.open import open_world
from hvpipe.comm.settings import Settings
from hvpipe.comm.world import World
from hvpipe.errors import HvpipeError


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


def test_one_rank_alone_can_gather(comm: World) -> None:
    values = comm.gather_object({"rank": comm.rank, "payload": b"x" * (100_000 * comm.rank)})
    if comm.rank > 0:
        assert values is None
        return
    assert values is not None
    assert [value["rank"] for value in values] == list(range(comm.size))
    assert [len(value["payload"]) for value in values] == [100_000 * rank for rank in range(comm.size)]


def test_none_is_an_object_too(comm: World) -> None:
    assert comm.allgather_object(None) == [None] * comm.size


def test_every_root_can_broadcast(comm: World) -> None:
    for root in range(comm.size):
        assert comm.broadcast_object(("from", comm.rank), root) == ("from", root)


def test_objects_larger_than_one_mpi_call(comm: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvpipe.comm.mpi._MOST_BYTES", 1000)
    mine = [comm.rank] * (2000 + comm.rank)
    everyone = [[rank] * (2000 + rank) for rank in range(comm.size)]
    assert comm.allgather_object(mine) == everyone
    assert comm.gather_object(mine) == (everyone if comm.rank == 0 else None)


def test_a_root_outside_the_world(comm: World) -> None:
    with pytest.raises(HvpipeError, match=f"Received: root={comm.size}"):
        comm.broadcast_object(1, root=comm.size)


def test_ranks_of_one_host_have_one_clock(comm: World) -> None:
    assert abs(comm.clock_offset_s()) < 0.01
    comm.barrier()


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
