"""Compressed gradients: what the names stand for, and the buckets in which they travel.

"powersgd:4"    the factors P, Q and S of every matrix of gradients
"int8"          first the maximum of every block, and small gradients whole; then a byte for every number
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvpipe.errors import HvpipeError
from hvpipe.plan.buckets import FIRST_PRIORITY, WIRE_DTYPE, Bucket, BucketPlan, Gradient

BLOCK = 256
"""Numbers that share a scale under "int8"."""
MOST_WHOLE = 4096
"""The most numbers of a gradient that travels whole under "int8": compressing takes longer than sending."""
MOST_RANKS = 63
"""Ranks that "int8" can serve: then a rank has 1.5 steps to each side of zero."""

Shape = tuple[int, ...]
Matrix = tuple[int, int]
"""Rows and columns."""
Parts = tuple[Shape, Shape | None]
"""The shapes of what travels in the first and in the second phase."""


@dataclass(frozen=True)
class PowerSgd:
    """Low-rank factors (see `PowerSgdCompressor`). `rank` is their width."""

    rank: int

    def matrix(self, shape: Shape) -> Matrix | None:
        """Return the rows and columns of a gradient; None if its factors would not be smaller.

        Of the ways to group its axes, that with the smallest factors counts.
        """
        ways = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
        rows, columns = min(ways, key=sum, default=(0, 0))
        numbers = sum(map(math.prod, self.factors((rows, columns))))
        return (rows, columns) if numbers < rows * columns else None

    def factors(self, matrix: Matrix) -> tuple[Shape, Shape, Shape]:
        """Return the shapes of P, Q and S."""
        rows, columns = matrix
        return (rows, self.rank), (columns, self.rank), (self.rank, self.rank)


@dataclass(frozen=True)
class Int8:
    """A byte for each number, and a scale for each BLOCK of them."""

    def parts(self, gradient: Gradient) -> Parts:
        """Return the shapes of the blocks' maxima and of the bytes. Small gradients travel whole at first."""
        if gradient.count <= MOST_WHOLE:
            return gradient.shape, None
        return (-(-gradient.count // BLOCK),), gradient.shape


Compression = PowerSgd | Int8


def compression_named(compression: str | None) -> Compression | None:
    """Return what a compression does to gradients; None if they only change their type, or nothing.

    Raises:
        HvpipeError: The name is unknown.
    """
    if compression is None or compression in WIRE_DTYPE:
        return None
    if compression == "int8":
        return Int8()
    name, _, rank = compression.partition(":") if isinstance(compression, str) else ("", "", "")
    if name == "powersgd" and rank.isdecimal() and int(rank) > 0:
        return PowerSgd(int(rank))
    raise HvpipeError(
        "compression should be None, 'bf16', 'fp16', 'int8', or 'powersgd:R' with a rank R of 1 or more. "
        f"Received: compression={compression!r}"
    )


def _compressible(bucket: Bucket) -> bool:
    """Tell whether a bucket is of float32, and no table that sends rows."""
    return bucket.dtype == bucket.wire_dtype == "float32" and not bucket.row


def _plan_of(plan: BucketPlan, compression: Compression, buckets: Sequence[Bucket]) -> BucketPlan:
    """Return the plan of the buckets that are sent for `plan`."""
    text = repr((plan.signature, compression, buckets))
    signature = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return BucketPlan(tuple(buckets), signature)


# --- Factors --------------------------------------------------------------------------------------------


def in_factors(
    plan: BucketPlan, gradients: Sequence[Gradient], compression: PowerSgd
) -> tuple[BucketPlan, tuple[dict[int, Matrix], ...]]:
    """Return the buckets that are sent, and for each the rows and columns of members that travel as factors.

    A bucket has the factors of each of these members, then the other members whole. Only float32 is
    compressed, and no table that sends rows.

    Args:
        plan: The buckets of gradients, which are updated together.
        gradients: The gradients.
        compression: The factors' width.
    """
    sent, factored = [], []
    for bucket in plan.buckets:
        matrices: dict[int, Matrix] = {}
        if _compressible(bucket):
            found = {m: compression.matrix(gradients[place].shape) for m, place in enumerate(bucket.members)}
            matrices = {member: matrix for member, matrix in found.items() if matrix is not None}
        factors = [math.prod(shape) for matrix in matrices.values() for shape in compression.factors(matrix)]
        whole = [count for member, count in enumerate(bucket.counts) if member not in matrices]
        sent.append(replace(bucket, counts=(*factors, *whole)))
        factored.append(matrices)
    return _plan_of(plan, compression, sent), tuple(factored)


# --- Two phases -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhasedBucket:
    """How a bucket of gradients travels.

    Attributes:
        first: The number of its bucket in the first phase; None if all of it travels whole.
        second: The number of its bucket in the second phase.
        in_first: The members that have a part in the first phase, with the shape of this part.
        in_second: The same for the second phase. Members in only one of them travel whole.
    """

    first: int | None
    second: int
    in_first: dict[int, Shape]
    in_second: dict[int, Shape]

    @property
    def compressed(self) -> list[int]:
        """The members that have two parts."""
        return [member for member in self.in_first if member in self.in_second]


def in_phases(
    plan: BucketPlan, gradients: Sequence[Gradient], compression: Int8
) -> tuple[BucketPlan, tuple[PhasedBucket, ...]]:
    """Return the buckets that are sent, and which of them carry each bucket of `plan`.

    All first phases come before all second ones. A second phase waits for the sums of its first, and within
    a host buckets are reduced in this order. Only float32 is compressed, and no table that sends rows.

    Args:
        plan: The buckets of gradients, which are updated together.
        gradients: The gradients.
        compression: How to compress them.
    """
    firsts: list[Bucket] = []
    seconds: list[Bucket] = []
    phased = []
    for bucket in plan.buckets:
        members = [gradients[place] for place in bucket.members]
        parts = [compression.parts(gradient) for gradient in members] if _compressible(bucket) else []
        in_first = {member: first for member, (first, _) in enumerate(parts)}
        in_second = {member: second for member, (_, second) in enumerate(parts) if second is not None}
        found = PhasedBucket(len(firsts), len(seconds), in_first, in_second)
        if not found.compressed:
            whole = {member: gradient.shape for member, gradient in enumerate(members)}
            phased.append(PhasedBucket(None, len(seconds), {}, whole))
            seconds.append(bucket)
            continue
        phased.append(found)
        counts = tuple(map(math.prod, in_first.values()))
        name = f"first of {bucket.name}"
        firsts.append(replace(bucket, name=name, counts=counts, priority=FIRST_PRIORITY))
        counts = tuple(map(math.prod, in_second.values()))
        seconds.append(replace(bucket, counts=counts, dtype="int8", wire_dtype="int8"))
    numbered = (replace(each, second=each.second + len(firsts)) for each in phased)
    return _plan_of(plan, compression, [*firsts, *seconds]), tuple(numbered)
