"""Input arrays for collectives. Any rank can compute every rank's arrays and the expected result."""

from __future__ import annotations

import hashlib
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import hvpipe

Array = NDArray[Any]

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# The relative error of one rounding: half the distance from 1 to the next number.
ROUNDING = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}
COUNTS = (0, 1, 7, 1000, 100_003)
LARGE = 3_000_001


PERIOD = 2003


def pattern(rank: int, dtype: str) -> Array:
    places = np.arange(PERIOD, dtype=np.int64)
    return (((places * 7919 + rank * 104_729) % PERIOD - 1001) / 800.0).astype(DTYPES[dtype])


def part(rank: int, count: int, dtype: str) -> Array:
    """Return the contribution of a rank: its pattern, repeated."""
    return np.resize(pattern(rank, dtype), count)


def patterns(dtype: str) -> list[Array]:
    return [pattern(rank, dtype) for rank in range(hvpipe.size())]


def digest(*arrays: Array) -> str:
    return hashlib.sha1(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


def assert_equal_on_all_ranks(*arrays: Array) -> None:
    assert len(set(hvpipe.allgather_object(digest(*arrays)))) == 1


def assert_sum(found: Array, terms: list[Array], scale: float, rounding: float) -> None:
    """Check a sum of `terms`, repeated to fill the array, within the error of one rounding per term."""
    wide = [term.ravel().astype(np.float64) for term in terms]
    wanted = sum(wide) * scale
    allowed = (len(terms) + 2) * rounding * sum(np.abs(w) for w in wide) * scale + 1e-7 * rounding
    difference = np.abs(found.ravel() - np.resize(wanted, found.size))
    wrong = ~(difference <= np.resize(allowed, found.size))  # so that NaN counts as wrong
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} wrong, first at {wrong.argmax()}"
