"""Reductions of every type by every operation, bit for bit against Python's exact numbers and NumPy's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hvpipe
import hvpipe.horovod.tensorflow as hvd

pytestmark = pytest.mark.every_size

INTEGERS = (tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64)
HALVES = (tf.float16, tf.bfloat16)
WIDE = (tf.float32, tf.float64)
OPS = {
    "average": hvd.Average,
    "sum": hvd.Sum,
    "min": hvd.Min,
    "max": hvd.Max,
    "product": hvd.Product,
}


@dataclass(frozen=True)
class Reduction:
    """One call. The seed makes every rank's numbers."""

    dtype: tf.DType
    op: str
    count: int
    prescale: float
    postscale: float
    scatters: bool
    seed: int


FACTORS = st.sampled_from([1.0, 1.0, 0.5, 3.0, -1.5])
REDUCTIONS = st.builds(
    Reduction,
    dtype=st.sampled_from([*INTEGERS, *HALVES, *WIDE]),
    op=st.sampled_from(sorted(OPS)),
    count=st.sampled_from([1, 2, 31, 67, 9001]),  # vectors and their rest; one round or more
    prescale=FACTORS,
    postscale=FACTORS,
    scatters=st.booleans(),
    seed=st.integers(0, 10_000),
)


def numbers_of(case: Reduction, rank: int) -> Any:
    """Return the numbers of one rank, many of them at the ends of the type."""
    random = np.random.default_rng([case.seed, rank])
    kind = case.dtype.as_numpy_dtype
    if case.dtype.is_integer:
        ends = [case.dtype.min, case.dtype.max, 0, 1, case.dtype.max // 3, case.dtype.min // 3]
        return random.choice(np.array(ends, kind), case.count)
    ends = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan]
    if case.dtype in HALVES:  # elsewhere the order of ranks, which is MPI's, decides whether a sum overflows
        ends.append(float(case.dtype.max) * 0.7)
    near = random.choice([1.0, 2048.0, 300.0, 0.1], case.count) * random.normal(size=case.count)
    return np.where(random.random(case.count) < 0.2, random.choice(ends, case.count), near).astype(kind)


def exact_integers(case: Reduction, everyone: list[Any]) -> Any:
    """Return the exact result, cut off where factors are applied, and wrapped at the end."""
    bits = 8 * case.dtype.size

    def cut(value: float) -> int:
        return max(-(2**63), min(2**63 - 1, int(value)))

    def reduced(column: list[int]) -> int:
        given = [x if case.prescale == 1 else cut(float(x) * case.prescale) for x in column]
        if case.op in ("min", "max"):
            total = (min if case.op == "min" else max)(given)
        elif case.op == "product":
            total = (int(np.prod(np.array(given, object))) + 2**63) % 2**64 - 2**63
        else:
            total = sum(given)
        by = len(given) if case.op == "average" else 1
        if case.postscale != 1:
            return cut(float(total) * case.postscale / by)
        return abs(total) // by * (1 if total >= 0 else -1)

    with np.errstate(over="ignore"):
        totals = [
            reduced(list(column)) % 2**bits for column in zip(*(x.tolist() for x in everyone), strict=True)
        ]
    return np.array(totals, np.uint64).astype(case.dtype.as_numpy_dtype)


def exact_floats(case: Reduction, everyone: list[Any]) -> Any:
    """Return the result in rank order; of half types in float32, rounded once."""
    kind = case.dtype.as_numpy_dtype
    wide = np.float64 if case.dtype == tf.float64 else np.float32
    with np.errstate(all="ignore"):
        given = [x.astype(wide) * wide(case.prescale) for x in everyone]
        total = given[0]
        for each in given[1:]:
            total = {
                "min": np.minimum,
                "max": np.maximum,
                "product": np.multiply,
            }.get(case.op, np.add)(total, each)
        by = len(given) if case.op == "average" else 1
        return (total * wide(case.postscale / by)).astype(kind)


@settings(
    max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(case=REDUCTIONS)
def test_reductions_are_exact(case: Reduction) -> None:
    """Regression: sums of short integers saturated over MPI, averages of integers and halves overflowed."""
    everyone = [numbers_of(case, rank) for rank in range(hvd.size())]
    mine = tf.constant(everyone[hvd.rank()])
    how = {"op": OPS[case.op], "prescale_factor": case.prescale, "postscale_factor": case.postscale}
    found = (hvd.reducescatter if case.scatters else hvd.allreduce)(mine, **how).numpy()
    exact = exact_integers if case.dtype.is_integer else exact_floats
    expected = exact(case, everyone)
    if case.scatters:
        expected = np.array_split(expected, hvd.size())[hvd.rank()]
    assert found.dtype == expected.dtype
    close = case.dtype in WIDE
    with np.errstate(all="ignore"):
        equal = (
            np.isclose(
                found, expected, rtol=1e-5 if case.dtype == tf.float32 else 1e-12, atol=1e-3, equal_nan=True
            )
            if close
            else (found == expected) | ((found != found) & (expected != expected))
        )
    wrong = [(i, found[i], expected[i]) for i in np.flatnonzero(~equal)[:3]]
    bits = None if case.scatters else found.tobytes()
    told = hvpipe.allgather_object((wrong, bits))  # all ranks go on with the same example
    assert not any(wrong for wrong, _ in told), told
    assert len({bits for _, bits in told}) == 1


def test_the_order_of_ranks_does_not_matter_to_zeros() -> None:
    """Regression: which rank's zero a minimum was differed by rank and by transport."""
    mine = tf.constant([-0.0 if hvd.rank() == turn else 0.0 for turn in range(hvd.size() + 1)])
    for op, negative in ((hvd.Min, True), (hvd.Max, hvd.size() == 1)):
        found = np.signbit(hvd.allreduce(mine, op=op).numpy())
        assert found.tolist() == [*[negative] * hvd.size(), False]


@pytest.mark.three_suffice
def test_types_that_have_no_reduction() -> None:
    for call in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"should be .*Received: bool.*cast"):
            call(tf.fill([hvd.size()], True), op=hvd.Sum)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"should be .*Received: complex64"):
        tf.function(hvd.allgather)(tf.zeros([1], tf.complex64))
    if hvd.size() in (2, 4):
        with pytest.raises(tf.errors.InvalidArgumentError, match="Adasum should combine floating-point"):
            hvd.allreduce(tf.ones([2], tf.int32), op=hvd.Adasum)
