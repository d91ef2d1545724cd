"""Reduces compressed gradients: each rank keeps what a sum leaves out, its error.

The last sum of a bucket may go on during the next step, as the sum of a bucket that is not compressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.bucket_reduce import BucketReducer, ReduceOptions
from hvpipe.keras.data_parallel.gradient_compressors import (
    PowerSgdCompressor,
    int8_compressor,
    next_factors,
)
from hvpipe.keras.data_parallel.same_bits import same_bits
from hvpipe.keras.gpu import on_the_host
from hvpipe.plan.buckets import BucketPlan
from hvpipe.plan.compression import (
    MOST_RANKS,
    Int8,
    Matrix,
    PhasedBucket,
    PowerSgd,
    Shape,
    compression_named,
    in_factors,
    in_phases,
)
from hvpipe.session import Session


def make_reducer(
    session: Session, name: str, variables: Sequence[Any], options: ReduceOptions
) -> BucketReducer:
    """Return the reducer that `options.compression` asks for. For the arguments see BucketReducer."""
    kinds = {Int8: Int8Reducer, PowerSgd: FactorReducer}
    kind = kinds.get(type(compression_named(options.compression)), BucketReducer)
    return kind(session, name, variables, options)


def check_gradient_compression(session: Session, compression: str | None) -> None:
    """Raise HvpipeError unless these ranks support this compression."""
    asked = compression_named(compression)
    if asked is not None and session.settings.elastic:
        raise HvpipeError(
            "--elastic needs compression=None, 'bf16' or 'fp16': a lost rank takes its compression errors "
            f"along. Received: compression={compression!r}"
        )
    if isinstance(asked, Int8) and session.world.size > MOST_RANKS:
        raise HvpipeError(
            f"compression='int8' needs {MOST_RANKS} ranks or less, because the sum of all ranks' numbers "
            f"must fit into a byte. Received: {session.world.size} ranks"
        )


def check_compressible(optimizer: Any, compression: str | None) -> None:
    """Raise HvpipeError if the errors of compression could not be added to the optimizer's gradients."""
    if compression_named(compression) is not None and isinstance(
        optimizer, keras.optimizers.LossScaleOptimizer
    ):
        raise HvpipeError(
            f"compression={compression!r} needs unscaled gradients: it adds what one step leaves out to the "
            "next, whose scale may differ. Use 'bf16' or 'fp16', or the policy mixed_bfloat16. "
            f"Received: optimizer {optimizer.name}, a LossScaleOptimizer"
        )


# --- int8: two phases -----------------------------------------------------------------------------------


