"""Gradient buckets: their members, their order, and when two bucket plans have the same signature."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvpipe.errors import HvpipeError
from hvpipe.plan.buckets import ITEM_BYTES, WIRE_DTYPE, Bucket, Gradient, cut_buckets, plan_buckets

COMPRESSIONS = (None, *WIRE_DTYPE)

gradients = st.builds(
    Gradient,
    name=st.text("abc/_01", max_size=6),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
)
models = st.lists(gradients, max_size=25)
caps = st.integers(1, 3000)
compressions = st.sampled_from(COMPRESSIONS)
quickly = settings(max_examples=100)


def bytes_of(gradient: Gradient) -> int:
    return gradient.count * ITEM_BYTES[gradient.dtype]


def test_a_model_worked_out_by_hand() -> None:
    model = [
        Gradient("embed", (100, 8), "float32"),  # 0: 3200 bytes, more than a bucket
        Gradient("norm", (8,), "float16"),  # 1:   16 bytes
        Gradient("dense/w", (8, 16), "float32"),  # 2:  512 bytes
        Gradient("dense/b", (16,), "float32"),  # 3:   64 bytes
        Gradient("norm2", (4,), "float16"),  # 4:    8 bytes
        Gradient("head/w", (16, 7), "float32"),  # 5:  448 bytes
        Gradient("head/b", (7,), "float32"),  # 6:   28 bytes
    ]
    # In reverse order: 28 + 448 + 64 = 540 bytes of float32. The next 512 would exceed 1000.
    plan = plan_buckets(model, 1000)
    assert plan.buckets == (
        Bucket("dense/b .. head/b", (6, 5, 3), (7, 112, 16), "float32", "float32", 3),
        Bucket("dense/w", (2,), (128,), "float32", "float32", 2),
        Bucket("norm .. norm2", (4, 1), (4, 8), "float16", "float16", 1),
        Bucket("embed", (0,), (800,), "float32", "float32", 0),
    )
    assert plan.wire_bytes == 3200 + 16 + 512 + 64 + 8 + 448 + 28
    assert [number for number, _ in plan.by_need()] == [3, 2, 1, 0]


def test_buckets_of_sizes_alone() -> None:
    assert cut_buckets([3, 1, 2, 2], 4) == [[3, 2], [1, 0]]
    assert cut_buckets([9, 0, 0, 1], 4) == [[3, 2, 1], [0]]  # above the limit: a bucket of its own
    assert cut_buckets([1, 1, 1], 4, ["a", "b", "a"]) == [[1], [2, 0]]
    assert cut_buckets([], 4) == []


def test_a_bucket_is_larger_where_nccl_carries_it() -> None:
    layers = [Gradient(str(place), (1_000_000,), "float32") for place in range(100)]
    assert {len(b.members) for b in plan_buckets(layers).buckets} == {1}
    assert max(len(b.members) for b in plan_buckets(layers, by_nccl=True).buckets) == 6  # 26.2 MB
    assert plan_buckets(layers[:8], by_nccl=True) == plan_buckets(layers[:8])  # an eighth each


def test_large_tables_are_sent_by_rows() -> None:
    model = [
        Gradient("embed", (100, 16), "float32", table=True),  # 0: 6400 bytes
        Gradient("kernel", (16, 16), "float32"),  # 1: 1024 bytes
        Gradient("small", (50, 16), "float32", table=True),  # 2: 3200 bytes, too small
        Gradient("narrow", (400, 8), "float32", table=True),  # 3: 12800 bytes, in rows of 32
        Gradient("wide", (100, 4, 8), "float16", table=True),  # 4: 6400 bytes, in rows of 32 elements
    ]
    plan = plan_buckets(model, 1 << 20, table_bytes=6400)
    assert [(bucket.members, bucket.row) for bucket in plan.buckets] == [
        ((4,), 32),
        ((3, 2, 1), 0),
        ((0,), 16),
    ]
    dense = plan_buckets(model, 1 << 20)
    assert [(bucket.members, bucket.row) for bucket in dense.buckets] == [((4,), 0), ((3, 2, 1, 0), 0)]
    assert plan.signature != dense.signature
    # The other gradients are cut as if there were no tables.
    left, rest = plan_buckets(model, table_bytes=6400), plan_buckets(model[1:4])
    assert [bucket.counts for bucket in left.buckets if not bucket.row] == [b.counts for b in rest.buckets]
    same = plan_buckets(
        [dataclasses.replace(gradient, table=False) for gradient in model], 1 << 20, table_bytes=1
    )
    assert same.buckets == dense.buckets


@pytest.mark.parametrize(("compression", "wire"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_compression_casts_only_float32(compression: str, wire: str) -> None:
    model = [Gradient(dtype, (10,), dtype) for dtype in ("float32", "float64", "float16", "bfloat16")]
    plan = plan_buckets(model, 1 << 20, compression)
    found = {bucket.dtype: bucket.wire_dtype for bucket in plan.buckets}
    assert found == {"float32": wire, "float64": "float64", "float16": "float16", "bfloat16": "bfloat16"}
    assert plan.wire_bytes == 20 + 80 + 20 + 20


@quickly
@given(models, caps, compressions)
def test_every_gradient_is_in_exactly_one_bucket(
    model: list[Gradient], cap: int, compression: str | None
) -> None:
    buckets = plan_buckets(model, cap, compression).buckets
    assert sorted(place for bucket in buckets for place in bucket.members) == list(range(len(model)))
    for bucket in buckets:
        assert bucket.members
        assert bucket.counts == tuple(model[place].count for place in bucket.members)


@quickly
@given(models, caps, compressions)
def test_a_bucket_has_one_dtype_and_is_no_larger_than_the_cap(
    model: list[Gradient], cap: int, compression: str | None
) -> None:
    for bucket in plan_buckets(model, cap, compression).buckets:
        assert {model[place].dtype for place in bucket.members} == {bucket.dtype}
        compressed = compression is not None and bucket.dtype == "float32"
        assert bucket.wire_dtype == (WIRE_DTYPE[compression] if compressed else bucket.dtype)
        assert bucket.wire_bytes == sum(bucket.counts) * (2 if compressed else ITEM_BYTES[bucket.dtype])
        sizes = [bytes_of(model[place]) for place in bucket.members]
        assert sum(sizes) <= cap or len(sizes) == 1


@quickly
@given(models, caps)
def test_a_bucket_ends_if_the_next_gradient_does_not_fit(model: list[Gradient], cap: int) -> None:
    for dtype in ITEM_BYTES:
        mine = [b for b in plan_buckets(model, cap).buckets if b.dtype == dtype]
        for bucket, following in pairwise(mine):
            filled = sum(bytes_of(model[place]) for place in bucket.members)
            assert filled + bytes_of(model[following.members[0]]) > cap


@quickly
@given(models, caps)
def test_buckets_are_in_backward_order_and_needed_in_reverse(model: list[Gradient], cap: int) -> None:
    plan = plan_buckets(model, cap)
    for bucket in plan.buckets:
        assert list(bucket.members) == sorted(bucket.members, reverse=True)
        assert bucket.priority == bucket.members[-1]
    # A bucket is complete once backward reaches its member with the lowest index.
    priorities = [bucket.priority for bucket in plan.buckets]
    assert priorities == sorted(priorities, reverse=True)
    assert [number for number, _ in plan.by_need()] == list(reversed(range(len(plan.buckets))))
    assert all(plan.buckets[number] is bucket for number, bucket in plan.by_need())


@quickly
@given(models, caps)
def test_ignoring_priority_sends_the_same_buckets_in_backward_order(model: list[Gradient], cap: int) -> None:
    plan, urgent = plan_buckets(model, cap, ignores_priority=True), plan_buckets(model, cap)
    assert [number for number, _ in plan.by_need()] == list(range(len(plan.buckets)))
    assert [b.members for b in plan.buckets] == [b.members for b in urgent.buckets]
    # Plans with another order have another signature, so that ranks that disagree are detected.
    assert (plan.signature == urgent.signature) == all(b.priority == 0 for b in urgent.buckets)


@quickly
@given(models, caps, compressions)
def test_equal_arguments_give_equal_plans(model: list[Gradient], cap: int, compression: str | None) -> None:
    first = plan_buckets(model, cap, compression)
    again = plan_buckets(tuple(dataclasses.replace(g) for g in model), cap, compression)
    assert again == first
    assert 0 <= first.signature < 1 << 64


def test_the_signature_does_not_depend_on_the_hash_seed() -> None:
    program = (
        "from hvpipe.plan.buckets import Gradient, plan_buckets\n"
        "model = [Gradient(str(i), (i, 3), 'float32' if i % 3 else 'float16') for i in range(40)]\n"
        "print(plan_buckets(model, 500, 'bf16').signature)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


@quickly
@given(st.lists(gradients, min_size=1, max_size=10), caps, compressions, st.data())
def test_any_difference_between_models_changes_the_signature(
    model: list[Gradient], cap: int, compression: str | None, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(model) - 1))
    one = model[place]
    changed = data.draw(
        st.sampled_from(
            [
                dataclasses.replace(one, name=one.name + "x"),
                dataclasses.replace(one, shape=(*one.shape, 1)),
                dataclasses.replace(one, dtype="float64" if one.dtype != "float64" else "float32"),
            ]
        )
    )
    signature = plan_buckets(model, cap, compression).signature
    assert (
        plan_buckets([*model[:place], changed, *model[place + 1 :]], cap, compression).signature != signature
    )
    assert plan_buckets([*model, one], cap, compression).signature != signature
    assert plan_buckets(model[:-1], cap, compression).signature != signature
    others = [plan_buckets(model, cap, c).signature for c in COMPRESSIONS if c != compression]
    assert signature not in others


def test_other_buckets_have_another_signature() -> None:
    model = [Gradient("a", (10,), "float32"), Gradient("b", (10,), "float32")]
    apart, together = plan_buckets(model, 40), plan_buckets(model, 80)
    assert (len(apart.buckets), len(together.buckets)) == (2, 1)
    assert apart.signature != together.signature
    # A limit of 4096 bytes cuts the same buckets as 80 bytes: the same plan.
    assert plan_buckets(model, 4096) == together


def test_a_model_without_gradients() -> None:
    plan = plan_buckets([], 100)
    assert plan.buckets == ()
    assert plan.wire_bytes == 0


def test_scalars_and_empty_variables_have_their_own_counts() -> None:
    model = [Gradient("scalar", (), "float32"), Gradient("empty", (0, 5), "float32")]
    (bucket,) = plan_buckets(model, 4).buckets
    assert bucket.counts == (0, 1)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(HvpipeError, match=r"Received: bucket_bytes=0"):
        plan_buckets([], 0)
    with pytest.raises(HvpipeError, match=r"float32, float64, float16, bfloat16.*Received: n of dtype=int32"):
        plan_buckets([Gradient("n", (1,), "int32")], 100)


@pytest.mark.parametrize(
    ("mebibytes", "sizes"),
    [
        (0.125, [64 << 10] * 2),
        (8, [1 << 20] * 8),
        (64, [4 << 20] * 16),
    ],
    ids=["small", "middle", "large"],
)
def test_by_default_a_small_model_has_several_buckets(mebibytes: float, sizes: list[int]) -> None:
    count = int(mebibytes * 2**20) // 4 // 32
    gradients = [Gradient(str(i), (count,), "float32") for i in range(32)]
    assert [bucket.wire_bytes for bucket in plan_buckets(gradients).buckets] == sizes
