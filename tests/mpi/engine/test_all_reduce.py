"""All-reduce on any number of ranks and any data path: shared memory, a ring, or both."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import hvpipe
from arrays import (
    COUNTS,
    DTYPES,
    LARGE,
    ROUNDING,
    Array,
    assert_equal_on_all_ranks,
    assert_sum,
    digest,
    part,
    patterns,
)
from hvpipe.engine.engine import Compression, EngineClient
from hvpipe.environment.settings import settings
from hvpipe.errors import HvpipeError


@pytest.mark.parametrize("op", ["sum", "average"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce(dtype: str, op: Any) -> None:
    scale = 1.0 / hvpipe.size() if op == "average" else 1.0
    for count in COUNTS:
        mine = part(hvpipe.rank(), count, dtype)
        before = mine.copy()
        found = hvpipe.allreduce(mine, op=op)
        assert found.dtype == mine.dtype
        assert found.shape == mine.shape
        assert digest(mine) == digest(before)
        assert_sum(found, patterns(dtype), scale, ROUNDING[dtype])
        assert_equal_on_all_ranks(found)
        assert digest(hvpipe.allreduce(mine, op=op)) == digest(found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_larger_than_any_buffer(dtype: str) -> None:
    # With tiny messages this case would send far too many of them.
    count = LARGE // 20 if settings().segment_bytes else LARGE
    found = hvpipe.allreduce(part(hvpipe.rank(), count, dtype), op="sum")
    assert_sum(found, patterns(dtype), 1.0, ROUNDING[dtype])
    assert_equal_on_all_ranks(found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_whole_numbers_are_summed_exactly(dtype: str) -> None:
    count = 70_001
    mine = (np.arange(count) % 8 + hvpipe.rank()).astype(DTYPES[dtype])
    wanted = sum(np.arange(count) % 8 + rank for rank in range(hvpipe.size()))
    np.testing.assert_array_equal(hvpipe.allreduce(mine, op="sum").astype(np.int64), wanted)


@pytest.mark.parametrize("shape", [(), (1,), (3, 0), (5, 4, 3)])
def test_all_reduce_keeps_the_shape(shape: tuple[int, ...]) -> None:
    found = hvpipe.allreduce(np.full(shape, 1.5, np.float32), op="sum")
    assert found.shape == shape
    assert (found == 1.5 * hvpipe.size()).all()


def test_an_average_of_float16_whose_sum_overflows() -> None:
    assert (hvpipe.allreduce(np.full(1000, 40_000, np.float16)) == 40_000).all()


def test_all_reduce_in_place_and_into_another_array() -> None:
    mine = part(hvpipe.rank(), 5000, "float32").reshape(50, 100)
    wanted = hvpipe.allreduce(mine, op="sum")
    other = np.empty_like(mine)
    assert hvpipe.allreduce(mine, op="sum", out=other) is other
    assert hvpipe.allreduce(mine, op="sum", out=mine) is mine
    assert digest(other) == digest(mine) == digest(wanted)


@pytest.mark.parametrize("out", [None, "in place"])
@pytest.mark.parametrize(("compression", "wire"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_compression(compression: Any, wire: str, out: str | None) -> None:
    for count in COUNTS:
        mine = part(hvpipe.rank(), count, "float32")
        target = mine.copy() if out else None
        found = hvpipe.allreduce(mine if target is None else target, compression=compression, out=target)
        assert found.dtype == np.float32
        # Values are rounded twice: before they are sent, and in the sum.
        assert_sum(found, patterns("float32"), 1.0 / hvpipe.size(), 2 * ROUNDING[wire])
        assert_equal_on_all_ranks(found)
        if hvpipe.size() > 1:
            assert digest(found) == digest(found.astype(DTYPES[wire]).astype(np.float32))


def test_compression_leaves_other_dtypes_alone() -> None:
    for dtype in ("float64", "float16", "bfloat16"):
        mine = part(hvpipe.rank(), 1000, dtype)
        assert digest(hvpipe.allreduce(mine, compression="bf16")) == digest(hvpipe.allreduce(mine))


def test_a_nan_or_infinity_on_one_rank_reaches_all() -> None:
    for dtype in DTYPES:
        mine = np.ones(5000, DTYPES[dtype])
        if hvpipe.rank() == hvpipe.size() - 1:
            mine[1234], mine[4321] = np.nan, -np.inf
        found = hvpipe.allreduce(mine, op="sum").astype(np.float64)
        assert np.isnan(found[1234])
        assert found[4321] == -np.inf
        assert np.isfinite(np.delete(found, [1234, 4321])).all()


class Tensor:
    """An array of another library that supports only DLPack."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def test_arrays_of_any_kind() -> None:
    size, base = hvpipe.size(), np.arange(24, dtype=np.float32).reshape(4, 6)
    for array in (Tensor(base), base[:, ::-1][:, ::-1], np.asfortranarray(base), base.tolist()):
        found = hvpipe.allreduce(array, op="sum")
        np.testing.assert_array_equal(found, base * size)
    frozen = base.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(hvpipe.allreduce(frozen, op="sum"), base * size)
    np.testing.assert_array_equal(hvpipe.allreduce(base[:, ::2], op="sum"), base[:, ::2] * size)
    odd = np.frombuffer(b"." + base.tobytes(), base.dtype, base.size, 1)  # at an address that is odd
    np.testing.assert_array_equal(hvpipe.allreduce(odd, op="sum"), base.ravel() * size)
    np.testing.assert_array_equal(hvpipe.broadcast(Tensor(base)), base)
    np.testing.assert_array_equal(hvpipe.allgather(Tensor(base)), np.concatenate([base] * size))


