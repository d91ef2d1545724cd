"""The arithmetic of compressed gradients. What all ranks compute from sums is equal on all of them.

int8        gradient + error --first--> maxima --sum over ranks--> second --> bytes --sum--> decoded
                                                                     |
                                                                  new error

powersgd    gradient + error --first--> a factor --sum over ranks--> decoded
                               |                                        |
                            new error                         factor of the next step

Everything here is a pure function of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvpipe.keras.gpu import has_gpu, on_the_host
from hvpipe.keras.ops import library
from hvpipe.plan.compression import BLOCK, FactoredBucket, Shape

_LARGEST = 127.0
_SMALLEST_SCALE = 1e-37


# --- PowerSGD -------------------------------------------------------------------------------------------


class PowerSgdCompressor:
    """A matrix M becomes P = M Q in one step, with an orthogonal Q, and Q = M^T P in the next.

    The sum of P over ranks, times Q^T, is the reduced gradient; made orthogonal, it is the P of the next step.
    This is ACP-SGD: Zhang, Zhang, Shi, Chu and Li, Evaluation and Optimization of Gradient Compression for
    Distributed Deep Learning, ICDCS 2023. Two steps do what one does in PowerSGD: Vogels, Karimireddy and
    Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS 2019.

    Args:
        shape: Of the gradient.
        matrix: Its rows and columns.
        width: The rank of the factors.
        seed: Of the first factors.
    """

    def __init__(self, shape: Shape, matrix: tuple[int, int], width: int, seed: int) -> None:
        self._shape, self._matrix, self._width, self._seed = shape, matrix, width, seed

    def start(self) -> tuple[Any, Any]:
        """Return orthogonal P (rows x width) and Q (columns x width), random and equal on all ranks."""
        random = np.random.default_rng(self._seed)
        left, right = (random.normal(size=(length, self._width)) for length in self._matrix)
        return tuple(np.linalg.qr(each)[0].astype(np.float32) for each in (left, right))

    def part_shape(self, sends_left: bool) -> Shape:
        """Return the shape of what a step sends."""
        return self._matrix[0 if sends_left else 1], self._width

    def first(self, sends_left: bool, given: Any, left: Any, right: Any) -> tuple[Any, Any]:
        """Return this rank's factor, and what it leaves out of `given`: 0 if the factor is not finite."""
        matrix = tf.reshape(given, self._matrix)
        if sends_left:
            mine = tf.linalg.matmul(matrix, right)
            sent = tf.linalg.matmul(mine, right, transpose_b=True)
        else:
            mine = tf.linalg.matmul(matrix, left, transpose_a=True)
            sent = tf.linalg.matmul(left, mine, transpose_b=True)
        finite = tf.reduce_all(tf.math.is_finite(mine))
        return mine, _error_if(finite, tf.reshape(matrix - sent, self._shape))

    def decoded(self, sends_left: bool, total: Any, left: Any, right: Any) -> Any:
        """Return the reduced gradient."""
        left, right = (total, right) if sends_left else (left, total)
        return tf.reshape(tf.linalg.matmul(left, right, transpose_b=True), self._shape)

    def factors(self, sends_left: bool, total: Any, left: Any, right: Any) -> tuple[Any, Any]:
        """Return P and Q for the next step. A sum that is not finite, or 0, changes nothing."""
        norm = tf.norm(total)
        usable = tf.math.is_finite(norm) & (norm > 0.0)
        before = left if sends_left else right
        # By Householder reflections: always orthogonal, even where columns depend on each other.
        after = tf.cond(usable, lambda: tf.linalg.qr(total)[0], lambda: tf.identity(before))
        return (after, right) if sends_left else (left, after)


