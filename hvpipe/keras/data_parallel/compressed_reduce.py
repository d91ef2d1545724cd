"""Reduces compressed gradients: each bucket travels in two parts, and each rank keeps what both leave out.

    submit    part 1 | sum over ranks | part 2 | sum over ranks ....
    collect                                                    .... | decoded | update

The second sum may go on during the next step, as the sum of a bucket that is not compressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.bucket_reduce import BucketReducer, ReduceOptions
from hvpipe.keras.data_parallel.gradient_codes import GradientCode, code_of, decoded_of, first_of, second_of
from hvpipe.keras.data_parallel.same_bits import same_bits
from hvpipe.keras.gpu import on_the_host
from hvpipe.plan.buckets import BucketPlan
from hvpipe.plan.compression import MOST_RANKS, Int8, PhasedBucket, code_named, in_phases
from hvpipe.session import Session


def make_reducer(
    session: Session, name: str, variables: Sequence[Any], options: ReduceOptions
) -> BucketReducer:
    """Return the reducer that `options.compression` asks for. For the arguments see BucketReducer."""
    kind = BucketReducer if code_named(options.compression) is None else CompressedReducer
    return kind(session, name, variables, options)


def check_gradient_compression(session: Session, compression: str | None) -> None:
    """Raise HvpipeError unless gradients can be compressed so between these ranks."""
    code = code_named(compression)
    if code is not None and session.settings.elastic:
        raise HvpipeError(
            "--elastic needs compression=None, 'bf16' or 'fp16': a lost rank takes its compression errors "
            f"along. Received: compression={compression!r}"
        )
    if isinstance(code, Int8) and session.world.size > MOST_RANKS:
        raise HvpipeError(
            f"compression='int8' needs {MOST_RANKS} ranks or less, because the sum of all ranks' numbers "
            f"must fit into a byte. Received: {session.world.size} ranks"
        )


def check_compressible(optimizer: Any, compression: str | None) -> None:
    """Raise HvpipeError if the errors of compression could not be added to the optimizer's gradients."""
    if code_named(compression) is not None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise HvpipeError(
            f"compression={compression!r} needs unscaled gradients: it adds what one step leaves out to the "
            "next, whose scale may differ. Use 'bf16' or 'fp16', or the policy mixed_bfloat16. "
            f"Received: optimizer {optimizer.name}, a LossScaleOptimizer"
        )


@dataclass
class _CodedBucket:
    """The gradients of a bucket that do not travel whole, and their variables.

    Attributes:
        members: Their places in the bucket.
        codes: What makes parts of them.
        errors: What their parts have left out so far, on this rank.
        memories: What the codes use again in the next step; equal on all ranks.
        kept: What `decoded_of` needs of the parts that are under way; equal on all ranks.
    """

    members: list[int] = field(default_factory=list)
    codes: list[GradientCode] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    memories: list[Any] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first = same_bits(lambda *given: first_of(self.codes, *given))
        self.second = same_bits(lambda *given: second_of(self.codes, *given))
        self.decoded = same_bits(lambda *given: decoded_of(self.codes, *given))


class CompressedReducer(BucketReducer):
    """Reduces the gradients of one list of variables in two parts each, with error feedback.

    For the arguments see BucketReducer.
    """

    def __init__(self, session: Session, name: str, variables: Sequence[Any], options: ReduceOptions) -> None:
        self._sent: BucketPlan
        self._phased: tuple[PhasedBucket, ...]
        super().__init__(session, name, variables, options)
        with tf.init_scope():
            self._coded = [self._make_coded(number) for number in range(len(self._phased))]

    def _plan_to_send(self) -> BucketPlan:
        assert self._code is not None
        self._sent, self._phased = in_phases(self.plan, self._gradients, self._code)
        return self._sent

    def _make_coded(self, number: int) -> _CodedBucket:
        assert self._code is not None
        coded = _CodedBucket()
        for member, parts in enumerate(self._phased[number].parts):
            if parts is None:
                continue
            place = self.plan.buckets[number].members[member]
            code = code_of(self._code, self._gradients[place].shape, self._session.world.size, seed=place)
            coded.members.append(member)
            coded.codes.append(code)
            coded.errors.append(_variable(tf.zeros(self._gradients[place].shape)))
            with on_the_host():
                coded.memories.append(_variable(code.start()))
                coded.kept.append(_variable(tf.zeros(parts[0])))
        return coded

    def state(self) -> dict[str, Any]:
        """Return the errors and memories, by the places of their variables."""
        found: dict[str, Any] = {}
        for bucket, coded in zip(self.plan.buckets, self._coded, strict=True):
            places = [bucket.members[member] for member in coded.members]
            found |= {f"error/{place}": v for place, v in zip(places, coded.errors, strict=True)}
            found |= {f"memory/{place}": v for place, v in zip(places, coded.memories, strict=True)}
        return found

    def _send(self, number: int, share: Any, tensors: Sequence[Any]) -> Any:
        phased, coded = self._phased[number], self._coded[number]
        if phased.first is None:
            return self._submit(phased.second, share, tensors)
        factor = tf.cast(share, tf.float32)
        given, mine = coded.first(
            [tensors[member] for member in coded.members],
            factor,
            [error.read_value() for error in coded.errors],
            [memory.read_value() for memory in coded.memories],
        )
        one = tf.ones_like(share)
        token = self._submit(phased.first, one, mine)
        shapes = [tuple(part.shape) for part in mine]
        totals = self._collect(phased.first, token, shapes, "float32")
        parts, kept, errors = coded.second(given, totals)
        _assign([*coded.kept, *coded.errors], [*kept, *errors])
        sent = [tensor * factor for tensor in tensors] if len(parts) < len(tensors) else list(tensors)
        for member, part in zip(coded.members, parts, strict=True):
            sent[member] = part
        return self._submit(phased.second, one, sent)

    def collect(self, number: int, token: Any) -> list[Any]:
        """Return the reduced gradients of bucket `number`, in the order of its members."""
        phased, coded = self._phased[number], self._coded[number]
        bucket = self.plan.buckets[number]
        shapes = [
            self._gradients[place].shape if parts is None else parts[1]
            for place, parts in zip(bucket.members, phased.parts, strict=True)
        ]
        dtype = self._sent.buckets[phased.second].dtype
        reduced = self._collect(phased.second, token, shapes, dtype)
        if phased.first is None:
            return reduced
        gradients, memories = coded.decoded(
            [reduced[member] for member in coded.members],
            [kept.read_value() for kept in coded.kept],
            [memory.read_value() for memory in coded.memories],
        )
        _assign(coded.memories, memories)
        for member, gradient in zip(coded.members, gradients, strict=True):
            reduced[member] = gradient
        return reduced


def _variable(value: Any) -> Any:
    return tf.Variable(value, dtype=tf.float32, trainable=False, name="hvpipe_compression")


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