@pytest.mark.parametrize(
    ("arguments", "received"),
    [
        ({"op": "max"}, "Received: op='max'"),
        ({"compression": "int8"}, "Received: compression='int8'"),
        ({"array": np.ones(4, np.int32)}, "Received: dtype=int32"),
        ({"array": np.ones(4, bool)}, "Received: dtype=bool"),
        ({"array": np.ones(4, ">f4")}, "Received: dtype=>f4"),
        ({"array": ["a"]}, "Received: dtype="),
        ({"array": [None]}, "Received: dtype=object"),
        ({"out": np.ones(5, np.float32)}, r"float32\[4\]. Received: float32\[5\]"),
        ({"out": np.ones(4, np.float64)}, r"float32\[4\]. Received: float64\[4\]"),
        ({"out": np.ones(8, np.float32)[::2]}, "Received: an array that is not C-contiguous"),
        ({"out": np.frombuffer(bytearray(17), np.float32, 4, 1)}, "Received: an array that is not aligned"),
        ({"out": [0.0] * 4}, "Received: list"),
    ],
)
def test_wrong_arguments_are_named_and_harm_nothing(arguments: dict[str, Any], received: str) -> None:
    with pytest.raises(HvpipeError, match=received):
        hvpipe.allreduce(**{"array": np.ones(4, np.float32), **arguments})
    assert hvpipe.allreduce(np.float32(1), op="sum") == hvpipe.size()


def test_an_output_that_overlaps_the_array_is_refused() -> None:
    """The algorithms write parts of the result before they have read all of the array."""
    memory = np.arange(9, dtype=np.float32)
    for array, out in ((memory[:-1], memory[1:]), (memory[1:], memory[:-1])):
        with pytest.raises(HvpipeError, match="Received: an array that overlaps the one to reduce"):
            hvpipe.allreduce(array, out=out)
    halves = memory[:4], memory[4:8]
    hvpipe.allreduce(halves[0], op="sum", out=halves[1])
    assert memory[4:].tolist() == [0, hvpipe.size(), 2 * hvpipe.size(), 3 * hvpipe.size(), 8]


def test_a_read_only_output_is_refused() -> None:
    out = np.zeros(4, np.float32)
    out.flags.writeable = False
    with pytest.raises(HvpipeError, match="Received: an array that is read-only"):
        hvpipe.allreduce(np.ones(4, np.float32), out=out)
    assert (out == 0).all()
    choices: tuple[Compression, ...] = (None, "bf16")
    for compression in choices:
        with pytest.raises(HvpipeError, match="Received: an array that is read-only"):
            hvpipe.allreduce(out, out=out, compression=compression)


def test_punctual_and_late_ranks() -> None:
    """A small all-reduce returns at once if all ranks are ready, and is queued if a rank is late."""
    size, rank = hvpipe.size(), hvpipe.rank()
    late = np.random.default_rng(rank)
    wanted = size * (size + 1) / 2
    for turn in range(300):
        count = 1 + turn * 97 % 3000
        if late.random() < 0.3:
            time.sleep(late.random() * 3e-4)
        if turn % 7 == 3:
            np.testing.assert_array_equal(hvpipe.broadcast(np.full(3, rank), turn % size), turn % size)
        elif turn % 7 == 5:
            np.testing.assert_array_equal(hvpipe.allgather(np.array([rank])), np.arange(size))
        else:
            mine = np.full(count, rank + 1, np.float32)
            assert hvpipe.allreduce(mine, op="sum", out=mine) is mine
            np.testing.assert_array_equal(mine, wanted)


def test_counters(engine: EngineClient) -> None:
    before = hvpipe.counters()
    assert before["bytes_sent"] >= 0
    hvpipe.allreduce(np.ones(100_000, np.float32))
    after = hvpipe.counters()
    assert all(after[name] >= value for name, value in before.items())
    if hvpipe.size() == 1:
        return
    assert after["operations"] > before["operations"]
    sent = {name: after[name] - before[name] for name in after}
    assert sent["bytes_sent"] == sent["network_bytes_sent"] + sent["shared_memory_bytes"]
    hosts, share = engine.native.hosts, 400_000 / hvpipe.size()
    if hosts == 1 and settings().shared_memory:
        assert sent["shared_memory_bytes"] == 400_000
        assert sent["network_bytes_sent"] == 0
    elif not settings().shared_memory:
        # Each of a ring's two rounds sends all shares but one.
        assert sent["network_bytes_sent"] == pytest.approx(2 * (hvpipe.size() - 1) * share, rel=0.01)
        assert sent["network_bytes_received"] == pytest.approx(sent["network_bytes_sent"], rel=0.01)
    else:
        # Every rank writes its array to the window, and then its slice of the sum, which it has summed over
        # the hosts. If hosts have different numbers of ranks, or the array is small, the first rank of each
        # host does that with all of it.
        leads, even = engine.native.local_rank == 0, hvpipe.size() % hosts == 0
        sliced = even and settings().slot_bytes <= 200_000
        slice_bytes = 400_000 * hosts / hvpipe.size() if sliced else 400_000 * leads
        alone = leads and not even and hvpipe.rank() == hvpipe.size() - 1  # on its host
        back = 0 if alone else slice_bytes
        assert sent["shared_memory_bytes"] == pytest.approx(400_000 + back, rel=0.01)
        assert sent["network_bytes_sent"] == pytest.approx(2 * (hosts - 1) * slice_bytes / hosts, rel=0.01)