class BucketFactors:
    """The functions of `PowerSgdCompressor` for all matrices of a bucket, in a step with the number `turn`.

    Args:
        factored: What travels.
        compressors: By member of `factored.matrices`, in its order.
    """

    def __init__(self, factored: FactoredBucket, compressors: Sequence[PowerSgdCompressor]) -> None:
        self._factored = factored
        self._compressors = dict(zip(factored.matrices, compressors, strict=True))

    def first(
        self,
        turn: Any,
        share: Any,
        gradients: Sequence[Any],
        errors: Sequence[Any],
        lefts: Sequence[Any],
        rights: Sequence[Any],
    ) -> tuple[Any, list[Any]]:
        """Return the buffer that this rank sends, and the new errors."""
        given = [gradient * share + error for gradient, error in zip(gradients, errors, strict=True)]

        def of_turn(sends: Sequence[bool]) -> tuple[Any, list[Any]]:
            found = [
                each.first(*four) for each, four in self._each(zip(sends, given, lefts, rights, strict=True))
            ]
            flat = tf.concat([tf.reshape(part, [-1]) for part, _ in found], axis=0)
            return tf.pad(flat, [[0, self._factored.numbers - flat.shape[0]]]), [error for _, error in found]

        return self._in_turn(turn, of_turn)

    def decoded(self, turn: Any, buffer: Any, lefts: Sequence[Any], rights: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients from the sum of all ranks' buffers."""

        def of_turn(sends: Sequence[bool]) -> list[Any]:
            totals = self._totals(buffer, sends)
            return [
                each.decoded(*four)
                for each, four in self._each(zip(sends, totals, lefts, rights, strict=True))
            ]

        return self._in_turn(turn, of_turn)

    def factors(
        self, turn: Any, buffer: Any, lefts: Sequence[Any], rights: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return all P and all Q for the next step."""

        def of_turn(sends: Sequence[bool]) -> tuple[list[Any], list[Any]]:
            totals = self._totals(buffer, sends)
            found = [
                each.factors(*four)
                for each, four in self._each(zip(sends, totals, lefts, rights, strict=True))
            ]
            return [left for left, _ in found], [right for _, right in found]

        with on_the_host():
            return self._in_turn(turn, of_turn)

    def _each(self, arguments: Any) -> Any:
        return zip(self._compressors.values(), arguments, strict=True)

    def _in_turn(self, turn: Any, function: Any) -> Any:
        """Return `function(whether each member sends P)` of an even or an odd turn."""
        even, odd = ([self._factored.sends_left(m, turn) for m in self._compressors] for turn in (0, 1))
        with on_the_host():
            is_even = turn % 2 == 0
        return tf.cond(is_even, lambda: function(even), lambda: function(odd))

    def _totals(self, buffer: Any, sends: Sequence[bool]) -> list[Any]:
        shapes = [each.part_shape(left) for each, left in zip(self._compressors.values(), sends, strict=True)]
        counts = list(map(math.prod, shapes))
        pieces = tf.split(buffer, [*counts, self._factored.numbers - sum(counts)])
        return [tf.reshape(piece, shape) for piece, shape in zip(pieces[:-1], shapes, strict=True)]


# --- int8 -----------------------------------------------------------------------------------------------


class Int8Compressor:
    """Each number becomes a byte: its multiple of the scale of its block.

    The scale of a block is the sum of all ranks' maxima divided by 127 - n / 2. All multiples of n ranks add
    up to 127 - n / 2 at most, and rounding adds half a step for each rank. So the sum of the bytes fits into
    a byte: exact, in any order.

    Args:
        shape: Of the gradient.
        ranks: How many ranks add up, at most MOST_RANKS.
    """

    def __init__(self, shape: Shape, ranks: int) -> None:
        self._shape = shape
        self._count = math.prod(shape)
        self._steps = _LARGEST - ranks / 2

    def first(self, gradient: Any, share: Any, error: Any) -> tuple[Any, Any]:
        """Return what this rank gives (its gradient, times its share, plus its error), and part 1 of it.

        Part 1 is the largest absolute value of each block.
        """
        given = gradient * share + error
        blocks = self._blocks(given)
        return given, tf.maximum(tf.reduce_max(blocks, axis=1), -tf.reduce_min(blocks, axis=1))

    def second(self, given: Any, total: Any) -> tuple[Any, Any, Any]:
        """Return the bytes, the scales, and what the bytes leave out, from the sum of part 1.

        That is 0 if a sum is not finite: it must not stay so.
        """
        blocks = self._blocks(given)
        scales = total / self._steps
        # Numbers so small that the inverse would be infinite stay in the error.
        inverse = tf.where(scales < _SMALLEST_SCALE, tf.zeros_like(scales), 1.0 / scales)
        steps = tf.round(blocks * inverse[:, None])
        error = _error_if(tf.reduce_all(tf.math.is_finite(total)), blocks - steps * scales[:, None])
        return tf.cast(self._flat(steps), tf.int8), scales, self._flat(error)

    def decoded(self, total: Any, scales: Any) -> Any:
        """Return the reduced gradient: the sum of all ranks' multiples of the scales."""
        return self._flat(self._blocks(tf.cast(total, tf.float32)) * scales[:, None])

    def _blocks(self, tensor: Any) -> Any:
        flat = tf.reshape(tensor, [self._count])
        missing = -self._count % BLOCK
        return tf.reshape(tf.pad(flat, [[0, missing]]) if missing else flat, [-1, BLOCK])

    def _flat(self, blocks: Any) -> Any:
        return tf.reshape(tf.reshape(blocks, [-1])[: self._count], self._shape)


class HostInt8Compressor(Int8Compressor):
    """The same values on the CPU, in one pass over the numbers each (csrc/base/int8_compression.h)."""

    def first(self, gradient: Any, share: Any, error: Any) -> tuple[Any, Any]:
        """Return what this rank gives, and the largest absolute value of each block of it."""
        given, maxima = library().hvpipe_int8_first(gradient=gradient, share=share, error=error, block=BLOCK)
        return given, maxima

    def second(self, given: Any, total: Any) -> tuple[Any, Any, Any]:
        """Return the bytes, the scales, and what the bytes leave out."""
        parts = library().hvpipe_int8_second(given=given, totals=total, block=BLOCK, steps=self._steps)
        return parts.bytes, parts.scales, parts.error

    def decoded(self, total: Any, scales: Any) -> Any:
        """Return the reduced gradient."""
        return library().hvpipe_int8_decode(sums=total, scales=scales, block=BLOCK)


def _error_if(finite: Any, error: Any) -> Any:
    """Return the error, or zeros. Unlike tf.where, this takes no pass over the error."""
    return tf.cond(finite, lambda: error, lambda: tf.zeros_like(error))


def int8_compressor(shape: Shape, ranks: int) -> Int8Compressor:
    """Return what compresses a gradient of this shape to bytes."""
    return (Int8Compressor if has_gpu() else HostInt8Compressor)(shape, ranks)
