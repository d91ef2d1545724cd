"""Collectives, buckets and plans of the engine on any number of ranks, whichever way the data takes."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import hvpipe
from hvpipe.comm.discover import settings
from hvpipe.engine import Engine
from hvpipe.errors import HvpipeError
from hvpipe.plan.buckets import BucketPlan, Gradient, plan_buckets
from hvpipe.session import current

Array = NDArray[Any]

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# Half the distance from 1 to the next number: what one rounding may cost.
ROUNDING = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}
COUNTS = (0, 1, 7, 1000, 100_003)
LARGE = 3_000_001


@pytest.fixture
def engine() -> Engine:
    return current().engine


@pytest.fixture
def core(engine: Engine) -> Any:
    """The C++ engine, where there is one."""
    if engine.core is None:
        pytest.skip("one rank without MPI has no C++ engine")
    return engine.core


PERIOD = 2003


def pattern(rank: int, dtype: str) -> Array:
    places = np.arange(PERIOD, dtype=np.int64)
    return (((places * 7919 + rank * 104_729) % PERIOD - 1001) / 800.0).astype(DTYPES[dtype])


def part(rank: int, count: int, dtype: str) -> Array:
    """What a rank contributes: its pattern, over and over; any rank can tell what another's is."""
    return np.resize(pattern(rank, dtype), count)


def patterns(dtype: str) -> list[Array]:
    return [pattern(rank, dtype) for rank in range(hvpipe.size())]


def digest(*arrays: Array) -> str:
    return hashlib.sha1(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


def assert_equal_on_all_ranks(*arrays: Array) -> None:
    assert len(set(hvpipe.allgather_object(digest(*arrays)))) == 1


def assert_sum(found: Array, terms: list[Array], scale: float, rounding: float) -> None:
    """`terms`, repeated as often as it takes: right within the error of adding with a rounding after each."""
    wide = [term.ravel().astype(np.float64) for term in terms]
    wanted = sum(wide) * scale
    allowed = (len(terms) + 2) * rounding * sum(np.abs(w) for w in wide) * scale + 1e-7 * rounding
    difference = np.abs(found.ravel() - np.resize(wanted, found.size))
    wrong = ~(difference <= np.resize(allowed, found.size))  # so that NaN is wrong
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} wrong, first at {wrong.argmax()}"


