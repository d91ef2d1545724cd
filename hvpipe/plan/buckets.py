"""Gradient buckets: which gradients share a fused buffer, and which buffer the network sends first."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hvpipe.errors import HvpipeError

ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of one element of each dtype that can be reduced."""

WIRE_DTYPE = {"bf16": "bfloat16", "fp16": "float16"}
"""The dtype on the network under each compression that only casts."""

FIRST_PRIORITY = -1
"""Of what goes ahead of all buckets, after the engine's control records."""

_SENT_BYTES = {**ITEM_BYTES, "int8": 1}


def fitting_bytes(gradient_bytes: int, by_nccl: bool = False) -> int:
    """Return the bucket size for a model with `gradient_bytes` of gradients, if the user gives none.

    It is 4 MiB; 25 MiB if NCCL carries the gradients, because each bucket costs calls and kernels (the size
    is that of PyTorch's DistributedDataParallel). For a model with less than eight such buckets it is an
    eighth of its gradients, which would otherwise form a single bucket, sent only after the backward. It is
    at least 64 KiB.
    """
    return min((25 if by_nccl else 4) << 20, max(64 << 10, gradient_bytes // 8))


def cut_buckets(
    sizes_bytes: Sequence[int], bucket_bytes: int, kinds: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Group gradients into buckets. Training and forecasts both cut them here.

    Backward completes gradients roughly from the last layer to the first, so buckets fill up in the reverse
    order of the model (as PyTorch's DistributedDataParallel does: Li et al., VLDB 2020). A bucket closes when
    the next gradient would exceed `bucket_bytes`; a larger gradient has a bucket to itself. No gradient is
    split: its reduction begins when all of it has been packed.

    Args:
        sizes_bytes: Bytes of each gradient, in the order of the forward.
        bucket_bytes: Most bytes of a bucket with several gradients.
        kinds: A key for each gradient; only gradients of equal kind share a bucket. None: all share.

    Returns:
        The buckets in the order in which backward completes them. Each is a list of indices into
        `sizes_bytes`, highest first.

    Example:
        ```python
        cut_buckets([3, 1, 2, 2], bucket_bytes=4)  # [[3, 2], [1, 0]]
        ```
    """
    open_buckets: dict[Hashable, list[int]] = {}
    held_bytes: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    for place in reversed(range(len(sizes_bytes))):
        kind = None if kinds is None else kinds[place]
        if kind in open_buckets and held_bytes[kind] + sizes_bytes[place] > bucket_bytes:
            closed.append(open_buckets.pop(kind))
        if kind not in open_buckets:
            open_buckets[kind], held_bytes[kind] = [], 0
        open_buckets[kind].append(place)
        held_bytes[kind] += sizes_bytes[place]
    closed.extend(open_buckets.values())
    # Backward completes a bucket with the gradient of its lowest index.
    return sorted(closed, key=min, reverse=True)


@dataclass(frozen=True)
class Gradient:
    """One gradient: name and shape of its variable, and its dtype.

    `table` marks variables like an Embedding's table: a batch touches few rows, the other rows of the
    gradient are zero.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    table: bool = False

    @property
    def count(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def bytes(self) -> int:
        """Size in bytes, uncompressed."""
        return self.count * ITEM_BYTES[self.dtype]

    @property
    def row(self) -> int:
        """Number of elements in a row."""
        return self.count // self.shape[0] if self.shape and self.shape[0] else 0


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced in one fused buffer.

    `members` are indices into the model's list of gradients, `counts` their numbers of elements. `dtype` is
    the gradients' dtype, `wire_dtype` the buffer's. `row`, if not 0, is the number of elements in a row of a
    table; then only rows travel that are not zero on all ranks.

    `priority` says which bucket goes first. `plan_buckets` sets it; what compression sends ahead of a bucket
    has FIRST_PRIORITY. Three places obey it:

    - The engine's progress thread (csrc/progress/progress.cc, `TakeInbox`) decides the order *on the
      network*: of the operations under way, a lower number goes first, and of equal ones the bucket that
      comes first in this plan. In shared memory all ranks take the buckets in the order of the plan.
    - `BucketPlan.by_need` gives the order in which the training step *collects* buckets and updates their
      weights.
    - NCCL, which runs its calls in one order, gathers the buckets in this order (csrc/engine/announce.cc).
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
        """Bytes on the network, without headers."""
        return sum(self.counts) * _SENT_BYTES[self.wire_dtype]


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of one training step, in the order in which backward completes them.

    `signature` is equal on all ranks that planned for equal gradients with equal arguments.
    """

    buckets: tuple[Bucket, ...]
    signature: int

    @property
    def wire_bytes(self) -> int:
        """Bytes of all buckets on the network, without headers."""
        return sum(bucket.wire_bytes for bucket in self.buckets)

    def by_need(self) -> list[tuple[int, Bucket]]:
        """Return (number, bucket) pairs by priority: first the bucket that the next forward needs first."""
        return sorted(enumerate(self.buckets), key=lambda pair: (pair[1].priority, pair[0]))


def plan_buckets(
    gradients: Sequence[Gradient],
    bucket_bytes: int | None = None,
    compression: str | None = None,
    *,
    ignores_priority: bool = False,
    table_bytes: int | None = None,
    by_nccl: bool = False,
) -> BucketPlan:
    """Cut a model's gradients into buckets (see `cut_buckets`) and give each its priority.

    A bucket holds gradients of one dtype. The plan depends only on the arguments, so equal models get equal
    plans on all ranks.

    Args:
        gradients: The gradients, in the order of the forward.
        bucket_bytes: Most bytes of a bucket with several gradients; None for `fitting_bytes`.
        compression: None, "bf16" or "fp16"; it applies to float32 gradients.
        ignores_priority: Give all buckets the same priority, for steps whose gradients the next forward
            doesn't wait for. Otherwise the bucket that the next forward needs first has the lowest priority,
            and goes first.
        table_bytes: A table of this many bytes or more has a bucket to itself, which sends only the rows that
            are not zero. None: tables are like other gradients.
        by_nccl: Whether NCCL carries the buckets, for `fitting_bytes`.

    Returns:
        The buckets.

    Raises:
        HvpipeError: If `bucket_bytes` is below 1, or a dtype cannot be reduced.
    """
    for gradient in gradients:
        if gradient.dtype not in ITEM_BYTES:
            raise HvpipeError(
                f"Gradients should be of {', '.join(ITEM_BYTES)}. "
                f"Received: {gradient.name} of dtype={gradient.dtype}"
            )
    sends_rows = [_sends_rows(gradient, table_bytes) for gradient in gradients]
    if bucket_bytes is None:
        dense = (g.bytes for g, rows in zip(gradients, sends_rows, strict=True) if not rows)
        bucket_bytes = fitting_bytes(sum(dense), by_nccl)
    if bucket_bytes < 1:
        raise HvpipeError(f"bucket_bytes should be positive. Received: bucket_bytes={bucket_bytes}")
    # A table's kind is its own index, so it shares its bucket with nothing.
    kinds = [i if rows else gradients[i].dtype for i, rows in enumerate(sends_rows)]
    groups = cut_buckets([gradient.bytes for gradient in gradients], bucket_bytes, kinds)
    buckets = tuple(
        _bucket(
            members,
            gradients,
            compression,
            priority=0 if ignores_priority else min(members),
            row=gradients[members[0]].row if sends_rows[members[0]] else 0,
        )
        for members in groups
    )
    import hashlib

    text = repr((compression, [(g.name, g.shape, g.dtype) for g in gradients], buckets))
    signature = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return BucketPlan(buckets, signature)


def _sends_rows(gradient: Gradient, table_bytes: int | None) -> bool:
    """Tell whether to send rows only. Ranks first exchange two bytes per row, so rows must be much larger."""
    row_bytes = gradient.row * ITEM_BYTES[gradient.dtype]
    return gradient.table and table_bytes is not None and gradient.bytes >= table_bytes and row_bytes >= 64


def _bucket(
    members: Sequence[int], gradients: Sequence[Gradient], compression: str | None, *, priority: int, row: int
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
        priority=priority,
        row=row,
    )
