"""Bucket plans: the buckets of a training step are announced, packed, reduced and unpacked."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import hvpipe
from arrays import (
    DTYPES,
    ROUNDING,
    Array,
    assert_equal_on_all_ranks,
    assert_sum,
    digest,
)
from hvpipe.engine.engine import EngineClient
from hvpipe.errors import HvpipeError
from hvpipe.plan.buckets import BucketPlan, Gradient, plan_buckets
from hvpipe.session import current

# Each kind has several buckets, from a few bytes to several chunks of the shared window.
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
    Gradient("t", (900, 40), "float32", table=True),
    Gradient("u", (300, 32), "bfloat16", table=True),
]
CAP_BYTES = 16_000
TABLE_BYTES = 16_000


def model_plan(compression: str | None = None) -> BucketPlan:
    plan = plan_buckets(MODEL, CAP_BYTES, compression, table_bytes=TABLE_BYTES)
    assert len(plan.buckets) >= 8
    assert [bucket.row for bucket in plan.buckets if bucket.row] == [32, 40]
    return plan


def gradient(place: int, step: int, rank: int) -> Array:
    """Return a rank's gradient. Its magnitudes vary so much that the order of addition changes the bits."""
    wanted = MODEL[place]
    noise = np.random.default_rng([place, step, rank])
    values = noise.standard_normal(wanted.shape) * 10.0 ** noise.integers(-3, 4, wanted.shape)
    if wanted.table:  # some rows shared with other ranks and some not; their number varies by step
        values *= (noise.random(len(values)) < 0.02 + 0.1 * (step % 3))[:, None]
    return np.asarray(values).astype(DTYPES[wanted.dtype])


def run_step(
    core: Any, plan_id: int, plan: BucketPlan, step: int, *, order: random.Random | None = None
) -> list[Array]:
    """Return one step's reduced gradients. With `order`, this rank uses its own order and timing."""
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
    # Collect on another thread, which waits for each bucket, as TensorFlow's threads may.
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
    engine: EngineClient, core: Any, compression: str | None
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


def test_gradients_are_averaged_by_samples(engine: EngineClient, core: Any) -> None:
    plan = model_plan()
    reduced = run_step(core, engine.add_plan("averages", plan), plan, 1)
    size = hvpipe.size()
    shares = [(rank + 1) / (size * (size + 1) / 2) for rank in range(size)]
    for place, wanted in enumerate(MODEL):
        terms = [gradient(place, 1, rank).astype(np.float64) * share for rank, share in enumerate(shares)]
        assert_sum(reduced[place], terms, 1.0, 2 * ROUNDING[wanted.dtype])


def table_plan(rows: int, row: int) -> BucketPlan:
    return plan_buckets([Gradient("t", (rows, row), "float32", table=True)], 1 << 30, table_bytes=1)


def reduced_table(core: Any, plan_id: int, table: Array) -> Array:
    """Return the average of the ranks' tables."""
    scale, _ = core.begin_step(plan_id, 1, 1.0, True)
    core.submit(plan_id, 0, [table], scale)
    reduced = np.full_like(table, 7.0)  # the result must overwrite every element, zeros included
    core.collect(plan_id, 0, [reduced])
    return reduced


def test_tables_of_any_rows(engine: EngineClient, core: Any) -> None:
    """Rows are used by no rank, all ranks, one rank, or the same on all. Repeated uses make buffers grow."""
    rank, size = hvpipe.rank(), hvpipe.size()
    plan_id = engine.add_plan("tables", table_plan(500, 16))
    noise = np.random.default_rng(1)
    chosen = (
        lambda: np.zeros((size, 500), bool),
        lambda: np.ones((size, 500), bool),
        lambda: np.arange(size)[:, None] == np.arange(500) % size,
        lambda: (np.arange(size)[:, None] == size - 1) & (np.arange(500) < 3),
        lambda: np.broadcast_to(np.arange(500) > 450, (size, 500)),
        lambda: noise.random((size, 500)) < 0.1,
        lambda: noise.random((size, 500)) < 0.5,
    )
    for choose in (*chosen, *reversed(chosen)):
        tables = noise.integers(1, 9, (size, 500, 16)) * choose()[:, :, None]
        found = reduced_table(core, plan_id, tables[rank].astype(np.float32))
        np.testing.assert_allclose(found, tables.mean(0), rtol=1e-6)
        assert_equal_on_all_ranks(found)


