"""The arithmetic of compressed gradients: from a gradient to its two parts, and from their sums back.

    gradient + error --first--> part 1 --sum over ranks--> second --> part 2 --sum over ranks--> decoded
                                                              |
                                                           new error

Everything here is a pure function of tensors. What all ranks compute from sums is equal on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from hvpipe.keras.gpu import has_gpu, on_the_host
from hvpipe.keras.ops import library
from hvpipe.plan.compression import BLOCK, Compression, PowerSgd, Shape

_LARGEST = 127.0
_SMALLEST_SCALE = 1e-37


class GradientCompressor(Protocol):
    """How one gradient becomes two parts. `kept` goes from `second` to `decoded`, also into the next step."""

    def start(self) -> Any:
        """Return the first `memory` (array), equal on all ranks; None if the compressor has no memory."""

    def first(self, gradient: Any, share: Any, error: Any, memory: Any) -> tuple[Any, Any]:
        """Return what this rank gives (its gradient, times its share, plus its error), and part 1 of it."""

    def second(self, given: Any, total: Any) -> tuple[Any, Any, Any]:
        """Return part 2, `kept`, and the new error, from what this rank gives and the sum of part 1.

        The new error is 0 if a sum is not finite: it must not stay so.
        """

    def decoded(self, total: Any, kept: Any, memory: Any) -> tuple[Any, Any]:
        """Return the reduced gradient, and the memory for the next step."""


class PowerSgdCompressor:
    """A matrix M becomes P = M Q and, once P is orthogonal, Q = M^T P. The memory is Q of the step before.

    Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization, NeurIPS 2019, algorithms 1 and 2.

    Args:
        shape: Of the gradient.
        matrix: Its rows and columns.
        width: The rank of the factors.
        seed: Of the first Q.
    """

    def __init__(self, shape: Shape, matrix: tuple[int, int], width: int, seed: int) -> None:
        self._shape, self._matrix, self._width, self._seed = shape, matrix, width, seed

    def start(self) -> Any:
        """Return random numbers."""
        shape = self._matrix[1], self._width
        return np.random.default_rng(self._seed).normal(size=shape).astype(np.float32)

    def first(self, gradient: Any, share: Any, error: Any, memory: Any) -> tuple[Any, Any]:
        """Return what this rank gives, and P."""
        given = gradient * share + error
        return given, tf.linalg.matmul(tf.reshape(given, self._matrix), memory)

    def second(self, given: Any, total: Any) -> tuple[Any, Any, Any]:
        """Return this rank's Q, the orthogonal P, and what P and Q leave out."""
        with on_the_host():
            # By Householder reflections: always orthogonal, even where columns depend on each other.
            orthogonal, _ = tf.linalg.qr(total)
        matrix = tf.reshape(given, self._matrix)
        mine = tf.linalg.matmul(matrix, orthogonal, transpose_a=True)
        error = matrix - tf.linalg.matmul(orthogonal, mine, transpose_b=True)
        finite = tf.reduce_all(tf.math.is_finite(total)) & tf.reduce_all(tf.math.is_finite(mine))
        return mine, orthogonal, tf.reshape(_error_if(finite, error), self._shape)

    def decoded(self, total: Any, kept: Any, memory: Any) -> tuple[Any, Any]:
        """Return P Q^T, and Q. Q has norm 1, so that P neither overflows nor vanishes."""
        gradient = tf.reshape(tf.linalg.matmul(kept, total, transpose_b=True), self._shape)
        norm = tf.norm(total)
        usable = tf.math.is_finite(norm) & (norm > 0.0)
        return gradient, tf.where(usable, total / norm, memory)


