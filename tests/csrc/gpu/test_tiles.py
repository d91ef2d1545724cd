"""The CUDA kernel, compiled from the same source, run thread by thread on the CPU and compared with NumPy."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from casting import DTYPES, PAIRS, assert_same, bits, expected_cast, random, special
from native_build import build

Array = NDArray[Any]
NUMBER = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
TILE = 4096
# Lengths around a vector's width, around what all threads of a block move at once, and around a tile.
COUNTS = (0, 1, 3, 4, 7, 8, 9, 255, 256, 1023, 1025, 2049, TILE - 1, TILE, TILE + 1, 3 * TILE + 5)


@pytest.fixture(autouse=True)
def quiet_numpy() -> Any:
    """Silence NumPy's warnings: these tests overflow to infinity on purpose."""
    with np.errstate(all="ignore"):
        yield


@cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(build("fake_device.cc")))
    loaded.move_pieces.restype = ctypes.c_uint
    return loaded


def move(
    sources: list[Array],
    targets: list[Array],
    scale: float = 1.0,
) -> int:
    """Run the kernel on these arrays and return the number of launches."""
    pointers = ctypes.c_void_p * len(sources)
    return int(
        library().move_pieces(
            len(sources),
            pointers(*(a.ctypes.data for a in sources)),
            pointers(*(a.ctypes.data for a in targets)),
            (ctypes.c_size_t * len(sources))(*(a.size for a in sources)),
            NUMBER[sources[0].dtype.name],
            NUMBER[targets[0].dtype.name],
            ctypes.c_double(scale),
        )
    )


def placed(values: Array, byte_offset: int) -> Array:
    """Return a copy that begins `byte_offset` bytes after a 64-byte boundary."""
    room = np.empty(values.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + byte_offset
    place = room[start : start + values.nbytes].view(values.dtype)
    place[:] = values
    return place


def poisoned(count: int, dtype: str, byte_offset: int = 0) -> Array:
    """Return an array of NaN, which reveals elements that the kernel did not write."""
    return placed(np.full(count, np.nan).astype(DTYPES[dtype]), byte_offset)


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 0.0, 1e-30])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_the_kernel_casts_as_the_cpu_does(source: str, target: str, scale: float) -> None:
    values = np.concatenate([special(source), random(source, 2 * TILE), special(source)])
    found = poisoned(values.size, target)
    assert move([placed(values, 0)], [found], scale) == 1
    assert_same(found, expected_cast(values, target, scale))


@pytest.mark.parametrize("misplaced", ["neither", "source", "target", "both"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_length_and_alignment_is_copied_without_overrun(source: str, target: str, misplaced: str) -> None:
    values = [random(source, n, seed=n) for n in COUNTS]
    from_offset = DTYPES[source].itemsize if misplaced in ("source", "both") else 0
    to_offset = DTYPES[target].itemsize if misplaced in ("target", "both") else 0
    sources = [placed(v, from_offset) for v in values]
    rooms = [placed(np.zeros(v.size + 8, DTYPES[target]), to_offset) for v in values]
    for room in rooms:
        bits(room)[:] = 0x1234
    assert move(sources, [room[: v.size] for room, v in zip(rooms, values, strict=True)], 0.5) == 1
    for room, v in zip(rooms, values, strict=True):
        assert_same(room[: v.size].copy(), expected_cast(v, target, 0.5))
        assert (bits(room)[v.size :] == 0x1234).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_copy_keeps_every_bit(dtype: str) -> None:
    values = random(dtype, TILE + 100)
    found = poisoned(values.size, dtype)
    move([values], [found])
    np.testing.assert_array_equal(bits(found), bits(values))


@pytest.mark.parametrize(("pieces", "launches"), [(1, 1), (126, 1), (127, 2), (300, 3)])
def test_one_launch_moves_as_many_tensors_as_its_parameters_hold(pieces: int, launches: int) -> None:
    counts = np.random.default_rng(pieces).integers(0, 40, pieces)
    counts[0] = 1
    counts[-1] = 2 * TILE + 1
    values = [random("float32", int(n), seed=i) for i, n in enumerate(counts)]
    found = [poisoned(v.size, "bfloat16") for v in values]
    # An empty tensor needs no slot in a launch.
    present = sum(v.size > 0 for v in values)
    taken = move(values, found, 0.25)
    assert taken == -(-present // 126)
    assert taken <= launches
    for v, f in zip(values, found, strict=True):
        assert_same(f, expected_cast(v, "bfloat16", 0.25))


def test_in_place_is_allowed() -> None:
    values = placed(random("float32", 3 * TILE + 7), 0)
    wanted = expected_cast(values.copy(), "float32", 0.5)
    move([values], [values], 0.5)
    assert_same(values, wanted)
