"""The collectives of `hvpipe.horovod.tensorflow`, eager and in graphs. Expectations come from NumPy."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe.horovod.tensorflow as hvd
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.session import current

pytestmark = pytest.mark.every_size

INTEGERS = (tf.uint8, tf.int8, tf.int32, tf.int64)
FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
EVERY_TYPE = (tf.bool, tf.uint16, tf.int16, *INTEGERS, *FLOATS)
TOLERANCES = {tf.float16: 1e-2, tf.bfloat16: 5e-2, tf.float32: 1e-6}


IN_GRAPH = pytest.mark.in_graph
OLDER_IN_GRAPH = pytest.mark.parametrize(
    "run", ["eager", pytest.param("graph", marks=[IN_GRAPH, pytest.mark.older_tensorflow])], indirect=True
)


@pytest.fixture(params=["eager", pytest.param("graph", marks=IN_GRAPH)])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], Any]:
    """Return a function that runs another one eagerly or in a graph."""

    def runner(function: Callable[[], Any]) -> Any:
        found = function() if request.param == "eager" else tf.function(function)()
        return tf.nest.map_structure(lambda x: x.numpy(), found)

    return runner


def values_of(rank: int, shape: tuple[int, ...], dtype: tf.DType) -> Any:
    """Return the numbers of one rank: small ones, so that sums are exact in every type."""
    numbers = np.random.default_rng(rank).integers(0, 6, shape)
    return (numbers % 2 == 0 if dtype == tf.bool else numbers).astype(dtype.as_numpy_dtype)


def everyone(shape: tuple[int, ...], dtype: tf.DType) -> Any:
    return np.stack([values_of(rank, shape, dtype) for rank in range(hvd.size())])


def wide(array: Any) -> Any:
    return np.asarray(array).astype(np.float64)


def assert_close(found: Any, expected: Any, dtype: tf.DType, what: str) -> None:
    np.testing.assert_allclose(
        wide(found), wide(expected), rtol=TOLERANCES.get(dtype, 1e-12), err_msg=what, strict=True
    )


# --- Reductions -------------------------------------------------------------------------------------------


# One case has many tensors, because a graph takes long to trace. In a graph, their calls overlap.


@pytest.mark.three_suffice
@OLDER_IN_GRAPH
def test_sums(run: Any) -> None:
    shapes = {(*INTEGERS, *FLOATS): [(3, 2, 2)], (tf.float32,): [(), (7,), (0,), (4, 0)]}
    cases = {
        f"{dtype.name}{shape}": (shape, dtype)
        for dtypes in shapes
        for dtype in dtypes
        for shape in shapes[dtypes]
    }
    mine = {name: values_of(hvd.rank(), *case) for name, case in cases.items()}
    found = run(lambda: {name: hvd.allreduce(tf.constant(mine[name]), op=hvd.Sum) for name in mine})
    for name, (shape, dtype) in cases.items():
        assert found[name].dtype == mine[name].dtype, name
        assert_close(found[name], wide(everyone(shape, dtype)).sum(0), dtype, name)


REDUCTIONS = {hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod, hvd.Average: np.mean}


@pytest.mark.three_suffice
def test_other_operations(run: Any) -> None:
    cases = {f"{dtype.name} {op}": (op, dtype) for dtype in (tf.int32, *FLOATS) for op in REDUCTIONS}
    mine = {name: values_of(hvd.rank(), (5, 2), dtype) for name, (_, dtype) in cases.items()}
    found = run(
        lambda: {name: hvd.allreduce(tf.constant(mine[name]), op=op) for name, (op, _) in cases.items()}
    )
    for name, (op, dtype) in cases.items():
        expected = REDUCTIONS[op](wide(everyone((5, 2), dtype)), axis=0)
        assert_close(found[name], np.trunc(expected) if dtype.is_integer else expected, dtype, name)


@pytest.mark.three_suffice
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", [hvd.Min, hvd.Max])
def test_nan_is_the_smallest_and_the_largest_number(op: int, dtype: Any) -> None:
    mine = np.ones(hvd.size() + 1)
    mine[hvd.rank()] = np.nan  # each rank at its own place, and one place on none
    found = hvd.allreduce(tf.constant(mine, dtype), op=op)
    assert np.isnan(wide(found.numpy())).tolist() == [True] * hvd.size() + [False]


@pytest.mark.three_suffice
def test_bad_operations() -> None:
    for op in (-1, 6, "sum", True):
        with pytest.raises(ValueError, match=f"op should be Average, .*Received: op={op!r}"):
            hvd.allreduce(tf.ones(2), op=op)
    with pytest.raises(HvpipeError, match="takes every op but adasum"):
        hk.reducescatter(tf.ones(hvd.size()), op="adasum")
    for passes in (0, -3, 1.5):
        with pytest.raises(ValueError, match=f"should be 1 or more. Received: .*={passes}"):
            hvd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=passes)
    with pytest.raises(HvpipeError, match="DistributedOptimizer needs a keras"):
        hvd.DistributedOptimizer("sgd", op=hvd.Sum)


@pytest.mark.three_suffice
def test_factors_before_and_after(run: Any) -> None:
    mine = values_of(hvd.rank(), (5,), tf.float64)
    found = run(
        lambda: hvd.allreduce(tf.constant(mine), op=hvd.Sum, prescale_factor=0.3, postscale_factor=7.0)
    )
    np.testing.assert_allclose(found, 7 * (0.3 * everyone((5,), tf.float64)).sum(0))
    whole = run(lambda: hvd.allreduce(tf.fill([3], tf.cast(3, tf.int32)), op=hvd.Sum, prescale_factor=0.5))
    np.testing.assert_array_equal(whole, np.full(3, hvd.size()))  # cut off on each rank
    mean = run(lambda: hvd.allreduce(tf.constant([hvd.rank() + 1]), postscale_factor=2.0))
    np.testing.assert_array_equal(mean, [hvd.size() + 1])  # cut off once, at the end


@pytest.mark.three_suffice
def test_average_is_the_default_and_the_older_argument_still_works() -> None:
    mine = tf.constant([float(hvd.rank())])
    assert hvd.allreduce(mine).numpy() == pytest.approx((hvd.size() - 1) / 2)
    assert hvd.allreduce(mine, average=False).numpy() == sum(range(hvd.size()))
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(mine, average=True, op=hvd.Sum)
    large = tf.constant(2**60 + 1)  # not a float64
    assert hvd.allreduce(large).numpy() == 2**60 + 1


@pytest.mark.three_suffice
@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_compression_returns_the_type_that_was_given(run: Any, compression: Any) -> None:
    found = run(lambda: hvd.allreduce(tf.ones([4], tf.float64), compression=compression, op=hvd.Sum))
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, np.full(4, hvd.size()))


@pytest.mark.three_suffice
def test_a_group_has_tensors_of_several_types_and_slices(run: Any) -> None:
    rank = hvd.rank()

    def call() -> Any:
        slices = tf.IndexedSlices(tf.fill([1, 2], float(rank)), tf.constant([rank]), tf.constant([9, 2]))
        found = hvd.grouped_allreduce(
            [tf.ones([2]), slices, tf.constant([rank], tf.int64), tf.ones([3], tf.float32)], op=hvd.Sum
        )
        return found[0], found[1].values, found[1].indices, found[2], found[3]

    first, values, indices, whole, last = run(call)
    ranks = np.arange(hvd.size())
    np.testing.assert_array_equal(first, np.full(2, hvd.size()))
    np.testing.assert_array_equal(values, np.stack([ranks, ranks], 1))
    np.testing.assert_array_equal(indices, ranks)
    assert whole == ranks.sum()
    np.testing.assert_array_equal(last, np.full(3, hvd.size()))


def test_adasum_of_orthogonal_vectors_is_their_sum_and_of_equal_ones_their_mean() -> None:
    size = hvd.size()
    mine = np.eye(8, dtype=np.float32)[hvd.rank()]
    if size & (size - 1):
        with pytest.raises(NotImplementedError, match="2, 4, 8"):
            hvd.allreduce(tf.constant(mine), op=hvd.Adasum)
        return
    np.testing.assert_allclose(hvd.allreduce(tf.constant(mine), op=hvd.Adasum), np.eye(8)[:size].sum(0))
    np.testing.assert_allclose(hvd.allreduce(tf.fill([5], 3.0), op=hvd.Adasum), np.full(5, 3.0), rtol=1e-6)


def test_reducescatter_gives_the_first_ranks_one_row_more(run: Any) -> None:
    cases = {f"{rows} rows {op}": (rows, op) for rows in (1, 5, 8) for op in (hvd.Sum, hvd.Average)}
    mine = {name: values_of(hvd.rank(), (rows, 3), tf.float32) for name, (rows, _) in cases.items()}
    found = run(
        lambda: {name: hvd.reducescatter(tf.constant(mine[name]), op=op) for name, (_, op) in cases.items()}
    )
    for name, (rows, op) in cases.items():
        total = wide(everyone((rows, 3), tf.float32)).sum(0) / (hvd.size() if op == hvd.Average else 1)
        expected = np.array_split(total, hvd.size())[hvd.rank()]
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, err_msg=name)


@pytest.mark.three_suffice
def test_grouped_reducescatter(run: Any) -> None:
    found = run(lambda: hvd.grouped_reducescatter([tf.ones([4, 2]), tf.ones([2], tf.int32)], op=hvd.Sum))
    lengths = [len(part) for part in np.array_split(np.arange(4), hvd.size())]
    assert found[0].shape == (lengths[hvd.rank()], 2)
    assert (found[0] == hvd.size()).all()
    assert (found[1] == hvd.size()).all()


# --- Gathering, sending -----------------------------------------------------------------------------------


def test_allgather_of_other_lengths(run: Any) -> None:
    parts = {
        dtype.name: [values_of(rank, (rank % 3, 2), dtype) for rank in range(hvd.size())]
        for dtype in EVERY_TYPE
    }
    found = run(lambda: {name: hvd.allgather(tf.constant(parts[name][hvd.rank()])) for name in parts})
    for name, everyones in parts.items():
        np.testing.assert_array_equal(wide(found[name]), wide(np.concatenate(everyones)), err_msg=name)


@pytest.mark.three_suffice
def test_grouped_allgather(run: Any) -> None:
    rank = hvd.rank()
    found = run(lambda: hvd.grouped_allgather([tf.fill([rank, 2], rank), tf.constant([float(rank)])]))
    np.testing.assert_array_equal(found[0][:, 0], np.repeat(np.arange(hvd.size()), np.arange(hvd.size())))
    np.testing.assert_array_equal(found[1], np.arange(hvd.size()))


def test_broadcast_from_each_rank(run: Any) -> None:
    cases = {
        f"{dtype.name}{shape} from {root}": (root, shape, dtype)
        for dtype in EVERY_TYPE
        for shape in [(3, 2), *([(), (0, 4)] if dtype == tf.float32 else [])]
        for root in range(hvd.size())
    }
    mine = {name: values_of(hvd.rank(), *case[1:]) for name, case in cases.items()}
    found = run(
        lambda: {name: hvd.broadcast(tf.constant(mine[name]), root) for name, (root, *_) in cases.items()}
    )
    for name, case in cases.items():
        np.testing.assert_array_equal(wide(found[name]), wide(values_of(*case)), err_msg=name)


def test_alltoall_with_and_without_splits(run: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    # Rank r sends r + 1 rows to each rank; then i rows to rank i.
    found = run(lambda: hvd.alltoall(tf.fill([(rank + 1) * size, 2], rank)))
    np.testing.assert_array_equal(found[:, 0], np.repeat(np.arange(size), np.arange(size) + 1))
    splits = tf.range(size)
    rows, counts = run(lambda: hvd.alltoall(tf.fill([size * (size - 1) // 2, 1], rank), splits))
    np.testing.assert_array_equal(counts, np.full(size, rank))
    np.testing.assert_array_equal(rows[:, 0], np.repeat(np.arange(size), rank))
    # Only the first row is sent, to rank 0.
    some = tf.one_hot(0, size, dtype=tf.int32)
    rows, _ = run(lambda: hvd.alltoall(tf.reshape(tf.range(10_000), [1000, 10]), some))
    np.testing.assert_array_equal(rows, np.tile(np.arange(10), (size if rank == 0 else 0, 1)))


@pytest.mark.three_suffice
def test_variables_and_objects() -> None:
    variables = [tf.Variable(float(hvd.rank())), tf.Variable(hvd.rank())]
    hvd.broadcast_variables(variables, root_rank=hvd.size() - 1)
    assert [int(v.numpy()) for v in variables] == [hvd.size() - 1] * 2
    for variable in variables:
        variable.assign(tf.cast(hvd.rank(), variable.dtype))
    hvd.broadcast_(variables, 0)
    assert [int(v.numpy()) for v in variables] == [0, 0]
    tf.function(lambda: hvd.broadcast_variables(variables, 0))()
    sent = {"rank": hvd.rank(), "text": "x" * (hvd.rank() * 100)}
    assert hvd.allgather_object(sent)[-1] == {"rank": hvd.size() - 1, "text": "x" * (hvd.size() - 1) * 100}
    assert hvd.broadcast_object(sent if hvd.rank() == 0 else None, 0)["rank"] == 0
    assert hvd.broadcast_object_fn(0)(hvd.rank()) == 0


@pytest.mark.three_suffice
@OLDER_IN_GRAPH
def test_names_of_hvpipe_keras(run: Any) -> None:
    rank, size = hk.rank(), hk.size()
    mine, everyone_s = tf.constant([float(rank), 1.0]), np.stack([np.arange(size), np.ones(size)], 1)

    def call() -> Any:
        return (
            hk.allreduce(mine),
            hk.allreduce(mine, op="max", compression="bf16"),
            hk.allreduce(mine, op="sum", postscale_factor=2.0),
            hk.grouped_allreduce([mine, tf.constant(rank)], op="sum"),
            hk.allgather(mine[:1]),
            hk.broadcast(mine, size - 1),
            hk.alltoall(tf.fill([size], rank)),
            hk.reducescatter(tf.ones([size, 2]), op="sum"),
        )

    mean, most, doubled, (total, ranks), gathered, sent, (rows, counts), part = run(call)
    np.testing.assert_allclose(mean, everyone_s.mean(0), rtol=1e-6)
    np.testing.assert_array_equal(most, everyone_s.max(0))
    np.testing.assert_array_equal(doubled, 2 * everyone_s.sum(0))
    np.testing.assert_array_equal(total, everyone_s.sum(0))
    assert ranks == sum(range(size))
    np.testing.assert_array_equal(gathered, np.arange(size))
    np.testing.assert_array_equal(sent, [size - 1, 1])
    np.testing.assert_array_equal(rows, np.arange(size))
    np.testing.assert_array_equal(counts, np.ones(size))
    np.testing.assert_array_equal(part, np.full((1, 2), size))
    assert hk.grouped_allreduce([]) == []
    with pytest.raises(HvpipeError, match="op should be one of average, sum"):
        hk.allreduce(mine, op="mean")
    assert 0 <= hk.join() < size


@pytest.mark.three_suffice
def test_calls_on_a_process_set_do_not_count_in_the_names_of_others() -> None:
    """Regression: its members gave their next calls other names than the other ranks."""
    first = hvd.add_process_set([0]) if hvd.size() > 1 else hvd.global_process_set

    @tf.function
    def step(x: Any) -> Any:
        own = hvd.allreduce(x, op=hvd.Sum, process_set=first, name="a") if first.included() else x
        return own, hvd.allreduce(x, op=hvd.Sum, name="a")

    np.testing.assert_array_equal(step(tf.ones([2])), [[1, 1], [hvd.size()] * 2])
    hvd.remove_process_set(first)


@pytest.mark.three_suffice
@pytest.mark.older_tensorflow
def test_a_function_that_is_called_twice_in_a_graph() -> None:
    """Regression: both calls, which may run at the same time, had one name."""
    weight = tf.Variable(2.0)
    mean = tf.function(lambda x: hvd.allreduce(x * weight, name="a"))

    @tf.function
    def step(x: Any) -> Any:
        with tf.name_scope(f"scope_of_rank_{hvd.rank()}"):
            return [mean(x), mean(10 * x), hvd.allreduce(x, name="a")]

    middle = (hvd.size() - 1) / 2
    for _ in range(5):
        np.testing.assert_allclose(step(tf.constant(float(hvd.rank()))), [2 * middle, 20 * middle, middle])


@pytest.mark.older_tensorflow
def test_calls_in_branches_have_names_of_their_own() -> None:
    """Regression: branches may run at the same time, but their calls had one name."""

    @tf.function
    def step(x: Any) -> Any:
        one = tf.cond(x[0] > 0, lambda: hvd.allreduce(x, name="a"), lambda: x)
        return one + tf.cond(x[0] > 0, lambda: hvd.allreduce(x, name="a"), lambda: x)

    graph = step.get_concrete_function(tf.ones([2])).graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    calls = [node.attr["call"].s for node in nodes if node.op == "HvpipeNamedAllreduce"]
    assert len(calls) == len(set(calls)) == 2


def test_more_rows_than_mpi_can_count() -> None:
    """Regression: no named collective worked any more after such a call."""
    size, rows = hvd.size(), 2**30 + 2 * hvd.size()
    empty = tf.zeros([rows, 0])
    assert hvd.allgather(empty).shape == (rows * size, 0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="at most 1073741824 rows on each rank"):
        hvd.alltoall(empty, [rows // size] * (size - 1) + [rows - rows // size * (size - 1)])
    assert hvd.allreduce(tf.constant(2.0), op=hvd.Sum).numpy() == 2 * size


def test_numbers_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = tf.function(lambda: (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()))()
    assert [int(n) for n in numbers] == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    assert hvd.process_set_included_op().numpy() == 1
    layout = hvd.allgather_object((hvd.local_rank(), hvd.cross_rank(), hvd.local_size()))
    assert len({place[:2] for place in layout}) == hvd.size()
    assert hvd.is_homogeneous() == (len({place[2] for place in layout}) == 1)
    assert hvd.cross_size() == sum(place[0] == hvd.local_rank() for place in layout)
    assert 0 <= hvd.cross_rank() < hvd.cross_size()
    # Regression: after hvpipe.init() they were those of one host.
    monkeypatch.setattr(current(), "layout", [(0, 1)] * hvd.size())  # each rank on a host of its own
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (hvd.rank(), hvd.size(), True)
    monkeypatch.setattr(current(), "layout", [(0, 2), (1, 2), (0, 1)])  # unequal hosts
    assert not hvd.is_homogeneous()
    assert all([hvd.mpi_built(), hvd.mpi_enabled(), hvd.mpi_threads_supported()])


# --- Names and order --------------------------------------------------------------------------------------


def test_ranks_may_call_in_other_orders() -> None:
    """In one graph: each rank starts its calls in an order of its own, and none waits for another."""
    places = np.random.default_rng(hvd.rank()).permutation(12)

    @tf.function
    def all_calls() -> list[Any]:
        found: dict[int, Any] = {}
        for place in places:
            found[place] = hvd.allreduce(tf.fill([place + 1], 1.0), op=hvd.Sum, name=f"call{place}")
        return [found[place] for place in range(12)]

    for place, value in enumerate(all_calls()):
        np.testing.assert_array_equal(value, np.full(place + 1, hvd.size()))


@pytest.mark.three_suffice
@pytest.mark.older_tensorflow
def test_a_constant_is_sent_anew_at_every_run() -> None:
    """TensorFlow must not compute a call with constant inputs while it optimises the graph."""
    graph = tf.function(lambda: hvd.allreduce(tf.ones([2]), op=hvd.Sum, name="constant"))
    for turn in range(3):
        if hvd.rank() == 0:
            total = graph()
        else:
            total = hvd.allreduce(tf.fill([2], float(turn)), op=hvd.Sum, name="constant")
        np.testing.assert_array_equal(total, np.full(2, 1 + turn * (hvd.size() - 1)))


@pytest.mark.three_suffice
@pytest.mark.older_tensorflow
def test_in_a_loop_of_a_graph() -> None:
    @tf.function
    def loop() -> Any:
        total = tf.zeros([2])
        for _ in tf.range(5):
            total += hvd.allreduce(total + 1.0, op=hvd.Average, name="turn")
        return total

    np.testing.assert_array_equal(loop(), np.full(2, 31.0))


@pytest.mark.three_suffice
def test_two_uses_of_a_name_at_once_are_an_error() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank never waits")
    outcomes: queue.Queue[Any] = queue.Queue()

    def call() -> None:
        try:
            outcomes.put(hvd.allreduce(tf.ones([1]), op=hvd.Sum, name="twice").numpy())
        except tf.errors.InvalidArgumentError as error:
            outcomes.put(str(error))

    threads = [threading.Thread(target=call) for _ in range(2)] if hvd.rank() == 0 else []
    for thread in threads:
        thread.start()
    if threads:
        assert "in use once at a time" in outcomes.get(timeout=60)
    hvd.barrier()  # the other ranks keep the first call waiting until then
    if not threads:
        call()
    for thread in threads:
        thread.join()
    assert outcomes.get(timeout=60) == [hvd.size()]


# --- Gradients --------------------------------------------------------------------------------------------


def gradient_of(run: Any, function: Callable[[Any], Any], at: Any) -> Any:
    def call() -> Any:
        x = tf.constant(at)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x)

    return run(call)


@pytest.mark.three_suffice
@pytest.mark.older_tensorflow
def test_gradients(run: Any) -> None:
    rank, size = hvd.rank(), hvd.size()
    at = np.full((size, 2), float(rank + 1), np.float32)
    np.testing.assert_array_equal(
        gradient_of(run, lambda x: hvd.allreduce(x, op=hvd.Sum), at), np.full((size, 2), size)
    )
    np.testing.assert_array_equal(gradient_of(run, hvd.allreduce, at), np.ones((size, 2)))
    # As in Horovod, the gradient of a gather is an average.
    weights = tf.constant(float(rank + 1))
    mean = (size + 1) / 2
    found = gradient_of(run, lambda x: hvd.allgather(x) * weights, at)
    np.testing.assert_allclose(found, np.full((size, 2), mean), rtol=1e-6)
    found = gradient_of(run, lambda x: hvd.broadcast(x, 0), at)
    np.testing.assert_array_equal(found, np.full((size, 2), 1.0 if rank == 0 else 0.0))
    found = gradient_of(run, lambda x: hvd.alltoall(x) * weights, at)
    np.testing.assert_array_equal(found, np.stack([np.arange(size) + 1.0] * 2, 1))
    found = gradient_of(run, lambda x: hvd.reducescatter(x, op=hvd.Sum) * weights, at)
    np.testing.assert_array_equal(found, np.stack([(np.arange(size) + 1.0) * size] * 2, 1))


# --- Process sets, joining --------------------------------------------------------------------------------


def test_process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    if size == 1:
        pytest.skip("needs two ranks")
    chosen = [0, size - 1] if size > 2 else [1]
    part = hvd.add_process_set(chosen)
    assert (part.ranks, part.size(), part.included()) == (chosen, len(chosen), rank in chosen)
    if part.included():
        assert part.rank() == chosen.index(rank)
        total = hvd.allreduce(tf.constant(rank), op=hvd.Sum, process_set=part)
        assert total.numpy() == sum(chosen)
        np.testing.assert_array_equal(hvd.allgather(tf.constant([rank]), process_set=part), chosen)
        assert hvd.broadcast(tf.constant(rank), size - 1, process_set=part).numpy() == size - 1
        sent = tf.fill([len(chosen)], rank)
        np.testing.assert_array_equal(hvd.alltoall(sent, process_set=part), chosen)
        assert hvd.allgather_object(rank, process_set=part) == chosen
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"of the process set, .*root_rank=99"):
            hvd.broadcast(tf.constant(1), 99, process_set=part)
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="no member"):
            hvd.allreduce(tf.constant(rank), process_set=part)
    with pytest.raises(ValueError, match="exists"):
        hvd.add_process_set(chosen)
    with pytest.raises(ValueError, match="exists"):
        hvd.add_process_set(list(range(size)))
    with pytest.raises(ValueError, match="0 to"):
        hvd.add_process_set([0, size])
    with pytest.raises(MismatchError, match="same call"):
        hvd.add_process_set([rank])
    assert hvd.remove_process_set(part)
    assert not hvd.remove_process_set(part)
    assert not hvd.remove_process_set(hvd.global_process_set)


@pytest.mark.three_suffice
def test_a_call_on_a_process_set_that_is_removed_meanwhile() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank never waits")
    part = hvd.add_process_set([0, 1] if hvd.size() > 2 else [1])
    told: list[str] = []

    def call() -> None:
        try:
            hvd.allreduce(tf.constant(1), process_set=part, name="too late")
        except tf.errors.InvalidArgumentError as error:
            told.append(str(error))

    waits = hvd.rank() == 0 and part.included()
    thread = threading.Thread(target=call)
    if waits:
        thread.start()
        time.sleep(0.3)
    assert hvd.remove_process_set(part)
    if waits:
        thread.join(timeout=20)
        assert "which was removed" in told[0]


def test_process_sets_of_a_communicator_that_was_split() -> None:
    rank, size = hvd.rank(), hvd.size()
    if size == 1:
        pytest.skip("needs two ranks")
    same = list(range(rank % 2, size, 2))
    split = SimpleNamespace(Get_group=None, allgather=lambda _: same)
    mine = hvd.add_process_set(hvd.ProcessSet(split))
    assert (mine.ranks, mine.size()) == (same, len(same))
    assert hvd.allreduce(tf.constant(rank), op=hvd.Sum, process_set=mine).numpy() == sum(same)
    assert hvd.remove_process_set(mine)
    # Only members may have a communicator.
    split.allgather = lambda _: [0]
    first = hvd.add_process_set(hvd.ProcessSet(split) if rank == 0 else [0])
    assert (first.ranks, first.included()) == ([0], rank == 0)
    assert hvd.remove_process_set(first)


@pytest.mark.older_tensorflow
def test_ranks_with_less_data_join() -> None:
    rank, size = hvd.rank(), hvd.size()
    for turn in range(rank + 1):  # rank 0 joins first
        hvd.barrier()  # sends nothing, of which ranks that have joined hear nothing
        total = hvd.allreduce(tf.ones([3]), op=hvd.Sum, name="joining")
        np.testing.assert_array_equal(total, np.full(3, size - turn))
    if rank == size - 1 and size > 1:
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"named .*not_with_join: .*has joined"):
            hvd.allgather(tf.ones([1]), name="not_with_join")
    last = hvd.join()
    assert (last.dtype, last.numpy()) == (tf.int32, size - 1)
    with pytest.raises(HvpipeError, match=r"^Call join\(\) outside of tf"):
        tf.function(hvd.join, autograph=False)()
    assert hvd.allreduce(tf.ones([]), op=hvd.Sum).numpy() == size


# --- Ranks that differ ------------------------------------------------------------------------------------


@pytest.mark.three_suffice
@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda r: hvd.allreduce(tf.ones([2 + r])), "float32[2] on rank 0, .*float32[3] on rank 1"),
        (lambda r: hvd.allreduce(tf.ones([2] * (1 + r % 2))), "float32[2] on rank 0"),
        (lambda r: hvd.allreduce(tf.ones([2], tf.int32 if r else tf.float32)), "int32[2] on rank 1"),
        (lambda r: hvd.allreduce(tf.ones([2]), op=hvd.Sum if r else hvd.Max), "(max) .*(sum)"),
        (lambda r: hvd.allreduce(tf.ones([2]), prescale_factor=1.0 + r), "prescale_factor=2"),
        (lambda r: hvd.allgather(tf.ones([2, 2 + r])), "float32[2, 2] on rank 0"),
        (lambda r: hvd.allgather(tf.ones([2], tf.int32 if r else tf.float32)), "int32[2] on rank 1"),
        (lambda r: hvd.broadcast(tf.ones([2 + r]), 0), "float32[3] on rank 1"),
        (lambda r: hvd.broadcast(tf.ones([2]), min(r, 1)), "from rank 0 .*from rank 1"),
        (lambda r: hvd.reducescatter(tf.ones([4, 2 + r])), "float32[4, 2] on rank 0"),
        (lambda r: hvd.grouped_allreduce([tf.ones([1])] * (2 + r)), "on rank 0"),
    ],
)
def test_ranks_that_differ_all_get_an_error_and_go_on(call: Any, told: str) -> None:
    if hvd.size() == 1:
        pytest.skip("one rank never differs")
    pattern = told.replace("[", r"\[").replace("]", r"\]").replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(tf.errors.FailedPreconditionError, match=pattern):
        call(hvd.rank())
    assert hvd.allreduce(tf.ones([]), op=hvd.Sum).numpy() == hvd.size()


@pytest.mark.three_suffice
@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: hvd.allgather(tf.constant(1.0)), "at least one axis"),
        (lambda: hvd.reducescatter(tf.constant(1.0)), "at least one axis"),
        (lambda: hvd.alltoall(tf.constant(1.0)), "at least one axis"),
        (lambda: hvd.alltoall(tf.ones([2]), [1] * (hvd.size() + 1)), "splits should be"),
        (lambda: hvd.alltoall(tf.ones([2]), [9] * hvd.size()), "splits should be"),
        (lambda: hvd.alltoall(tf.ones([2]), [[1] * hvd.size()]), "one axis"),
    ],
)
def test_bad_input_on_one_rank_is_told_on_all(call: Any, told: str) -> None:
    """The rank itself gets InvalidArgumentError with the reason; the others are told which rank and why."""
    with pytest.raises(tf.errors.InvalidArgumentError, match=told):
        call()
    assert hvd.allreduce(tf.ones([]), op=hvd.Sum).numpy() == hvd.size()


@pytest.mark.three_suffice
def test_rows_that_the_ranks_cannot_share() -> None:
    if hvd.size() == 1:
        pytest.skip("one rank keeps all rows")
    with pytest.raises(tf.errors.InvalidArgumentError, match="share evenly"):
        hvd.alltoall(tf.ones([hvd.size() + 1]))


@pytest.mark.three_suffice
def test_the_set_of_all_ranks_is_shown_before_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: so help(hvd.allreduce), which shows it as a default, failed."""
    monkeypatch.setattr("hvpipe.session._session", None)
    assert repr(hvd.global_process_set) == "ProcessSet(process_set_id=0, ranks=None, mpi_comm=None)"