# --- All-reduce -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "average"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce(dtype: str, op: Any) -> None:
    scale = 1.0 / hvpipe.size() if op == "average" else 1.0
    for count in COUNTS:
        mine = part(hvpipe.rank(), count, dtype)
        before = mine.copy()
        found = hvpipe.allreduce(mine, op=op)
        assert found.dtype == mine.dtype
        assert found.shape == mine.shape
        assert digest(mine) == digest(before)
        assert_sum(found, patterns(dtype), scale, ROUNDING[dtype])
        assert_equal_on_all_ranks(found)
        assert digest(hvpipe.allreduce(mine, op=op)) == digest(found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_of_what_is_larger_than_any_buffer(dtype: str) -> None:
    # With tiny messages this would be nothing but messages.
    count = LARGE if settings().segment_bytes >= 50_000 else LARGE // 20
    found = hvpipe.allreduce(part(hvpipe.rank(), count, dtype), op="sum")
    assert_sum(found, patterns(dtype), 1.0, ROUNDING[dtype])
    assert_equal_on_all_ranks(found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_whole_numbers_are_summed_exactly(dtype: str) -> None:
    count = 70_001
    mine = (np.arange(count) % 8 + hvpipe.rank()).astype(DTYPES[dtype])
    wanted = sum(np.arange(count) % 8 + rank for rank in range(hvpipe.size()))
    np.testing.assert_array_equal(hvpipe.allreduce(mine, op="sum").astype(np.int64), wanted)


@pytest.mark.parametrize("shape", [(), (1,), (3, 0), (5, 4, 3)])
def test_all_reduce_keeps_the_shape(shape: tuple[int, ...]) -> None:
    found = hvpipe.allreduce(np.full(shape, 1.5, np.float32), op="sum")
    assert found.shape == shape
    assert (found == 1.5 * hvpipe.size()).all()


def test_all_reduce_in_place_and_into_another_array() -> None:
    mine = part(hvpipe.rank(), 5000, "float32").reshape(50, 100)
    wanted = hvpipe.allreduce(mine, op="sum")
    other = np.empty_like(mine)
    assert hvpipe.allreduce(mine, op="sum", out=other) is other
    assert hvpipe.allreduce(mine, op="sum", out=mine) is mine
    assert digest(other) == digest(mine) == digest(wanted)


@pytest.mark.parametrize("out", [None, "in place"])
@pytest.mark.parametrize(("compression", "wire"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_compression(compression: Any, wire: str, out: str | None) -> None:
    for count in COUNTS:
        mine = part(hvpipe.rank(), count, "float32")
        target = mine.copy() if out else None
        found = hvpipe.allreduce(mine if target is None else target, compression=compression, out=target)
        assert found.dtype == np.float32
        # Twice the roundings: on the way in, and in the sum.
        assert_sum(found, patterns("float32"), 1.0 / hvpipe.size(), 2 * ROUNDING[wire])
        assert_equal_on_all_ranks(found)
        if hvpipe.size() > 1:
            assert digest(found) == digest(found.astype(DTYPES[wire]).astype(np.float32))


def test_compression_leaves_other_dtypes_alone() -> None:
    for dtype in ("float64", "float16", "bfloat16"):
        mine = part(hvpipe.rank(), 1000, dtype)
        assert digest(hvpipe.allreduce(mine, compression="bf16")) == digest(hvpipe.allreduce(mine))


def test_a_nan_or_infinity_on_one_rank_reaches_all() -> None:
    for dtype in DTYPES:
        mine = np.ones(5000, DTYPES[dtype])
        if hvpipe.rank() == hvpipe.size() - 1:
            mine[1234], mine[4321] = np.nan, -np.inf
        found = hvpipe.allreduce(mine, op="sum").astype(np.float64)
        assert np.isnan(found[1234])
        assert found[4321] == -np.inf
        assert np.isfinite(np.delete(found, [1234, 4321])).all()


class Tensor:
    """An array of another library: nothing but DLPack."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def test_arrays_of_any_kind() -> None:
    size, base = hvpipe.size(), np.arange(24, dtype=np.float32).reshape(4, 6)
    for array in (Tensor(base), base[:, ::-1][:, ::-1], np.asfortranarray(base), base.tolist()):
        found = hvpipe.allreduce(array, op="sum")
        np.testing.assert_array_equal(found, base * size)
    frozen = base.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(hvpipe.allreduce(frozen, op="sum"), base * size)
    np.testing.assert_array_equal(hvpipe.allreduce(base[:, ::2], op="sum"), base[:, ::2] * size)
    np.testing.assert_array_equal(hvpipe.broadcast(Tensor(base)), base)
    np.testing.assert_array_equal(hvpipe.allgather(Tensor(base)), np.concatenate([base] * size))


@pytest.mark.parametrize(
    ("arguments", "received"),
    [
        ({"op": "max"}, "Received: op='max'"),
        ({"compression": "int8"}, "Received: compression='int8'"),
        ({"array": np.ones(4, np.int32)}, "Received: dtype=int32"),
        ({"array": np.ones(4, bool)}, "Received: dtype=bool"),
        ({"array": ["a"]}, "Received: dtype=str"),
        ({"array": [None]}, "Received: dtype=object"),
        ({"out": np.ones(5, np.float32)}, r"float32\[4\]. Received: float32\[5\]"),
        ({"out": np.ones(4, np.float64)}, r"float32\[4\]. Received: float64\[4\]"),
        ({"out": np.ones(8, np.float32)[::2]}, "Received: an array that is not C-contiguous"),
        ({"out": [0.0] * 4}, "Received: list"),
    ],
)
def test_wrong_arguments_are_named_and_harm_nothing(arguments: dict[str, Any], received: str) -> None:
    with pytest.raises(HvpipeError, match=received):
        hvpipe.allreduce(**{"array": np.ones(4, np.float32), **arguments})
    assert hvpipe.allreduce(np.float32(1), op="sum") == hvpipe.size()


def test_an_output_that_may_not_be_written_is_refused() -> None:
    out = np.zeros(4, np.float32)
    out.flags.writeable = False
    with pytest.raises(HvpipeError, match="Received: an array that is read-only"):
        hvpipe.allreduce(np.ones(4, np.float32), out=out)
    assert (out == 0).all()


# --- The other collectives --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, "int8", "int64", "bool", "complex128"])
def test_every_rank_can_broadcast(dtype: str) -> None:
    kind = DTYPES.get(dtype, np.dtype(dtype))
    for root in range(hvpipe.size()):
        for shape in ((), (0,), (1,), (7, 3), (20_011,)):
            theirs = (np.arange(np.prod(shape, dtype=int)) % 100 + root).astype(kind).reshape(shape)
            mine = theirs if hvpipe.rank() == root else np.zeros(shape, kind)
            found = hvpipe.broadcast(mine, root=root)
            assert found.dtype == kind
            assert found.shape == shape
            assert digest(found) == digest(theirs)


@pytest.mark.parametrize("root", [-1, 99])
def test_a_root_that_is_no_rank(root: int) -> None:
    with pytest.raises(HvpipeError, match=f"0 to {hvpipe.size() - 1}. Received: root={root}"):
        hvpipe.broadcast(np.ones(3), root=root)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("rows", [lambda rank: rank, lambda rank: 3000 * (rank == 1), lambda rank: 5])
def test_all_gather_of_unequal_lengths(dtype: str, rows: Any) -> None:
    kind = DTYPES.get(dtype, np.dtype(dtype))
    everyone = [np.full((rows(rank), 3), rank + 1).astype(kind) for rank in range(hvpipe.size())]
    found = hvpipe.allgather(everyone[hvpipe.rank()])
    assert found.dtype == kind
    assert found.shape == (sum(rows(rank) for rank in range(hvpipe.size())), 3)
    assert digest(found) == digest(np.concatenate(everyone))


def test_all_gather_of_nothing_and_of_a_scalar() -> None:
    assert hvpipe.allgather(np.zeros((0, 4), np.float32)).shape == (0, 4)
    assert hvpipe.allgather(np.zeros((2, 0), np.float32)).shape == (2 * hvpipe.size(), 0)
    with pytest.raises(HvpipeError, match="Received: a scalar"):
        hvpipe.allgather(np.float32(1))


def test_objects() -> None:
    everyone = hvpipe.allgather_object({"rank": hvpipe.rank(), "text": "x" * 1000 * hvpipe.rank()})
    assert [(e["rank"], len(e["text"])) for e in everyone] == [(r, 1000 * r) for r in range(hvpipe.size())]
    for root in range(hvpipe.size()):
        assert hvpipe.broadcast_object(("from", hvpipe.rank()), root=root) == ("from", root)


def test_a_barrier_waits_for_the_last() -> None:
    hvpipe.barrier()
    time.sleep(0.2 * (hvpipe.rank() == hvpipe.size() - 1))
    reached_s = time.monotonic()
    hvpipe.barrier()
    left_s = time.monotonic()
    if hvpipe.local_size() == hvpipe.size():  # one clock
        assert left_s >= max(hvpipe.allgather_object(reached_s))


def test_everyone_hears_everyones_samples(engine: Engine) -> None:
    found = engine.agree("test", samples=10.0 + hvpipe.rank())
    assert found == [10.0 + rank for rank in range(hvpipe.size())]


# --- Plans: the buckets of a training step ----------------------------------------------------------------

# Several buckets of each kind, from a few bytes to several chunks of the shared-memory lane.
MODEL = [
    Gradient("a", (3,), "float32"),
    Gradient("b", (50_000,), "float32"),
    Gradient("c", (40, 7), "float16"),
    Gradient("d", (), "float64"),
    Gradient("e", (9_000,), "float32"),
    Gradient("f", (0, 4), "float32"),
    Gradient("g", (1_111,), "bfloat16"),
    Gradient("h", (2_000,), "float32"),
    Gradient("i", (2_001,), "float32"),
]
CAP_BYTES = 16_000


def model_plan(compression: str | None = None) -> BucketPlan:
    plan = plan_buckets(MODEL, CAP_BYTES, compression)
    assert len(plan.buckets) >= 6
    return plan


def gradient(place: int, step: int, rank: int) -> Array:
    """What a rank's backward finds; the numbers differ in size so much that the order of adding shows."""
    wanted = MODEL[place]
    noise = np.random.default_rng([place, step, rank])
    values = noise.standard_normal(wanted.shape) * 10.0 ** noise.integers(-3, 4, wanted.shape)
    return np.asarray(values).astype(DTYPES[wanted.dtype])


def run_step(
    core: Any, plan_id: int, plan: BucketPlan, step: int, *, order: random.Random | None = None
) -> list[Array]:
    """One step's reduced gradients; with `order`, in this rank's own order and time."""
    rank = hvpipe.rank()
    scale, total = core.begin_step(plan_id, step, float(rank + 1), True)
    assert total == hvpipe.size() * (hvpipe.size() + 1) / 2
    assert scale == (rank + 1) / total
    reduced = [np.empty(g.shape, DTYPES[g.dtype]) for g in MODEL]
    numbers = list(range(len(plan.buckets)))
    collects = list(reversed(numbers))
    if order is not None:
        order.shuffle(numbers)
        order.shuffle(collects)
    # Somebody who waits for each bucket before it is submitted, as TensorFlow's threads may.
    submitted = [threading.Event() for _ in numbers]

    def collect() -> None:
        for number in collects:
            assert submitted[number].wait(30)
            bucket = plan.buckets[number]
            core.collect(plan_id, number, [bits(reduced[place]) for place in bucket.members])

    collector = threading.Thread(target=collect)
    collector.start()
    for number in numbers:
        if order is not None and order.random() < 0.5:
            time.sleep(order.random() * 0.004)
        members = plan.buckets[number].members
        core.submit(plan_id, number, [bits(gradient(place, step, rank)) for place in members], scale)
        submitted[number].set()
    collector.join(60)
    assert not collector.is_alive()
    return reduced


def bits(array: Array) -> Array:
    return array if array.dtype.name != "bfloat16" else array.view(np.uint16)


@pytest.mark.parametrize("compression", [None, "bf16", "fp16"])
def test_the_same_buckets_give_the_same_bits_whatever_the_timing(
    engine: Engine, core: Any, compression: str | None
) -> None:
    plan = model_plan(compression)
    calm_id = engine.add_plan("calm", plan)
    hasty_id = engine.add_plan("hasty", plan)
    order = random.Random(hvpipe.rank())
    for step in range(4):
        calm = run_step(core, calm_id, plan, step)
        hasty = [run_step(core, hasty_id, plan, step, order=order) for _ in range(2)]
        assert digest(*calm) == digest(*hasty[0]) == digest(*hasty[1])
        assert_equal_on_all_ranks(*calm)


def test_gradients_are_averaged_by_samples(engine: Engine, core: Any) -> None:
    plan = model_plan()
    reduced = run_step(core, engine.add_plan("averages", plan), plan, 1)
    size = hvpipe.size()
    shares = [(rank + 1) / (size * (size + 1) / 2) for rank in range(size)]
    for place, wanted in enumerate(MODEL):
        terms = [gradient(place, 1, rank).astype(np.float64) * share for rank, share in enumerate(shares)]
        assert_sum(reduced[place], terms, 1.0, 2 * ROUNDING[wanted.dtype])


def test_a_step_overlaps_with_another_plans(engine: Engine, core: Any) -> None:
    plan = plan_buckets([Gradient("w", (30_000,), "float32")], 1 << 20)
    first, second = engine.add_plan("first", plan), engine.add_plan("second", plan)
    ones = np.ones(30_000, np.float32)
    # Both are announced and submitted before either is collected, in another order on every other rank.
    scales = {plan_id: core.begin_step(plan_id, 1, 1.0, True)[0] for plan_id in (first, second)}
    for plan_id in (first, second) if hvpipe.rank() % 2 else (second, first):
        core.submit(plan_id, 0, [ones * (plan_id + 1)], scales[plan_id])
    for plan_id in (second, first):
        out = np.empty(30_000, np.float32)
        core.collect(plan_id, 0, [out])
        np.testing.assert_allclose(out, plan_id + 1, rtol=1e-6)


def test_a_step_that_accumulates_announces_no_buckets(engine: Engine, core: Any) -> None:
    plan = plan_buckets([Gradient("w", (3,), "float32")], 100)
    plan_id = engine.add_plan("accumulating", plan)
    for step in range(3):
        scale, total = core.begin_step(plan_id, step, 2.0, False)
        assert (scale, total) == (1 / hvpipe.size(), 2.0 * hvpipe.size())
    scale, _ = core.begin_step(plan_id, 3, 2.0, True)
    core.submit(plan_id, 0, [np.ones(3, np.float32)], scale)
    out = np.empty(3, np.float32)
    core.collect(plan_id, 0, [out])
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)


def test_a_rank_without_samples_adds_nothing(engine: Engine, core: Any) -> None:
    plan_id = engine.add_plan("unequal", plan_buckets([Gradient("w", (4,), "float32")], 100))
    mine = 5.0 if hvpipe.rank() == 0 else 0.0
    scale, total = core.begin_step(plan_id, 1, mine, True)
    assert (scale, total) == (mine / 5.0, 5.0)
    core.submit(plan_id, 0, [np.full(4, 1.0 + hvpipe.rank(), np.float32)], scale)
    out = np.empty(4, np.float32)
    core.collect(plan_id, 0, [out])
    assert out.tolist() == [1.0] * 4
    # And where nobody has any, no share is a number but 0.
    assert core.begin_step(plan_id, 2, 0.0, False) == (0.0, 0.0)


def test_steps_out_of_order_are_refused_and_harm_nothing(engine: Engine, core: Any) -> None:
    plan = plan_buckets([Gradient("v", (2,), "float32"), Gradient("w", (3,), "float32")], 12)
    plan_id = engine.add_plan("order", plan)
    two, three = np.ones(2, np.float32), np.ones(3, np.float32)
    with pytest.raises(HvpipeError, match=r"no step announced. Received: bucket=w"):
        core.submit(plan_id, 0, [three], 1.0)
    with pytest.raises(HvpipeError, match=r"was not submitted. Received: bucket=w"):
        core.collect(plan_id, 0, [three])
    core.begin_step(plan_id, 1, 1.0, True)
    with pytest.raises(HvpipeError, match=r"A step began before .* Received: bucket=w"):
        core.begin_step(plan_id, 2, 1.0, True)
    with pytest.raises(HvpipeError, match=r"tensors of bucket w. Received: tensors of other sizes or number"):
        core.submit(plan_id, 0, [two], 1.0)
    with pytest.raises(HvpipeError, match=r"tensors of bucket v. Received: tensors of other sizes or number"):
        core.submit(plan_id, 1, [two, two], 1.0)
    with pytest.raises(HvpipeError, match=r"Received: bucket=2"):
        core.submit(plan_id, 2, [two], 1.0)
    with pytest.raises(HvpipeError, match=r"Received: plan=9999"):
        core.submit(9999, 0, [two], 1.0)
    core.submit(plan_id, 0, [three], 1.0)
    with pytest.raises(HvpipeError, match=r"still holds the step before|no step announced"):
        core.submit(plan_id, 0, [three], 1.0)
    core.submit(plan_id, 1, [two], 1.0)
    core.collect(plan_id, 0, [three])
    core.collect(plan_id, 1, [two])
    assert three.tolist() == [hvpipe.size()] * 3
    assert two.tolist() == [hvpipe.size()] * 2


def test_a_step_of_an_unknown_plan(core: Any) -> None:
    with pytest.raises((HvpipeError, IndexError)):
        core.begin_step(9999, 1, 1.0, True)


def test_a_plan_without_mpi_is_refused(engine: Engine) -> None:
    if engine.core is None:
        with pytest.raises(HvpipeError, match="Received: one rank without MPI"):
            engine.add_plan("none", model_plan())


# --- What is counted and recorded -------------------------------------------------------------------------


def test_counters(engine: Engine) -> None:
    before = hvpipe.counters()
    assert before["bytes_sent"] >= 0
    hvpipe.allreduce(np.ones(100_000, np.float32))
    after = hvpipe.counters()
    assert all(after[name] >= value for name, value in before.items())
    if hvpipe.size() == 1:
        return
    assert after["operations"] > before["operations"]
    sent = {name: after[name] - before[name] for name in after}
    assert sent["bytes_sent"] == sent["network_bytes_sent"] + sent["shared_memory_bytes"]
    hosts, share = engine.core.hosts, 400_000 / hvpipe.size()
    if hosts == 1 and settings().shared_memory:
        assert sent["shared_memory_bytes"] == 400_000
        assert sent["network_bytes_sent"] == 0
    elif not settings().shared_memory:
        # A ring sends two rounds of all but one share.
        assert sent["network_bytes_sent"] == pytest.approx(2 * (hvpipe.size() - 1) * share, rel=0.01)
        assert sent["network_bytes_received"] == pytest.approx(sent["network_bytes_sent"], rel=0.01)
    else:
        # Every rank puts its array into the lane, the first of a host the result as well if others read it.
        assert sent["shared_memory_bytes"] in (400_000, 800_000)
        leads = engine.core.local_rank == 0
        assert sent["network_bytes_sent"] == pytest.approx(
            2 * (hosts - 1) * 400_000 / hosts if leads else 0, rel=0.01
        )


def test_waiting_for_a_bucket_is_counted(engine: Engine, core: Any) -> None:
    if hvpipe.size() == 1:
        pytest.skip("a single rank waits for nobody")
    plan_id = engine.add_plan("exposed", plan_buckets([Gradient("w", (4,), "float32")], 100))
    before = hvpipe.counters()
    scale, _ = core.begin_step(plan_id, 1, 1.0, True)
    late = hvpipe.rank() == hvpipe.size() - 1
    time.sleep(0.1 * late)
    core.submit(plan_id, 0, [np.ones(4, np.float32)], scale)
    core.collect(plan_id, 0, [np.empty(4, np.float32)])
    after = hvpipe.counters()
    assert after["steps"] == before["steps"] + 1
    if not late:
        assert after["exposed_wait_s"] - before["exposed_wait_s"] > 0.05


def test_nothing_is_recorded_without_a_trace(engine: Engine) -> None:
    assert engine.take_events() == []
