"""Arrays of every dtype that hvpipe sends, and the expected result of a cast or a sum in NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import settings
from numpy.typing import NDArray

from hvpipe.environment.native import import_native

Array = NDArray[Any]

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
HALVES = ("float16", "bfloat16")
THROUGH_FLOAT32 = ("float32", *HALVES)
WORD = {2: np.uint16, 4: np.uint32, 8: np.uint64}
# Lengths around a vector's width, and around the block of 1024 elements in which half types are processed.
COUNTS = (0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 1023, 1024, 1025, 2047, 2048, 2049, 5000)
quickly = settings(max_examples=60)
native = import_native()


def bits(array: Array) -> Array:
    return array.view(WORD[array.dtype.itemsize])


def special(dtype: str) -> Array:
    """Return zeros, infinities, NaNs, subnormals, limits and ties between neighbours, of both signs."""
    kind = DTYPES[dtype]
    info = ml_dtypes.finfo(kind)
    one = [0.0, np.inf, np.nan, info.max, info.tiny, info.smallest_subnormal, 1.0, 1 + 2**-11, 1 + 3 * 2**-11]
    more = [1 + 2**-8, 1 + 2**-9, 65504, 65519, 65520, 65536, 2**-14, 2**-24, 2**-25, 3 * 2**-25, 1e-40, 0.1]
    values = np.array([float(v) for v in [*one, *more]]).astype(kind)
    return np.concatenate([values, -values])


def random(dtype: str, count: int, seed: int = 0) -> Array:
    """Return random bit patterns, which may be any value of the dtype."""
    kind = DTYPES[dtype]
    words = np.random.default_rng(seed).integers(0, 256, count * kind.itemsize, dtype=np.uint8)
    return words.view(kind)


def cast(array: Array, to: str, scale: float = 1.0) -> Array:
    out = np.empty(array.shape, DTYPES[to])
    native.cast(bits(array), array.dtype.name, bits(out), to, scale)
    return out


def sum_arrays(arrays: list[Array]) -> Array:
    out = np.empty_like(arrays[0])
    native.sum_arrays([bits(a) for a in arrays], bits(out), arrays[0].dtype.name)
    return out


def expected_cast(array: Array, to: str, scale: float) -> Array:
    if array.dtype == DTYPES[to] and scale == 1.0:
        return array
    if array.dtype == np.float64:
        return array * scale
    single = array.astype(np.float32)
    return (single if scale == 1.0 else single * np.float32(scale)).astype(DTYPES[to])


def expected_sum(arrays: list[Array]) -> Array:
    wide = [a if a.dtype == np.float64 else a.astype(np.float32) for a in arrays]
    total = wide[0]
    for term in wide[1:]:
        total = total + term
    return total.astype(arrays[0].dtype)


def assert_same(found: Array, wanted: Array) -> None:
    """Check that two arrays have the same bits. Any NaN equals any other NaN."""
    assert found.dtype == wanted.dtype
    nan = np.isnan(wanted.astype(np.float64))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float64)), nan)
    np.testing.assert_array_equal(bits(found)[~nan], bits(wanted)[~nan])


PAIRS = [(a, b) for a in THROUGH_FLOAT32 for b in THROUGH_FLOAT32] + [("float64", "float64")]
