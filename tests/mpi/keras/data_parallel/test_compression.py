"""`int8` and `powersgd:R`: NumPy's sums with error feedback, and the same bits in every overlap."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.compressed_reduce import check_gradient_compression
from hvpipe.plan.compression import MOST_WHOLE
from hvpipe.session import current
from training import (
    CLASSES,
    FEATURES,
    State,
    assert_close,
    assert_same_bits,
    assert_same_on_all_ranks,
    compiled,
    fit,
    my_batches,
    parallel,
    samples,
    state_of,
)

Array = np.ndarray
COMPRESSIONS = ("powersgd:2", "int8")
# The first and the fourth are compressed by "int8". Some buckets have both kinds of members.
SHAPES = ((40, 120), (3, 3, 4, 8), (7,), (30, 15, 10), (2, 2))
BYTES = 20_000
several_ranks = pytest.mark.usefixtures("_several_ranks")


@pytest.fixture
def _several_ranks() -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank sends nothing")


# --- Against NumPy --------------------------------------------------------------------------------------


def gradients_of(step: int, rank: int) -> list[Array]:
    """Return a rank's gradients: partly common to all ranks, of very different sizes."""
    own, common = np.random.default_rng([step, rank]), np.random.default_rng([step, 99])
    return [
        (own.normal(size=shape) * 10.0 ** own.integers(-3, 1, shape) + common.normal(size=shape)).astype("f")
        for shape in SHAPES
    ]


class PowerSgdReference:
    """The factors of one matrix on all ranks, in float64."""

    def __init__(self, matrix: tuple[int, int], rank: int, place: int) -> None:
        self.errors = [np.zeros(matrix) for _ in range(hvpipe.size())]
        random = np.random.default_rng(place)
        self.x, self.y = (np.linalg.qr(random.normal(size=(length, rank)))[0] for length in matrix)
        self.matrix = matrix

    def mean(self, gradients: list[Array]) -> Array:
        shares = [gradient.reshape(self.matrix) / len(gradients) for gradient in gradients]
        given = [share + error for share, error in zip(shares, self.errors, strict=True)]
        by_x, by_y = self.x @ self.x.T, self.y @ self.y.T
        # What neither X nor Y reaches.
        self.errors = [m - by_x @ m - m @ by_y + by_x @ m @ by_y for m in given]
        total = sum(given)
        self.x, self.y = np.linalg.qr(total @ self.y)[0], np.linalg.qr(total.T @ self.x)[0]
        return (total - sum(self.errors)).reshape(gradients[0].shape)


class Int8Reference:
    """Bytes with a scale for each 256 numbers, on all ranks, in float32 as hvpipe rounds."""

    def __init__(self, count: int) -> None:
        self.blocks = -(-count // 256)
        self.errors = [np.zeros((self.blocks, 256), "f") for _ in range(hvpipe.size())]

    def mean(self, gradients: list[Array]) -> Array:
        shape, count = gradients[0].shape, gradients[0].size
        share = np.float32(1 / len(gradients))
        padded = [
            np.pad(g.reshape(-1), (0, self.blocks * 256 - count)).reshape(self.blocks, 256) for g in gradients
        ]
        given = [p * share + error for p, error in zip(padded, self.errors, strict=True)]
        most = [np.abs(blocks).max(axis=1) for blocks in given]
        scales = functools.reduce(np.add, most) / np.float32(127 - len(gradients) / 2)
        steps = [np.rint(blocks * (np.float32(1) / scales)[:, None]) for blocks in given]
        self.errors = [g - s * scales[:, None] for g, s in zip(given, steps, strict=True)]
        total = sum(steps)
        assert np.abs(total).max() <= 127
        return (total * scales[:, None]).reshape(-1)[:count].reshape(shape)


class WholeReference:
    """What travels whole."""

    def mean(self, gradients: list[Array]) -> Array:
        return np.mean(gradients, axis=0)


def references(code: str) -> list[Any]:
    if code == "int8":
        counts = [int(np.prod(shape)) for shape in SHAPES]
        return [Int8Reference(count) if count > MOST_WHOLE else WholeReference() for count in counts]
    # Grouped so that P and Q are smallest; the last two would not be smaller.
    matrices = {0: (40, 120), 1: (9, 32), 3: (30, 150)}
    return [
        PowerSgdReference(matrices[place], 2, place) if place in matrices else WholeReference()
        for place in range(len(SHAPES))
    ]


@pytest.mark.every_size
@several_ranks
@pytest.mark.parametrize(("code", "compile_step"), [("powersgd:2", True), ("int8", False)])
def test_sums_are_numpys(code: str, compile_step: bool) -> None:
    """After several steps, too: errors and factors are those of the reference."""
    variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
    expected = references(code)

    def average(*gradients: Any) -> list[Any]:
        return hk.average_gradients(list(gradients), variables, compression=code, bucket_bytes=BYTES)

    run = tf.function(average) if compile_step else average
    for step in range(6):
        found = [np.array(g) for g in run(*map(tf.constant, gradients_of(step, hvpipe.rank())))]
        assert_same_on_all_ranks({str(place): g for place, g in enumerate(found)})
        everyone = [gradients_of(step, rank) for rank in range(hvpipe.size())]
        for place, (mine, reference) in enumerate(zip(found, expected, strict=True)):
            wanted = reference.mean([gradients[place] for gradients in everyone])
            np.testing.assert_allclose(mine, wanted, atol=1e-4, err_msg=f"step {step}, gradient {place}")


# --- In training ------------------------------------------------------------------------------------------


def wide() -> keras.Model:
    """Build a model with a frozen layer between layers whose gradients have a low rank."""
    frozen = keras.layers.Dense(16, activation="tanh")
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(64, activation="tanh"),
            frozen,
            keras.layers.Dense(CLASSES),
        ]
    )
    frozen.trainable = False
    return model


