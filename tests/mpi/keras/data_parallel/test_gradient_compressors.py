"""The kernels of compression "int8" give the values of the same arithmetic in TensorFlow's operations."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvpipe.keras.data_parallel.gradient_compressors import HostInt8Compressor, Int8Compressor
from hvpipe.plan.compression import BLOCK

SHAPES = st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple) | st.just((2 * BLOCK,))


def every_result(code: Int8Compressor, gradient: Any, share: float, error: Any, ranks: int) -> list[Any]:
    """Return the results of all phases, as if all ranks had the same gradient."""
    mine, maxima = code.first(gradient, tf.constant(share), error)
    parts, scales, left = code.second(mine, maxima * ranks)
    decoded = code.decoded(parts * tf.constant(ranks, tf.int8), scales)
    return [np.asarray(found) for found in (mine, maxima, parts, scales, left, decoded)]


def both(gradient: Any, share: float, error: Any, ranks: int) -> tuple[list[Any], list[Any]]:
    shape = tuple(gradient.shape)
    given_to = tf.constant(gradient), share, tf.constant(error), ranks
    found, expected = (
        every_result(kind(shape, ranks), *given_to) for kind in (HostInt8Compressor, Int8Compressor)
    )
    return found, expected


@settings(deadline=None)
@given(SHAPES, st.integers(1, 5), st.sampled_from([0.0, 1e-42, 1e-20, 1.0, 1e30]), st.integers(0, 2**32 - 1))
def test_same_values(shape: tuple[int, ...], ranks: int, size: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    gradient, error = (size * random.normal(size=(2, *shape))).astype(np.float32)
    found, expected = both(gradient, float(random.uniform()), error, ranks)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs, strict=True)
    assert abs(found[2].astype(int)).max() * ranks <= 127


def test_many_blocks_in_a_graph() -> None:
    """Large enough for several threads, and in a graph, where outputs take the buffers of inputs."""
    values = np.random.default_rng(1).normal(size=(2, 3, 200_001)).astype(np.float32)

    def phases(kind: type[Int8Compressor], gradient: Any, error: Any) -> list[Any]:
        code = kind((3, 200_001), 2)
        mine, maxima = code.first(gradient * 1.0, tf.constant(0.5), error * 1.0)
        parts, scales, left = code.second(mine, maxima * 2.0)
        return [left * 1.0, code.decoded(parts, scales)]

    found, expected = (
        tf.function(functools.partial(phases, kind))(*map(tf.constant, values))
        for kind in (HostInt8Compressor, Int8Compressor)
    )
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


def test_a_gradient_of_unknown_shape_has_that_of_its_error() -> None:
    @tf.function(input_signature=[tf.TensorSpec(None)])
    def shapes(gradient: Any) -> Any:
        code = HostInt8Compressor((3, BLOCK), 2)
        given_to, maxima = code.first(gradient, tf.constant(1.0), tf.zeros((3, BLOCK)))
        assert (given_to.shape, maxima.shape) == ((3, BLOCK), (3,))
        return maxima

    assert shapes(tf.ones((3, BLOCK))).numpy().tolist() == [1, 1, 1]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_leaves_no_error(odd: float) -> None:
    gradient = np.ones(3 * BLOCK, np.float32)
    gradient[BLOCK + 5] = odd
    found, expected = both(gradient, 1.0, np.zeros_like(gradient), 2)
    for _, maxima, _, scales, left, decoded in (found, expected):
        assert [math.isfinite(value) for value in maxima] == [True, False, True]
        assert [math.isfinite(value) for value in scales] == [True, False, True]
        assert not left.any()
        # The block itself is not finite: whoever checks gradients sees it.
        assert not np.isfinite(decoded[BLOCK : 2 * BLOCK]).any()
        assert np.isfinite(decoded[2 * BLOCK :]).all()