@pytest.mark.three_suffice
def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(NotImplementedError, match="IndexedSlices"):
        hvd.allreduce(tf.IndexedSlices(tf.ones([1]), tf.constant([0]), tf.constant([1])), op=hvd.Max)
    with pytest.raises(ValueError, match="list of ranks"):
        hvd.ProcessSet("01")
    with pytest.raises(ValueError, match="added first"):
        hvd.allreduce(tf.ones([1]), process_set=hvd.ProcessSet([0]))
    with pytest.raises(HvpipeError, match="all ranks"):
        hvd.init(comm=[hvd.size()])


def test_a_rank_that_is_far_ahead_waits_for_the_readers() -> None:
    """A root may fill the shared window with a broadcast, and begin the next sum, before others have read."""
    if hvd.size() == 1:
        pytest.skip("needs readers")
    values = np.arange(1 << 18, dtype=np.float32)  # all four slots of the window
    found: dict[str, Any] = {}

    def broadcast() -> None:
        found["broadcast"] = hvd.broadcast(
            values if hvd.rank() == 0 else 0 * values, 0, name="fills the window"
        )

    def add() -> None:
        found["sum"] = hvd.allreduce(-1 - values[:100], op=hvd.Sum, name="comes next")

    if hvd.rank() == 0:
        time.sleep(0.4)
        broadcast()
        add()
    else:
        calls = [threading.Thread(target=call) for call in (broadcast, add)]
        for call in calls:
            call.start()
        time.sleep(0.1)  # both calls are made
        with subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)
        for call in calls:
            call.join()
    np.testing.assert_array_equal(found["broadcast"], values)
    np.testing.assert_array_equal(found["sum"], hvd.size() * (-1 - values[:100]))
