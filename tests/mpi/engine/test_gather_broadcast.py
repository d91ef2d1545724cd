"""Broadcast, all-gather, objects and barriers on any number of ranks and any data path."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import hvpipe
from arrays import (
    DTYPES,
    digest,
)
from hvpipe.engine.engine import EngineClient
from hvpipe.errors import HvpipeError


@pytest.mark.parametrize("dtype", [*DTYPES, "int8", "int64", "bool", "complex128"])
def test_every_rank_can_broadcast(dtype: str) -> None:
    kind = DTYPES.get(dtype, np.dtype(dtype))
    for root in range(hvpipe.size()):
        for shape in ((), (0,), (1,), (7, 3), (20_011,)):
            theirs = (np.arange(np.prod(shape, dtype=int)) % 100 + root).astype(kind).reshape(shape)
            mine = theirs if hvpipe.rank() == root else np.zeros(shape, kind)
            found = hvpipe.broadcast(mine, root_rank=root)
            assert found.dtype == kind
            assert found.shape == shape
            assert digest(found) == digest(theirs)


@pytest.mark.parametrize("root", [-1, 99])
def test_a_root_outside_the_world_is_refused(root: int) -> None:
    with pytest.raises(HvpipeError, match=f"0 to {hvpipe.size() - 1}. Received: root={root}"):
        hvpipe.broadcast(np.ones(3), root=root)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("rows", [lambda rank: rank, lambda rank: 3000 * (rank == 1), lambda rank: 5])
def test_all_gather_of_unequal_lengths(dtype: str, rows: Any) -> None:
    kind = DTYPES.get(dtype, np.dtype(dtype))
    everyone = [np.full((rows(rank), 3), rank + 1).astype(kind) for rank in range(hvpipe.size())]
    found = hvpipe.allgather(everyone[hvpipe.rank()])
    assert found.dtype == kind
    assert found.shape == (sum(rows(rank) for rank in range(hvpipe.size())), 3)
    assert digest(found) == digest(np.concatenate(everyone))


def test_all_gather_of_nothing_and_of_a_scalar() -> None:
    assert hvpipe.allgather(np.zeros((0, 4), np.float32)).shape == (0, 4)
    assert hvpipe.allgather(np.zeros((2, 0), np.float32)).shape == (2 * hvpipe.size(), 0)
    with pytest.raises(HvpipeError, match="Received: a scalar"):
        hvpipe.allgather(np.float32(1))


def test_objects() -> None:
    everyone = hvpipe.allgather_object({"rank": hvpipe.rank(), "text": "x" * 1000 * hvpipe.rank()})
    assert [(e["rank"], len(e["text"])) for e in everyone] == [(r, 1000 * r) for r in range(hvpipe.size())]
    for root in range(hvpipe.size()):
        assert hvpipe.broadcast_object(("from", hvpipe.rank()), root=root) == ("from", root)
        assert hvpipe.broadcast_object(("from", hvpipe.rank()), root_rank=root) == ("from", root)


def test_a_barrier_waits_for_the_last() -> None:
    hvpipe.barrier()
    time.sleep(0.2 * (hvpipe.rank() == hvpipe.size() - 1))
    reached_s = time.monotonic()
    hvpipe.barrier()
    left_s = time.monotonic()
    if hvpipe.local_size() == hvpipe.size():  # one host, so one clock
        assert left_s >= max(hvpipe.allgather_object(reached_s))


def test_every_rank_gets_every_ranks_samples(engine: EngineClient) -> None:
    found = engine.agree("test", samples=10.0 + hvpipe.rank())
    assert found == [10.0 + rank for rank in range(hvpipe.size())]