def test_nan_and_infinity_are_sent_in_tables(engine: EngineClient, core: Any) -> None:
    table = np.zeros((100, 16), np.float32)
    last = hvpipe.size() - 1
    if hvpipe.rank() == last:
        table[3, 15], table[4, 0], table[99] = np.nan, -np.inf, -0.0
    found = reduced_table(core, engine.add_plan("tables", table_plan(100, 16)), table)
    assert np.isnan(found[3, 15])
    assert found[4, 0] == -np.inf
    assert np.count_nonzero(found) == 2


@pytest.mark.parametrize("row", [16, 17, 33, 64, 75, 100])
def test_rows_of_any_length(engine: EngineClient, core: Any, row: int) -> None:
    """The nonzero element of a row may be at any index."""
    rank, size = hvpipe.rank(), hvpipe.size()
    tables = np.zeros((size, 3 * row, row), np.float32)
    for other in range(size):
        tables[other, np.arange(row) * 3, np.arange(row)] = other + 1.0
    found = reduced_table(core, engine.add_plan("tables", table_plan(3 * row, row)), tables[rank])
    np.testing.assert_allclose(found, tables.mean(0), rtol=1e-6)


def test_rows_that_are_zero_on_all_ranks_are_not_sent(engine: EngineClient, core: Any) -> None:
    rows, row, used = 2000, 64, 20
    table = np.zeros((rows, row), np.float32)
    table[hvpipe.rank() : rows : rows // used] = 1.0
    plan_id = engine.add_plan("tables", table_plan(rows, row))
    before = engine.counters()["bytes_sent"]
    found = reduced_table(core, plan_id, table)
    sent = engine.counters()["bytes_sent"] - before
    size = hvpipe.size()
    assert np.count_nonzero(found) == used * row * size
    if size > 1:
        # At most: a flag of two bytes for each row, then the rows of all ranks: twice around a ring, and to
        # and from the host's first rank.
        assert 0 < sent < 4 * (2 * rows + 4 * row * used * size) < 0.4 * table.nbytes
    if size > 1 and os.environ.get("HVPIPE_SHARED_MEMORY") == "0":
        # In a ring, no two ranks have a row in common: each rank's rows once to every other rank, and marks.
        assert sent < 1.5 * (size - 1) * 4 * row * used


def test_rows_of_several_tensors_are_refused(core: Any) -> None:
    for counts in ([32, 32], [40]):
        with pytest.raises(HvpipeError, match=r"should hold one table of equal rows.*bucket=t"):
            core.add_plan(0, "tables", 1, [("t", "float32", "float32", counts, 0, 16)], False)


def test_steps_of_two_plans_overlap(engine: EngineClient, core: Any) -> None:
    plan = plan_buckets([Gradient("w", (30_000,), "float32")], 1 << 20)
    first, second = engine.add_plan("first", plan), engine.add_plan("second", plan)
    ones = np.ones(30_000, np.float32)
    # Both steps are announced and submitted before either is collected. Odd ranks submit in another order.
    scales = {plan_id: core.begin_step(plan_id, 1, 1.0, True)[0] for plan_id in (first, second)}
    for plan_id in (first, second) if hvpipe.rank() % 2 else (second, first):
        core.submit(plan_id, 0, [ones * (plan_id + 1)], scales[plan_id])
    for plan_id in (second, first):
        out = np.empty(30_000, np.float32)
        core.collect(plan_id, 0, [out])
        np.testing.assert_allclose(out, plan_id + 1, rtol=1e-6)


def test_a_rank_that_is_ahead_does_not_block_the_others(engine: EngineClient, core: Any) -> None:
    """Its sends in flight could all be of urgent buckets that no other rank has submitted."""
    length = 50_000 * hvpipe.size()  # several messages on every link
    model = [Gradient(f"layer {place}", (length,), "float32") for place in range(13)]
    plan = plan_buckets(model, 4 * length)
    plan_id = engine.add_plan("ahead", plan)
    scale, _ = core.begin_step(plan_id, 1, 1.0, True)
    (back, _), *front = reversed(plan.by_need())

    def submit(number: int) -> None:
        core.submit(plan_id, number, [np.full(length, number + 1, np.float32)], scale)

    def collect(number: int) -> None:
        reduced = np.empty(length, np.float32)
        core.collect(plan_id, number, [reduced])
        np.testing.assert_allclose(reduced, number + 1, rtol=1e-6)

    if hvpipe.rank() == 0:
        for number, _ in front:
            submit(number)
        time.sleep(0.05)
    submit(back)
    collect(back)
    if hvpipe.rank() > 0:
        for number, _ in front:
            submit(number)
    for number, _ in front:
        collect(number)


def test_a_step_that_accumulates_announces_no_buckets(engine: EngineClient, core: Any) -> None:
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


def test_a_rank_without_samples_adds_nothing(engine: EngineClient, core: Any) -> None:
    plan_id = engine.add_plan("unequal", plan_buckets([Gradient("w", (4,), "float32")], 100))
    mine = 5.0 if hvpipe.rank() == 0 else 0.0
    scale, total = core.begin_step(plan_id, 1, mine, True)
    assert (scale, total) == (mine / 5.0, 5.0)
    core.submit(plan_id, 0, [np.full(4, 1.0 + hvpipe.rank(), np.float32)], scale)
    out = np.empty(4, np.float32)
    core.collect(plan_id, 0, [out])
    assert out.tolist() == [1.0] * 4
    # If no rank has samples, the scale is 0, not NaN.
    assert core.begin_step(plan_id, 2, 0.0, False) == (0.0, 0.0)


def test_steps_out_of_order_are_refused_and_harm_nothing(engine: EngineClient, core: Any) -> None:
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
    with pytest.raises(HvpipeError, match=r"still holds the previous step|no step announced"):
        core.submit(plan_id, 0, [three], 1.0)
    core.submit(plan_id, 1, [two], 1.0)
    core.collect(plan_id, 0, [three])
    core.collect(plan_id, 1, [two])
    assert three.tolist() == [hvpipe.size()] * 3
    assert two.tolist() == [hvpipe.size()] * 2


def test_a_step_of_an_unknown_plan(core: Any) -> None:
    with pytest.raises(HvpipeError, match="Received: plan=9999"):
        core.begin_step(9999, 1, 1.0, True)


def test_a_plan_without_mpi_is_refused(engine: EngineClient) -> None:
    if engine.native is None:
        with pytest.raises(HvpipeError, match="Received: one rank without MPI"):
            engine.add_plan("none", model_plan())


def test_waiting_for_a_bucket_is_counted(engine: EngineClient, core: Any) -> None:
    if hvpipe.size() == 1:
        pytest.skip("a single rank waits for nobody")
    plan_id = engine.add_plan("exposed", plan_buckets([Gradient("w", (4,), "float32")], 100))
    before = hvpipe.counters()
    scale, _ = core.begin_step(plan_id, 1, 1.0, True)
    late = hvpipe.rank() == hvpipe.size() - 1
    time.sleep(0.4 * late)
    core.submit(plan_id, 0, [np.ones(4, np.float32)], scale)
    core.collect(plan_id, 0, [np.empty(4, np.float32)])
    after = hvpipe.counters()
    assert after["steps"] == before["steps"] + 1
    if not late:
        assert after["exposed_wait_s"] - before["exposed_wait_s"] > 0.05


def test_nothing_is_recorded_without_a_trace(engine: EngineClient) -> None:
    assert engine.take_events() == []


@contextlib.contextmanager
def traced_engine() -> Iterator[EngineClient]:
    """Open a second engine that records a trace."""
    session = current()
    settings = dataclasses.replace(session.settings, trace_path="recorded")
    made = EngineClient(session.world, settings)
    yield made
    made.agree("end of a case")
    made.stop()
    made.native = None


def by_mpi() -> bool:
    """Tell whether HVPIPE_ALL_REDUCE asks for MPI's own all-reduce, of one array after the other."""
    return any(name == "mpi" for name, _ in current().settings.algorithms)


def test_an_urgent_bucket_overtakes_a_large_one(core: Any) -> None:
    """The large bucket is under way when the urgent one arrives.

    It has more messages than may be in flight at once.
    """
    session = current()
    if hvpipe.size() == 1 or by_mpi() or (core.hosts == 1 and session.settings.shared_memory):
        pytest.skip("nothing travels, and in shared memory buckets take turns")
    if session.settings.segment_bytes:
        pytest.skip("messages so small that the large bucket may be through at once")
    count = (256 << 10) // 4 * hvpipe.size()  # a message is no larger
    arrays = [np.ones(50 * count, np.float32), np.ones(5 * count, np.float32)]
    model = [Gradient("urgent", (5 * count,), "float32"), Gradient("large", (50 * count,), "float32")]
    plan = plan_buckets(model, 1000)
    assert [bucket.name for bucket in plan.buckets] == ["large", "urgent"]
    overtook = []
    with traced_engine() as engine:
        plan_id = engine.add_plan("overtaking", plan)
        for step in range(5):
            engine.native.begin_step(plan_id, step, 1.0, True)
            for number, array in enumerate(arrays):
                engine.native.submit(plan_id, number, [array], 1.0)
            for number, array in enumerate(arrays):
                engine.native.collect(plan_id, number, [np.empty_like(array)])
            ends = {name: end for category, name, _, end in engine.take_events() if category == "reduce"}
            overtook.append(ends["urgent"] < ends["large"])
    # One step suffices: a rank may be descheduled between its submissions until the large bucket is done.
    assert any(overtook)


def test_a_waiting_engine_uses_no_core(engine: EngineClient, core: Any) -> None:
    """It waits for work, and for a bucket that another rank has yet to submit."""
    if by_mpi():
        pytest.skip("a thread spins inside MPI_Allreduce")
    first = hvpipe.rank() == 0
    plan_id = engine.add_plan("late", plan_buckets([Gradient("w", (4,), "float32")], 100))
    ones = np.ones(4, np.float32)
    hvpipe.barrier()
    cores = [cores_while_asleep()]
    core.begin_step(plan_id, 1, 1.0, True)
    if not first:
        core.submit(plan_id, 0, [ones], 1.0)
    cores.append(cores_while_asleep())
    if first:
        core.submit(plan_id, 0, [ones], 1.0)
    core.collect(plan_id, 0, [ones])
    assert max(cores) < 0.25


def cores_while_asleep() -> float:
    """Return how many cores all threads of this process keep busy while this thread sleeps."""
    used_s, begun_s = time.process_time(), time.monotonic()
    time.sleep(0.5)
    return (time.process_time() - used_s) / (time.monotonic() - begun_s)


def test_a_plan_that_one_rank_never_uses_is_harmless(engine: EngineClient, core: Any) -> None:
    """Regression: if a rank built one more optimizer than its peers, the next step of any model failed."""
    plan = plan_buckets([Gradient("w", (300,), "float32")], CAP_BYTES)
    ones, total = np.ones(300, np.float32), np.empty(300, np.float32)
    unused = [engine.add_plan("unused", plan)] if hvpipe.rank() == 0 else []
    used = engine.add_plan("used", plan)
    core.begin_step(used, 0, 1.0, True)
    core.submit(used, 0, [ones], 1.0)
    core.collect(used, 0, [total])
    np.testing.assert_array_equal(total, ones * hvpipe.size())
    for each in (*unused, used):
        engine.remove_plan(each)


def test_a_step_that_a_thread_announces_late_is_no_disagreement(engine: EngineClient, core: Any) -> None:
    """Regression: a rank in an all-reduce took a peer's announcement of a later step for another call.

    All ranks make the calls in one order: step of a, all-reduce, step of b. Rank 0 has submitted a and comes
    late to b. The others come late to the submit of a, which the all-reduce waits for.
    """
    first = hvpipe.rank() == 0
    if hvpipe.size() == 1:
        pytest.skip("one rank disagrees with nobody")
    ones = np.ones(300, np.float32)
    a, b = (
        engine.add_plan(name, plan_buckets([Gradient(name, (300,), "float32")], CAP_BYTES)) for name in "ab"
    )

    def announce_b(after_s: float) -> None:
        time.sleep(after_s)
        core.begin_step(b, 0, 1.0, False)

    def submit_a() -> None:
        core.submit(a, 0, [ones], 1.0)

    core.begin_step(a, 0, 1.0, True)
    if first:
        submit_a()
    with ThreadPoolExecutor(2) as threads:
        total = threads.submit(engine.allreduce, ones, "sum")
        time.sleep(0.3)  # the order of the calls
        announced = threads.submit(announce_b, 1.7 if first else 0.0)
        if not first:
            time.sleep(2.2)
            submit_a()
        np.testing.assert_array_equal(total.result(), ones * hvpipe.size())
        announced.result()
    core.collect(a, 0, [np.empty_like(ones)])
    for plan in (a, b):
        engine.remove_plan(plan)
