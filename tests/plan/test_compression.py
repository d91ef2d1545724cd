"""Compressed gradients: which names there are, what is sent in which phase, and how many bytes."""

from __future__ import annotations

import pytest

from hvpipe.errors import HvpipeError
from hvpipe.plan.buckets import Gradient, plan_buckets
from hvpipe.plan.compression import Int8, PowerSgd, compression_named, in_factors, in_phases

MODEL = [
    Gradient("words", (5000, 64), "float32", table=True),  # sends rows
    Gradient("conv", (3, 3, 64, 128), "float32"),
    Gradient("bias", (128,), "float32"),
    Gradient("half", (64, 64), "bfloat16"),
]


def test_names() -> None:
    assert [compression_named(name) for name in (None, "bf16", "fp16")] == [None] * 3
    assert compression_named("int8") == Int8()
    assert compression_named("powersgd:12") == PowerSgd(12)


@pytest.mark.parametrize(
    "name", ["powersgd", "powersgd:", "powersgd:0", "powersgd:x", "powersgd:-1", "int4", "", 8]
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(HvpipeError, match=r"'powersgd:R' with a rank R of 1 or more. Received: compression="):
        compression_named(name)


@pytest.mark.parametrize(
    ("shape", "rank", "matrix"),
    [
        ((3, 3, 64, 128), 4, (576, 128)),
        ((512, 8, 64), 4, (512, 512)),
        ((8, 64, 512), 4, (512, 512)),
        ((10, 10), 4, (10, 10)),
        ((10, 10), 5, None),  # more numbers than the matrix
        ((100,), 1, None),
        ((), 1, None),
        ((0, 5), 1, None),
    ],
)
def test_a_gradient_becomes_the_matrix_with_the_smallest_factors(
    shape: tuple[int, ...], rank: int, matrix: tuple[int, int] | None
) -> None:
    assert PowerSgd(rank).matrix(shape) == matrix


def test_int8_travels_in_two_phases() -> None:
    """The first phases come first. Tables that send rows, and other types than float32, travel as before."""
    plan = plan_buckets(MODEL, 1 << 20, table_bytes=1 << 20)
    assert [bucket.members for bucket in plan.buckets] == [(3,), (2, 1), (0,)]
    sent, phased = in_phases(plan, MODEL, Int8())
    assert [bucket.counts for bucket in sent.buckets] == [(128, 288), (4096,), (73728,), (320000,)]
    assert [(each.first, each.second) for each in phased] == [(None, 1), (0, 2), (None, 3)]
    assert sent.buckets[0].priority < min(bucket.priority for bucket in sent.buckets[1:])
    assert sent.buckets[1] == plan.buckets[0]
    assert sent.buckets[3] == plan.buckets[2]
    assert (sent.buckets[2].dtype, sent.buckets[2].wire_dtype) == ("int8", "int8")
    assert sent.signature != plan.signature


def test_powersgd_sends_the_factors_of_each_matrix_in_its_bucket() -> None:
    plan = plan_buckets(MODEL, 1 << 20, table_bytes=1 << 20)
    sent, factored = in_factors(plan, MODEL, PowerSgd(4))
    assert [bucket.counts for bucket in sent.buckets] == [(4096,), (576 * 4, 128 * 4, 16, 128), (320000,)]
    assert factored == ({}, {1: (576, 128)}, {})
    assert sent.buckets[0] == plan.buckets[0]
    assert sent.buckets[2] == plan.buckets[2]
    assert sent.signature != plan.signature
    assert sent.signature != in_factors(plan, MODEL, PowerSgd(3))[0].signature