class Int8Compressor:
    """Each number becomes a byte: its multiple of the scale of its block. No memory.

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

    def start(self) -> None:
        """Return None."""

    def first(self, gradient: Any, share: Any, error: Any, memory: Any) -> tuple[Any, Any]:
        """Return what this rank gives, and the largest absolute value of each block of it."""
        del memory
        given = gradient * share + error
        blocks = self._blocks(given)
        return given, tf.maximum(tf.reduce_max(blocks, axis=1), -tf.reduce_min(blocks, axis=1))

    def second(self, given: Any, total: Any) -> tuple[Any, Any, Any]:
        """Return the bytes, the scales, and what the bytes leave out."""
        blocks = self._blocks(given)
        scales = total / self._steps
        # Numbers so small that the inverse would be infinite stay in the error.
        inverse = tf.where(scales < _SMALLEST_SCALE, tf.zeros_like(scales), 1.0 / scales)
        steps = tf.round(blocks * inverse[:, None])
        error = _error_if(tf.reduce_all(tf.math.is_finite(total)), blocks - steps * scales[:, None])
        return tf.cast(self._flat(steps), tf.int8), scales, self._flat(error)

    def decoded(self, total: Any, kept: Any, memory: Any) -> tuple[Any, Any]:
        """Return the sum of all ranks' multiples of the scales."""
        return self._flat(self._blocks(tf.cast(total, tf.float32)) * kept[:, None]), memory

    def _blocks(self, tensor: Any) -> Any:
        flat = tf.reshape(tensor, [self._count])
        missing = -self._count % BLOCK
        return tf.reshape(tf.pad(flat, [[0, missing]]) if missing else flat, [-1, BLOCK])

    def _flat(self, blocks: Any) -> Any:
        return tf.reshape(tf.reshape(blocks, [-1])[: self._count], self._shape)


class HostInt8Compressor(Int8Compressor):
    """The same values on the CPU, in one pass over the numbers each (csrc/base/int8_compression.h)."""

    def first(self, gradient: Any, share: Any, error: Any, memory: Any) -> tuple[Any, Any]:
        """Return what this rank gives, and the largest absolute value of each block of it."""
        del memory
        given, maxima = library().hvpipe_int8_first(gradient=gradient, share=share, error=error, block=BLOCK)
        return given, maxima

    def second(self, given: Any, total: Any) -> tuple[Any, Any, Any]:
        """Return the bytes, the scales, and what the bytes leave out."""
        parts = library().hvpipe_int8_second(given=given, totals=total, block=BLOCK, steps=self._steps)
        return parts.bytes, parts.scales, parts.error

    def decoded(self, total: Any, kept: Any, memory: Any) -> tuple[Any, Any]:
        """Return the sum of all ranks' multiples of the scales."""
        return library().hvpipe_int8_decode(sums=total, scales=kept, block=BLOCK), memory


def _error_if(finite: Any, error: Any) -> Any:
    """Return the error, or zeros. Unlike tf.where, this takes no pass over the error."""
    return tf.cond(finite, lambda: error, lambda: tf.zeros_like(error))


def compressor_of(compression: Compression, shape: Shape, ranks: int, seed: int) -> GradientCompressor:
    """Return what compresses a gradient that does not travel whole."""
    if not isinstance(compression, PowerSgd):
        return (Int8Compressor if has_gpu() else HostInt8Compressor)(shape, ranks)
    matrix = compression.matrix(shape)
    assert matrix is not None
    return PowerSgdCompressor(shape, matrix, compression.rank, seed)


def first_of(
    compressors: Sequence[GradientCompressor],
    tensors: Sequence[Any],
    share: Any,
    errors: Sequence[Any],
    memories: Any,
) -> tuple[list[Any], list[Any]]:
    """Return what this rank gives, and part 1 of it, for each gradient of a bucket."""
    found = [
        c.first(t, share, e, m) for c, t, e, m in zip(compressors, tensors, errors, memories, strict=True)
    ]
    given, parts = zip(*found, strict=True)
    return list(given), list(parts)


def second_of(
    compressors: Sequence[GradientCompressor], given: Sequence[Any], totals: Sequence[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return parts 2, what is kept, and new errors, for each gradient of a bucket."""
    found = [c.second(g, t) for c, g, t in zip(compressors, given, totals, strict=True)]
    parts, kept, errors = zip(*found, strict=True)
    return list(parts), list(kept), list(errors)


def decoded_of(
    compressors: Sequence[GradientCompressor],
    totals: Sequence[Any],
    kept: Sequence[Any],
    memories: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Return reduced gradients, and memories, for each gradient of a bucket."""
    found = [c.decoded(t, k, m) for c, t, k, m in zip(compressors, totals, kept, memories, strict=True)]
    gradients, after = zip(*found, strict=True)
    return list(gradients), list(after)
