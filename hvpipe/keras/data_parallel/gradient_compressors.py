"""The arithmetic of compressed gradients. What all ranks compute from sums is equal on all of them.

int8        gradient + error --first--> maxima --sum over ranks--> second --> bytes --sum--> decoded
                                                                     |
                                                                  new error

powersgd    gradient + error --first--> factors --sum over ranks--> decoded
                               |                                       |
                            new error                      factors of the next step

Everything here is a pure function of tensors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from hvpipe.keras.gpu import has_gpu
from hvpipe.keras.ops import library
from hvpipe.plan.compression import BLOCK, Matrix, Shape

_LARGEST = 127.0
_SMALLEST_SCALE = 1e-37


# --- PowerSGD -------------------------------------------------------------------------------------------


class PowerSgdCompressor:
    """A matrix M becomes P = M Y, Q = M^T X and S = X^T M Y.

    X and Y have R orthonormal columns, equal on all ranks. The reduced gradient is all of M's sum that X or Y
    reach, from the sums of P, Q and S:

        X X^T M + M Y Y^T - X X^T M Y Y^T = P Y^T + X (Q - Y S^T)^T

    Made orthonormal, the sums of P and Q are X and Y of the next step: both follow the gradients by power
    iteration. PowerSGD (Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization, NeurIPS 2019) needs a second all-reduce, because its Q waits for the sum of P.

    S could follow from P. But such a sum over rows depends on a rank's number of threads in the last bit.

    Args:
        shape: Of the gradient.
        matrix: Its rows and columns.
        width: R, the rank of the factors.
        seed: Of the first X and Y.
    """

    def __init__(self, shape: Shape, matrix: Matrix, width: int, seed: int) -> None:
        self._shape, self._matrix, self._width, self._seed = shape, matrix, width, seed

    def start(self) -> tuple[Any, Any]:
        """Return the first X (rows x R) and Y (columns x R): random, and equal on all ranks."""
        random = np.random.default_rng(self._seed)
        left, right = (random.normal(size=(rows, self._width)).astype(np.float32) for rows in self._matrix)
        return tf.linalg.qr(left)[0], tf.linalg.qr(right)[0]

    def first(self, gradient: Any, share: Any, error: Any, left: Any, right: Any) -> tuple[list[Any], Any]:
        """Return this rank's P, Q and S, and what they leave out.

        That is 0 if they are not finite: it must not stay so.
        """
        matrix = tf.reshape(gradient * share + error, self._matrix)
        p, q = tf.linalg.matmul(matrix, right), tf.linalg.matmul(matrix, left, transpose_a=True)
        parts = [p, q, tf.linalg.matmul(left, p, transpose_a=True)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in parts])
        rest = _error_if(finite, matrix - _product(p, q, parts[2], left, right))
        return parts, tf.reshape(rest, self._shape)

    def decoded(self, p: Any, q: Any, s: Any, left: Any, right: Any) -> Any:
        """Return the reduced gradient from the sums of P, Q and S."""
        return tf.reshape(_product(p, q, s, left, right), self._shape)


def _product(p: Any, q: Any, s: Any, left: Any, right: Any) -> Any:
    rest = q - tf.linalg.matmul(right, s, transpose_b=True)
    return tf.linalg.matmul(tf.concat([p, left], 1), tf.concat([right, rest], 1), transpose_b=True)


def next_factors(total: Any, before: Any) -> Any:
    """Return X or Y of the next step from the sum of P or Q; as before if that is not finite, or 0."""
    norm = tf.norm(total)
    # By Householder reflections: always orthogonal, even where columns depend on each other.
    return tf.where(tf.math.is_finite(norm) & (norm > 0.0), tf.linalg.qr(total)[0], before)


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
