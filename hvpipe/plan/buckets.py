"""Gradient buckets: which gradients share a fused buffer, in which order buffers travel, which goes first."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from hvpipe.errors import HvpipeError

ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of one element of each dtype that can be reduced."""

WIRE_DTYPE = {"bf16": "bfloat16", "fp16": "float16"}
"""The dtype that travels under each compression."""


def fitting_bytes(gradient_bytes: int) -> int:
    """The size of a fused buffer where none is said: 4 MiB; for less than 32 MiB of gradients an eighth of
    them, or else a small model's would travel in one piece when its backward is over; at least 64 KiB.
    """
    return min(4 << 20, max(64 << 10, gradient_bytes // 8))


@dataclass(frozen=True)
class Gradient:
    """One gradient: the name and the shape of its variable, and its dtype.

    `table`: a batch touches few of its rows, as an Embedding's; the others are zeros.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    table: bool = False

    @property
    def count(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def bytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]

    @property
    def row(self) -> int:
        """Elements of a row."""
        return self.count // self.shape[0] if self.shape and self.shape[0] else 0


@dataclass(frozen=True)
class Bucket:
    """Gradients (by their place in the model's list) that are reduced in one fused buffer.

    `dtype` is that of the gradients, `wire_dtype` that of the buffer. Buckets of low `priority` are needed
    first and overtake the others on the network; among equals goes first what was announced first.
    `row`, where it is not 0: elements of a row of a table, whose rows that are zero on all ranks stay.
    """

    name: str
    members: tuple[int, ...]
    counts: tuple[int, ...]
    dtype: str
    wire_dtype: str
    priority: int
    row: int = 0

    @property
    def wire_bytes(self) -> int:
        return sum(self.counts) * ITEM_BYTES[self.wire_dtype]


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of one training step, in the order in which backward completes them."""

    buckets: tuple[Bucket, ...]
    signature: int

    @property
    def wire_bytes(self) -> int:
        return sum(bucket.wire_bytes for bucket in self.buckets)

    def by_need(self) -> list[tuple[int, Bucket]]:
        """Buckets with their numbers, those that the next forward needs first in front."""
        return sorted(enumerate(self.buckets), key=lambda pair: (pair[1].priority, pair[0]))


def plan_buckets(
    gradients: Sequence[Gradient],
    bucket_bytes: int | None = None,
    compression: str | None = None,
    *,
    in_turn: bool = False,
    table_bytes: int | None = None,
) -> BucketPlan:
    """Cut a model's gradients, listed in the order of the forward, into buckets of up to `bucket_bytes`
    (None: as `fitting_bytes` says).

    Backward completes gradients roughly from the last layer to the first, so buckets are filled in the
    reverse order of the list (as PyTorch's DistributedDataParallel does: Li et al., VLDB 2020). A bucket
    holds one dtype; a gradient larger than `bucket_bytes` has one to itself. The plan depends on nothing
    but the arguments, so equal models get equal plans on all ranks.

    The layers that the next forward begins with have the lowest priority, and so go first; with `in_turn` all
    have the same, for steps whose gradients the next forward does not wait for.

    A table of `table_bytes` or more (None: no table) has a bucket to itself, which sends the rows that are
    not zero.
    """
    if bucket_bytes is None:
        known = [g for g in gradients if g.dtype in ITEM_BYTES]
        bucket_bytes = fitting_bytes(sum(g.bytes for g in known if not _sends_rows(g, table_bytes)))
    if bucket_bytes < 1:
        raise HvpipeError(f"bucket_bytes should be positive. Received: bucket_bytes={bucket_bytes}")
    open_members: dict[str, list[int]] = {}
    open_bytes: dict[str, int] = {}
    closed: list[list[int]] = []

    def close(dtype: str) -> None:
        if open_members.get(dtype):
            closed.append(open_members.pop(dtype))
        open_bytes[dtype] = 0

    for place in reversed(range(len(gradients))):
        gradient = gradients[place]
        if gradient.dtype not in ITEM_BYTES:
            raise HvpipeError(
                f"Gradients should be of {', '.join(ITEM_BYTES)}. "
                f"Received: {gradient.name} of dtype={gradient.dtype}"
            )
        size_bytes = gradient.bytes
        if _sends_rows(gradient, table_bytes):
            closed.append([place])
            continue
        if open_bytes.get(gradient.dtype, 0) + size_bytes > bucket_bytes:
            close(gradient.dtype)
        open_members.setdefault(gradient.dtype, []).append(place)
        open_bytes[gradient.dtype] = open_bytes.get(gradient.dtype, 0) + size_bytes
    for dtype in list(open_members):
        close(dtype)
    # The last gradient that comes (the lowest place) says when a bucket is complete.
    closed.sort(key=min, reverse=True)
    buckets = tuple(_bucket(members, gradients, compression, in_turn, table_bytes) for members in closed)
    text = repr((compression, [(g.name, g.shape, g.dtype) for g in gradients], buckets))
    signature = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return BucketPlan(buckets, signature)


def _sends_rows(gradient: Gradient, table_bytes: int | None) -> bool:
    """Ranks first tell each other which rows, two bytes for each: rows should be much more than that."""
    row_bytes = gradient.row * ITEM_BYTES[gradient.dtype]
    return gradient.table and table_bytes is not None and gradient.bytes >= table_bytes and row_bytes >= 64


def _bucket(
    members: Sequence[int],
    gradients: Sequence[Gradient],
    compression: str | None,
    in_turn: bool,
    table_bytes: int | None,
) -> Bucket:
    dtype = gradients[members[0]].dtype
    wire = WIRE_DTYPE[compression] if compression is not None and dtype == "float32" else dtype
    first, last = gradients[min(members)].name, gradients[max(members)].name
    return Bucket(
        name=first if first == last else f"{first} .. {last}",
        members=tuple(members),
        counts=tuple(gradients[place].count for place in members),
        dtype=dtype,
        wire_dtype=wire,
        priority=0 if in_turn else min(members),
        row=gradients[members[0]].row if _sends_rows(gradients[members[0]], table_bytes) else 0,
    )
