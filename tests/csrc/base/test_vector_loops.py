"""The engine's cast, scale and sum loops, compared bit by bit with NumPy and ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from casting import (
    COUNTS,
    DTYPES,
    HALVES,
    PAIRS,
    THROUGH_FLOAT32,
    assert_same,
    bits,
    cast,
    expected_cast,
    expected_sum,
    native,
    quickly,
    random,
    special,
    sum_arrays,
)
from hvpipe.errors import HvpipeError


@pytest.fixture(autouse=True)
def quiet_numpy() -> Any:
    """Silence NumPy's warnings: these tests overflow to infinity on purpose."""
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3, 1e-30, 0.0, float("inf"), float("nan")])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_cast_is_numpys(source: str, target: str, scale: float) -> None:
    values = np.concatenate([special(source), random(source, 3000), special(source)])
    assert_same(cast(values, target, scale), expected_cast(values, target, scale))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_cast_of_any_length_fills_its_output_and_no_more(source: str, target: str, count: int) -> None:
    values = random(source, count, seed=count)
    out = np.zeros(count + 8, DTYPES[target])
    guard = bits(out)[count:]
    guard[:] = 0x1234
    native.cast(bits(values), source, bits(out)[:count], target, 0.5)
    assert_same(out[:count], expected_cast(values, target, 0.5))
    assert (guard == 0x1234).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_copy_keeps_every_bit_of_a_nan(dtype: str) -> None:
    values = random(dtype, 1 << 16)
    np.testing.assert_array_equal(bits(cast(values, dtype)), bits(values))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_value_widens_exactly(dtype: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    assert_same(cast(every, "float32"), every.astype(np.float32))


@pytest.mark.parametrize("dtype", HALVES)
def test_between_any_two_halves_rounding_is_to_nearest_even(dtype: str) -> None:
    # Test the midpoint between two neighbours, which rounds to the even one, and the float32 on either side
    # of it.
    infinity = int(bits(np.array([np.inf]).astype(DTYPES[dtype]))[0])
    low = np.arange(infinity, dtype=np.uint16)
    values = low.view(DTYPES[dtype]).astype(np.float64)
    above = [*values[1:].tolist(), 2 * values[-1] - values[-2]]
    middle = ((values + np.array(above)) / 2).astype(np.float32)
    even = low + (low & 1)
    np.testing.assert_array_equal(bits(cast(middle, dtype)), even)
    np.testing.assert_array_equal(bits(cast(np.nextafter(middle, np.float32(0)), dtype)), low)
    up = cast(np.nextafter(middle, np.float32(np.inf)), dtype)
    np.testing.assert_array_equal(bits(up), low + 1)
    np.testing.assert_array_equal(bits(cast(-middle, dtype)), even | 0x8000)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_nan_stays_a_nan_of_its_sign(dtype: str) -> None:
    # This includes NaNs whose payload lies only in the bits that a half type drops.
    patterns = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F801000, 0x7FBFFFFF]
    values = np.array([*patterns, *(p | 0x80000000 for p in patterns)] * 7, np.uint32).view(np.float32)
    found = cast(values, dtype)
    assert np.isnan(found.astype(np.float32)).all()
    np.testing.assert_array_equal(bits(found) >> 15, bits(values) >> 31)


@quickly
@given(st.integers(0, (1 << 32) - 1), st.sampled_from(THROUGH_FLOAT32), st.integers(1, 40))
def test_the_position_of_a_value_does_not_change_its_cast(pattern: int, to: str, count: int) -> None:
    # The vector loop and its scalar remainder must agree. Otherwise ranks with other offsets would differ.
    values = np.full(count, pattern, np.uint32).view(np.float32)
    assert len(set(bits(cast(values, to)).tolist())) == 1
    assert_same(cast(values, to, 0.3), expected_cast(values, to, 0.3))


@pytest.mark.parametrize(("source", "target"), [("float64", "float32"), ("bfloat16", "float64")])
def test_float64_is_cast_to_nothing_else(source: str, target: str) -> None:
    with pytest.raises(HvpipeError, match="float64"):
        cast(np.ones(4, DTYPES[source]), target, 0.5)


@pytest.mark.parametrize("sources", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_numpys_from_the_first_to_the_last(dtype: str, sources: int) -> None:
    for count in COUNTS:
        arrays = [random(dtype, count, seed) for seed in range(sources)]
        assert_same(sum_arrays(arrays), expected_sum(arrays))


@pytest.mark.parametrize("sources", [1, 2, 3, 5])
def test_bytes_add_up(sources: int) -> None:
    for count in COUNTS:
        arrays = [np.random.default_rng(seed).integers(-25, 26, count, np.int8) for seed in range(sources)]
        total = np.empty(count, np.int8)
        native.sum_arrays(arrays, total, "int8")
        np.testing.assert_array_equal(total, np.sum(arrays, axis=0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_specials_add_as_in_numpy(dtype: str) -> None:
    values = special(dtype)
    left, right = (a.ravel() for a in np.meshgrid(values, values))
    assert_same(sum_arrays([left, right]), expected_sum([left, right]))
    assert_same(sum_arrays([left, right, left]), expected_sum([left, right, left]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sources", [3, 4, 6])
def test_the_order_of_a_sum_is_fixed(dtype: str, sources: int) -> None:
    # (big + -big) + 1 is 1, and (big + 1) + -big is 0. Half types add in float32, so `big` must be big in
    # float32.
    big = {"float32": 1e9, "float64": 1e17, "float16": 60000.0, "bfloat16": 1e9}[dtype]
    one = {"float16": 2**-10}.get(dtype, 1.0)
    rest = [0.0] * (sources - 3)
    for terms, wanted in (([big, -big, one], one), ([big, one, -big], 0.0)):
        arrays = [np.full(1100, term, DTYPES[dtype]) for term in [*terms, *rest]]
        assert set(sum_arrays(arrays).astype(np.float64).tolist()) == {wanted}


def test_half_types_round_once_after_the_last_term() -> None:
    # Rounding after each term would turn 2048 + 1 back into 2048 in float16.
    terms = [np.full(10, value, np.float16) for value in (2048, 1, 1, 1, 1)]
    assert sum_arrays(terms).tolist() == [2052.0] * 10
    terms = [np.full(10, value).astype(ml_dtypes.bfloat16) for value in (256, 1, 1)]
    assert sum_arrays(terms).astype(np.float32).tolist() == [258.0] * 10


@quickly
@given(
    st.sampled_from(sorted(DTYPES)),
    st.integers(2, 6),
    st.integers(0, 5),
    st.sampled_from(COUNTS[1:]),
    st.integers(0, 1000),
)
def test_the_output_may_be_any_of_the_terms(
    dtype: str, sources: int, place: int, count: int, seed: int
) -> None:
    arrays = [random(dtype, count, seed + i) for i in range(sources)]
    wanted = expected_sum(arrays)
    target = arrays[place % sources]
    native.sum_arrays([bits(a) for a in arrays], bits(target), dtype)
    assert_same(target, wanted)


def test_unequal_lengths_and_unknown_dtypes_are_refused() -> None:
    one, two = np.ones(1, np.float32), np.ones(2, np.float32)
    with pytest.raises(HvpipeError, match="one size"):
        native.sum_arrays([one, two], one, "float32")
    with pytest.raises(HvpipeError, match="as many elements"):
        native.cast(one, "float32", two, "float32", 1.0)
    with pytest.raises(HvpipeError, match=r"float32, .*, bfloat16 or int8.*Received: dtype=int16"):
        native.cast(one, "int16", two, "float32", 1.0)