def trained_on(sizes: list[int], steps: int, optimizer: Any, warmup_steps: int) -> State:
    """Train with this many samples of each step on each rank; return the weights."""
    x, y = samples(steps * sum(sizes))
    every = tf.data.Dataset.from_tensor_slices((x, y)).batch(sum(sizes))
    begin = sum(sizes[: hvpipe.rank()])
    end = begin + sizes[hvpipe.rank()]
    model = parallel(compiled(wide, optimizer), compression="powersgd:2", warmup_steps=warmup_steps)
    fit(model, every.map(lambda a, b: (a[begin:end], b[begin:end])))
    return {variable.path: np.array(variable) for variable in model.trainable_variables}


@several_ranks
def test_only_the_sum_of_the_ranks_gradients_counts() -> None:
    """The sum of errors, too, follows from it. So it does not matter which rank has which samples.

    With unequal batches, a frozen layer, clipping, and accumulation.
    """

    def sgd(**options: Any) -> Any:
        return keras.optimizers.SGD(0.2, momentum=0.9, **options)

    sizes = [6, *[3] * (hvpipe.size() - 1)]
    state = trained_on(sizes, 12, sgd(global_clipnorm=0.5), 3)
    assert_same_on_all_ranks(state)
    assert_close(state, trained_on(sizes[::-1], 12, sgd(global_clipnorm=0.5), 3), 1e-3)
    doubled = trained_on([2 * size for size in sizes], 6, sgd(), 0)
    assert_close(trained_on(sizes, 12, sgd(gradient_accumulation_steps=2), 0), doubled, 1e-3)


def large() -> keras.Model:
    return keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(1200, activation="tanh"), keras.layers.Dense(CLASSES)]
    )


def trained(overlap: str, code: str | None, **options: Any) -> tuple[State, float]:
    """Train six steps; return the state, and the bytes that this rank sent in the last three."""
    options.setdefault("bucket_bytes", 30_000)
    model = parallel(compiled(large, keras.optimizers.Adam(0.01)), overlap, compression=code, **options)
    sent = [0.0]
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: sent.append(current().engine.counters()["bytes_sent"])
    )
    note.reads_weights = False
    fit(model, my_batches(6), callbacks=[note])
    return state_of(model), sent[-1] - sent[-4]


@functools.cache
def trained_linearly(code: str | None) -> tuple[State, float]:
    return trained("none", code, warmup_steps=2)


@several_ranks
@pytest.mark.parametrize(("code", "overlap"), [("powersgd:2", "step"), ("int8", "backward")])
def test_every_overlap_gives_the_same_bits_with_fewer_bytes(code: str, overlap: str) -> None:
    (state, _), (linear, bytes_sent) = trained(overlap, code, warmup_steps=2), trained_linearly(code)
    assert_same_on_all_ranks(state)
    assert_same_bits(state, linear)
    exact, bytes_exact = trained_linearly(None)
    assert bytes_sent < 0.5 * bytes_exact  # with the ranks' control records
    assert any(
        mine.tobytes() != theirs.tobytes()
        for mine, theirs in zip(state.values(), exact.values(), strict=True)
    )


@several_ranks
def test_the_warm_up_is_exact() -> None:
    assert_same_bits(trained("step", "int8")[0], trained_linearly(None)[0])


@several_ranks
@pytest.mark.parametrize("code", COMPRESSIONS)
def test_a_step_that_is_not_finite_leaves_no_error(code: str) -> None:
    """NaN in the errors would be in every later sum."""
    x, y = samples(6 * 4, seed=hvpipe.rank())
    if hvpipe.rank() == 0:
        x[2 * 4] = np.nan
    model = parallel(compiled(large), compression=code, warmup_steps=0, nonfinite="skip")
    fit(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(4))
    assert int(model.optimizer.iterations) == 5
    assert all(np.isfinite(array).all() for array in state_of(model).values())


@several_ranks
def test_what_cannot_be_compressed() -> None:
    with pytest.raises(HvpipeError, match=r"needs compression=None.*Received: compression='int8'"):
        parallel(compiled(), "stale", compression="int8")
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(HvpipeError, match=r"needs unscaled gradients.*a LossScaleOptimizer"):
        hk.DistributedOptimizer(scaled, compression="powersgd:4")
    with pytest.raises(HvpipeError, match="a LossScaleOptimizer"):
        fit(parallel(compiled(optimizer=scaled), compression="powersgd:4"), my_batches(1))


@pytest.mark.parametrize(
    ("elastic", "size", "says"),
    [
        (True, 2, "--elastic needs compression=None"),
        (False, 64, "needs 63 ranks or less.*Received: 64 ranks"),
    ],
)
def test_jobs_that_cannot_compress(elastic: bool, size: int, says: str) -> None:
    job: Any = SimpleNamespace(settings=SimpleNamespace(elastic=elastic), world=SimpleNamespace(size=size))
    with pytest.raises(HvpipeError, match=says):
        check_gradient_compression(job, "int8")
