"""Reduces compressed gradients: each bucket travels in two parts, and each rank keeps what both leave out.

    submit    part 1 | sum over ranks | part 2 | sum over ranks ....
    collect                                                    .... | decoded | update

The second sum may go on during the next step, as the sum of a bucket that is not compressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.bucket_reduce import BucketReducer, ReduceOptions
from hvpipe.keras.data_parallel.gradient_compressors import (
    GradientCompressor,
    compressor_of,
    decoded_of,
    first_of,
    second_of,
)
from hvpipe.keras.data_parallel.same_bits import same_bits
from hvpipe.keras.gpu import on_the_host
from hvpipe.plan.buckets import BucketPlan
from hvpipe.plan.compression import MOST_RANKS, Int8, PhasedBucket, compression_named, in_phases
from hvpipe.session import Session


def make_reducer(
    session: Session, name: str, variables: Sequence[Any], options: ReduceOptions
) -> BucketReducer:
    """Return the reducer that `options.compression` asks for. For the arguments see BucketReducer."""
    kind = BucketReducer if compression_named(options.compression) is None else CompressedReducer
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


@dataclass
class _CompressedBucket:
    """What a bucket keeps from one phase, or one step, to the next.

    Attributes:
        compressors: By member: what makes two parts of a gradient.
        errors: By member: what the parts have left out so far, on this rank.
        memories: By member: what the compressor uses again in the next step; equal on all ranks.
        kept: By member: what `decoded_of` needs of the parts that are under way, or a sum that travelled
            whole in the first phase; equal on all ranks.
    """

    compressors: dict[int, GradientCompressor] = field(default_factory=dict)
    errors: dict[int, Any] = field(default_factory=dict)
    memories: dict[int, Any] = field(default_factory=dict)
    kept: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first = same_bits(lambda *given: first_of([*self.compressors.values()], *given))
        self.second = same_bits(lambda *given: second_of([*self.compressors.values()], *given))
        self.decoded = same_bits(lambda *given: decoded_of([*self.compressors.values()], *given))

    def read(self, variables: Mapping[int, Any]) -> list[Any]:
        """Read a variable of each compressor; None where it has none."""
        return [variables[each].read_value() if each in variables else None for each in self.compressors]


class CompressedReducer(BucketReducer):
    """Reduces the gradients of one list of variables in two parts each, with error feedback.

    For the arguments see BucketReducer.
    """

    def __init__(self, session: Session, name: str, variables: Sequence[Any], options: ReduceOptions) -> None:
        self._sent: BucketPlan
        self._phased: tuple[PhasedBucket, ...]
        super().__init__(session, name, variables, options)
        with tf.init_scope():
            self._state = [self._make_state(number) for number in range(len(self._phased))]

    def _plan_to_send(self) -> BucketPlan:
        assert self._compression is not None
        self._sent, self._phased = in_phases(self.plan, self._gradients, self._compression)
        return self._sent

    def _make_state(self, number: int) -> _CompressedBucket:
        assert self._compression is not None
        state, phased = _CompressedBucket(), self._phased[number]
        size = self.session.world.size
        for member in phased.compressed:
            place = self.plan.buckets[number].members[member]
            shape = self._gradients[place].shape
            compressor = compressor_of(self._compression, shape, size, seed=place)
            state.compressors[member] = compressor
            state.errors[member] = _variable(tf.zeros(shape))
            memory = compressor.start()
            if memory is not None:
                with on_the_host():
                    state.memories[member] = _variable(memory)
        for member, shape in phased.in_first.items():
            with on_the_host():
                state.kept[member] = _variable(tf.zeros(shape))
        return state

    def state(self) -> dict[str, Any]:
        """Return the errors and memories, by the places of their variables."""
        found: dict[str, Any] = {}
        for bucket, state in zip(self.plan.buckets, self._state, strict=True):
            found |= {f"error/{bucket.members[member]}": v for member, v in state.errors.items()}
            found |= {f"memory/{bucket.members[member]}": v for member, v in state.memories.items()}
        return found

    def _send(self, number: int, share: Any, tensors: Sequence[Any]) -> Any:
        phased, state = self._phased[number], self._state[number]
        if phased.first is None:
            return self._submit(phased.second, share, tensors)
        factor = tf.cast(share, tf.float32)
        given, parts = state.first(
            [tensors[member] for member in phased.compressed],
            factor,
            state.read(state.errors),
            state.read(state.memories),
        )
        part_of = dict(zip(phased.compressed, parts, strict=True))
        mine = [part_of[m] if m in part_of else tensors[m] * factor for m in phased.in_first]
        one = tf.ones_like(share)
        token = self._submit(phased.first, one, mine)
        sums = self._collect(phased.first, token, [tuple(part.shape) for part in mine], "float32")
        totals = dict(zip(phased.in_first, sums, strict=True))
        parts, kept, errors = state.second(given, [totals[member] for member in phased.compressed])
        totals |= zip(phased.compressed, kept, strict=True)
        _assign(state.kept, totals)
        _assign(state.errors, dict(zip(phased.compressed, errors, strict=True)))
        part_of = dict(zip(phased.compressed, parts, strict=True))
        mine = [part_of[m] if m in part_of else tensors[m] * factor for m in phased.in_second]
        return self._submit(phased.second, one, mine)

    def collect(self, number: int, token: Any) -> list[Any]:
        """Return the reduced gradients of bucket `number`, in the order of its members."""
        phased, state = self._phased[number], self._state[number]
        dtype = self._sent.buckets[phased.second].dtype
        sums = self._collect(phased.second, token, list(phased.in_second.values()), dtype)
        if phased.first is None:
            return sums
        reduced = dict(zip(phased.in_second, sums, strict=True))
        gradients, memories = state.decoded(
            [reduced[member] for member in phased.compressed],
            state.read(state.kept),
            state.read(state.memories),
        )
        _assign(state.memories, dict(zip(phased.compressed, memories, strict=True)))
        reduced |= zip(phased.compressed, gradients, strict=True)
        for member in phased.in_first:
            if member not in reduced:
                reduced[member] = state.kept[member].read_value()
        return [reduced[member] for member in range(len(reduced))]


def _variable(value: Any) -> Any:
    return tf.Variable(value, dtype=tf.float32, trainable=False, name="hvpipe_compression")


def _assign(variables: Mapping[int, Any], values: Mapping[int, Any]) -> None:
    for member, variable in variables.items():
        variable.assign(values[member])
