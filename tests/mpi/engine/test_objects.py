"""Objects that the engine gathers and broadcasts."""

from __future__ import annotations

from typing import Any

import pytest

from hvpipe.engine.engine import EngineClient
from hvpipe.errors import HvpipeError
from hvpipe.session import current


@pytest.fixture
def engine() -> EngineClient:
    return current().engine


def objects(size: int) -> list[Any]:
    """Return one object for each rank: of unequal size, the last one of several segments."""
    return [{"rank": rank, "payload": b"x" * (300_000 * rank)} for rank in range(size)]


def test_all_ranks_gather(engine: EngineClient) -> None:
    everyone = objects(engine.world.size)
    assert engine.allgather_object(everyone[engine.world.rank], "test") == everyone
    assert engine.allgather_object(None, "test") == [None] * engine.world.size


def test_one_rank_alone_gathers(engine: EngineClient) -> None:
    everyone = objects(engine.world.size)
    found = engine.gather_object(everyone[engine.world.rank], "test")
    assert found == (everyone if engine.world.rank == 0 else None)


def test_every_root_can_broadcast(engine: EngineClient) -> None:
    for root, wanted in enumerate(objects(engine.world.size)):
        mine = wanted if engine.world.rank == root else None
        assert engine.broadcast_object(mine, "test", root) == wanted


def test_a_root_outside_the_world(engine: EngineClient) -> None:
    size = engine.world.size
    with pytest.raises(HvpipeError, match=f"root should be a rank, 0 to {size - 1}. Received: root={size}"):
        engine.broadcast_object(1, "test", root=size)