class _Int8Bucket:
    """What a bucket keeps from one phase, or one step, to the next.

    Attributes:
        errors: By member: what the bytes have left out so far, on this rank.
        kept: By member: the scales of the bytes that are under way, or a sum that travelled whole in the
            first phase; equal on all ranks.
    """

    def __init__(self, phased: PhasedBucket, shapes: Sequence[Shape], ranks: int) -> None:
        compressors = [int8_compressor(shapes[member], ranks) for member in phased.compressed]
        self.errors = {member: _variable(tf.zeros(shapes[member])) for member in phased.compressed}
        with on_the_host():
            self.kept = {member: _variable(tf.zeros(shape)) for member, shape in phased.in_first.items()}

        def first(gradients: Sequence[Any], share: Any, errors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            each = zip(compressors, gradients, errors, strict=True)
            given, parts = zip(*(c.first(gradient, share, error) for c, gradient, error in each), strict=True)
            return list(given), list(parts)

        def second(given: Sequence[Any], totals: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
            each = zip(compressors, given, totals, strict=True)
            parts, scales, errors = zip(*(c.second(mine, total) for c, mine, total in each), strict=True)
            return list(parts), list(scales), list(errors)

        def decoded(totals: Sequence[Any], scales: Sequence[Any]) -> list[Any]:
            return [c.decoded(t, s) for c, t, s in zip(compressors, totals, scales, strict=True)]

        self.first, self.second, self.decoded = same_bits(first), same_bits(second), same_bits(decoded)


class Int8Reducer(BucketReducer):
    """Reduces the gradients of one list of variables in two parts each, with error feedback.

        submit    maxima | sum over ranks | bytes | sum over ranks ....
        collect                                                   .... | decoded | update

    For the arguments see BucketReducer.
    """

    def __init__(self, session: Session, name: str, variables: Sequence[Any], options: ReduceOptions) -> None:
        self._sent: BucketPlan
        self._phased: tuple[PhasedBucket, ...]
        super().__init__(session, name, variables, options)
        with tf.init_scope():
            self._buckets = [
                _Int8Bucket(phased, self._shapes(number), session.world.size)
                for number, phased in enumerate(self._phased)
            ]

    def _plan_to_send(self) -> BucketPlan:
        assert isinstance(self._compression, Int8)
        self._sent, self._phased = in_phases(self.plan, self._gradients, self._compression)
        return self._sent

    def state(self) -> dict[str, Any]:
        """Return the errors, by the places of their variables."""
        return {
            f"error/{bucket.members[member]}": variable
            for bucket, kept in zip(self.plan.buckets, self._buckets, strict=True)
            for member, variable in kept.errors.items()
        }

    def _send(self, number: int, share: Any, tensors: Sequence[Any]) -> Any:
        phased, bucket = self._phased[number], self._buckets[number]
        if phased.first is None:
            return self._submit(phased.second, share, tensors)
        factor = tf.cast(share, tf.float32)
        given, parts = bucket.first([tensors[m] for m in phased.compressed], factor, _read(bucket.errors))
        part_of = dict(zip(phased.compressed, parts, strict=True))
        mine = [part_of[m] if m in part_of else tensors[m] * factor for m in phased.in_first]
        one = tf.ones_like(share)
        token = self._submit(phased.first, one, mine)
        sums = self._collect(phased.first, token, [tuple(part.shape) for part in mine], "float32")
        totals = dict(zip(phased.in_first, sums, strict=True))
        parts, scales, errors = bucket.second(given, [totals[member] for member in phased.compressed])
        totals |= zip(phased.compressed, scales, strict=True)
        _assign(bucket.kept, [totals[member] for member in bucket.kept])
        _assign(bucket.errors, errors)
        return self._submit(phased.second, one, parts)

    def collect(self, number: int, token: Any) -> list[Any]:
        """Return the reduced gradients of bucket `number`, in the order of its members."""
        phased, bucket = self._phased[number], self._buckets[number]
        dtype = self._sent.buckets[phased.second].dtype
        sums = self._collect(phased.second, token, list(phased.in_second.values()), dtype)
        if phased.first is None:
            return sums
        kept = dict(zip(bucket.kept, _read(bucket.kept), strict=True))
        gradients = bucket.decoded(sums, [kept[member] for member in phased.compressed])
        reduced = kept | dict(zip(phased.compressed, gradients, strict=True))
        return [reduced[member] for member in range(len(reduced))]


# --- PowerSGD: all factors in one bucket ----------------------------------------------------------------


class _FactoredBucket:
    """What a bucket keeps from one step to the next.

    Attributes:
        errors: By member: what the factors have left out so far, on this rank.
        lefts: By member: X of PowerSgdCompressor; equal on all ranks.
        rights: By member: Y, likewise.
    """

    def __init__(
        self, matrices: Mapping[int, Matrix], shapes: Sequence[Shape], places: Sequence[int], width: int
    ) -> None:
        compressors = [
            PowerSgdCompressor(shapes[m], matrix, width, places[m]) for m, matrix in matrices.items()
        ]
        self.errors = {member: _variable(tf.zeros(shapes[member])) for member in matrices}
        with on_the_host():
            starts = dict(zip(matrices, (each.start() for each in compressors), strict=True))
            self.lefts = {member: _variable(left) for member, (left, _) in starts.items()}
            self.rights = {member: _variable(right) for member, (_, right) in starts.items()}

        def first(share: Any, *of_members: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            each = zip(compressors, *of_members, strict=True)
            found = [compressor.first(gradient, share, *kept) for compressor, gradient, *kept in each]
            return [part for parts, _ in found for part in parts], [error for _, error in found]

        def decoded(parts: Sequence[Any], lefts: Sequence[Any], rights: Sequence[Any]) -> list[Any]:
            each = zip(compressors, parts[::3], parts[1::3], parts[2::3], lefts, rights, strict=True)
            return [compressor.decoded(*five) for compressor, *five in each]

        def following(parts: Sequence[Any], before: Sequence[Any]) -> list[Any]:
            with on_the_host():
                return list(map(next_factors, parts, before))

        self.first, self.decoded, self.following = same_bits(first), same_bits(decoded), same_bits(following)


class FactorReducer(BucketReducer):
    """Reduces the gradients of one list of variables as factors, with error feedback.

        submit    factors | sum over ranks ....
        collect                            .... | decoded | update
                                                | X and Y of the next step

    For the arguments see BucketReducer.
    """

    def __init__(self, session: Session, name: str, variables: Sequence[Any], options: ReduceOptions) -> None:
        self._code: PowerSgd
        self._factored: tuple[dict[int, Matrix], ...]
        super().__init__(session, name, variables, options)
        with tf.init_scope():
            self._buckets = [
                _FactoredBucket(matrices, self._shapes(number), bucket.members, self._code.rank)
                for number, (bucket, matrices) in enumerate(
                    zip(self.plan.buckets, self._factored, strict=True)
                )
            ]

    def _plan_to_send(self) -> BucketPlan:
        assert isinstance(self._compression, PowerSgd)
        self._code = self._compression
        sent, self._factored = in_factors(self.plan, self._gradients, self._code)
        return sent

    def state(self) -> dict[str, Any]:
        """Return the errors, X and Y, by the places of their variables."""
        return {
            f"{name}/{bucket.members[member]}": variable
            for bucket, kept in zip(self.plan.buckets, self._buckets, strict=True)
            for name, variables in (("error", kept.errors), ("left", kept.lefts), ("right", kept.rights))
            for member, variable in variables.items()
        }

    def _send(self, number: int, share: Any, tensors: Sequence[Any]) -> Any:
        matrices, bucket = self._factored[number], self._buckets[number]
        if not matrices:
            return self._submit(number, share, tensors)
        factor = tf.cast(share, tf.float32)
        kept = map(_read, (bucket.errors, bucket.lefts, bucket.rights))
        parts, errors = bucket.first(factor, [tensors[member] for member in matrices], *kept)
        _assign(bucket.errors, errors)
        whole = [tensor * factor for member, tensor in enumerate(tensors) if member not in matrices]
        return self._submit(number, tf.ones_like(share), [*parts, *whole])

    def collect(self, number: int, token: Any) -> list[Any]:
        """Return the reduced gradients of bucket `number`, in the order of its members."""
        matrices, bucket, shapes = self._factored[number], self._buckets[number], self._shapes(number)
        if not matrices:
            return super().collect(number, token)
        parts = [shape for matrix in matrices.values() for shape in self._code.factors(matrix)]
        whole = [member for member in range(len(shapes)) if member not in matrices]
        sums = self._collect(number, token, [*parts, *(shapes[member] for member in whole)], "float32")
        sums, others = sums[: len(parts)], sums[len(parts) :]
        lefts, rights = _read(bucket.lefts), _read(bucket.rights)
        gradients = bucket.decoded(sums, lefts, rights)
        _assign(bucket.lefts, bucket.following(sums[::3], lefts))
        _assign(bucket.rights, bucket.following(sums[1::3], rights))
        reduced = dict(zip(whole, others, strict=True)) | dict(zip(matrices, gradients, strict=True))
        return [reduced[member] for member in range(len(reduced))]


def _variable(value: Any) -> Any:
    return tf.Variable(value, dtype=tf.float32, trainable=False, name="hvpipe_compression")


def _read(variables: Mapping[int, Any]) -> list[Any]:
    return [variable.read_value() for variable in variables.values()]


def _assign(variables: Mapping[int, Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables.values(), values, strict=True):
        variable.assign(value)
