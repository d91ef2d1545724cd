"""Ranks that disagree, come late, or never come: an error on every rank. Each case breaks its own engine."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hvpipe
from hvpipe.engine.engine import EngineClient
from hvpipe.environment.discover import discover
from hvpipe.environment.settings import settings
from hvpipe.errors import DeadlineError, HvpipeError, MismatchError
from hvpipe.plan.buckets import Gradient, plan_buckets
from hvpipe.world.open import open_world

TIMEOUT_S = 1.5
# For errors that come before the limit, however late the other ranks are on a busy machine.
LONG_TIMEOUT_S = 3.0
ONES = np.ones(5000, np.float32)


@pytest.fixture
def engine() -> Iterator[EngineClient]:
    """Open a second engine, which all ranks may break."""
    with second_engine(TIMEOUT_S) as made:
        yield made


@pytest.fixture
def patient_engine() -> Iterator[EngineClient]:
    """Open a second engine with the long limit."""
    with second_engine(LONG_TIMEOUT_S) as made:
        yield made


@contextlib.contextmanager
def second_engine(timeout_s: float, **changes: Any) -> Iterator[EngineClient]:
    if hvpipe.size() not in (2, 3):
        pytest.skip("one rank disagrees with nobody, and four are no other than three")
    wanted = dataclasses.replace(settings(), timeout_s=timeout_s, trace_path="recorded", **changes)
    # Only the engine is impatient: ranks of a busy machine may be late while it is made.
    world = open_world(discover(), settings())
    made = EngineClient(world, wanted)
    hvpipe.barrier()
    yield made
    hvpipe.barrier()
    # A broken engine keeps its shared memory until the process ends, because freeing it takes all ranks.
    made.native.fail("the end of the case")
    made.stop()
    made.native = None
    world.close()


def is_last() -> bool:
    return hvpipe.rank() == hvpipe.size() - 1


def begin(engine: EngineClient, gradients: list[Gradient], reduces: bool = True, name: str = "model") -> None:
    plan = plan_buckets(gradients, 1000)
    engine.native.begin_step(engine.add_plan(name, plan), 7, 1.0, reduces)


Call = Callable[[EngineClient], Any]
WEIGHTS = [Gradient("w", (3,), "float32")]
# For each disagreement: the call of all ranks but the last, the last rank's call, and how errors describe
# each.
DISAGREEMENTS: dict[str, tuple[Call, Call, tuple[str, str]]] = {
    "dtypes": (
        lambda e: e.allreduce(ONES),
        lambda e: e.allreduce(ONES.astype(np.float64)),
        (r"allreduce \(average\) of float32\[5000\]", r"allreduce \(average\) of float64\[5000\]"),
    ),
    "shapes": (
        lambda e: e.allreduce(ONES),
        lambda e: e.allreduce(ONES[:-1]),
        (r"allreduce .*float32\[5000\]", r"allreduce .*float32\[4999\]"),
    ),
    "sizes that take a different number of messages": (
        lambda e: e.allreduce(ONES),
        lambda e: e.allreduce(np.ones(500_000, np.float32)),
        (r"allreduce .*float32\[5000\]", r"allreduce .*float32\[500000\]"),
    ),
    "operations": (
        lambda e: e.allreduce(ONES),
        lambda e: e.allreduce(ONES, op="sum"),
        (r"allreduce \(average\)", r"allreduce \(sum\)"),
    ),
    "compression": (
        lambda e: e.allreduce(ONES),
        lambda e: e.allreduce(ONES, compression="bf16"),
        (r"allreduce .*float32\[5000\]", "allreduce .*bf16"),
    ),
    "roots": (
        lambda e: e.broadcast(ONES, root=0),
        lambda e: e.broadcast(ONES, root=1),
        ("broadcast .*from rank 0", "broadcast .*from rank 1"),
    ),
    "rows to gather": (
        lambda e: e.allgather(np.ones((2, 3))),
        lambda e: e.allgather(np.ones((2, 4))),
        (r"allgather of float64\['\*', 3\]", r"allgather of float64\['\*', 4\]"),
    ),
    "a barrier and a broadcast": (
        lambda e: e.agree("barrier"),
        lambda e: e.broadcast(ONES),
        ("barrier", "broadcast of"),
    ),
    "an all-reduce and a barrier": (
        lambda e: e.allreduce(ONES),
        lambda e: e.agree("barrier"),
        ("allreduce", "barrier"),
    ),
    "an all-reduce and a step": (
        lambda e: e.allreduce(ONES),
        lambda e: begin(e, WEIGHTS),
        ("allreduce", "training step 7 of model"),
    ),
    "a skipped step": (
        lambda e: begin(e, WEIGHTS),
        lambda e: e.agree("end of epoch 1"),
        ("training step 7 of model", "end of epoch 1"),
    ),
    "models": (
        lambda e: begin(e, WEIGHTS),
        lambda e: begin(e, [Gradient("w", (4,), "float32")]),
        ("training step 7 of model", "training step 7 of model"),
    ),
    "a plan of one rank": (
        lambda e: begin(e, WEIGHTS),
        lambda e: begin(e, [Gradient("v", (3,), "float32")], name="discriminator"),
        ("training step 7 of model", "training step 7 of discriminator"),
    ),
    "accumulation": (
        lambda e: begin(e, WEIGHTS),
        lambda e: begin(e, WEIGHTS, reduces=False),
        ("training step 7 of model", "training step 7 of model"),
    ),
}

# A rank in shared memory and a rank that exchanges messages do not meet. The rank just below the one that
# differs finds its message after a second. That would end all ranks, unless someone catches the error.
FOUND_BY_THE_RANK_BELOW = ("an all-reduce and a barrier", "an all-reduce and a step")


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_all_ranks_get_an_error_if_they_disagree(patient_engine: EngineClient, what: str) -> None:
    engine = patient_engine
    usual, other, says = DISAGREEMENTS[what]
    with pytest.raises((MismatchError, DeadlineError)) as caught:
        (other if is_last() else usual)(engine)
    if what in FOUND_BY_THE_RANK_BELOW and engine.native.hosts == 1 and settings().shared_memory:
        below = hvpipe.rank() == hvpipe.size() - 2
        assert caught.type is (MismatchError if below else DeadlineError)
        return
    assert caught.type is MismatchError
    # Each error names this rank's operation first, then another rank's.
    here, there = reversed(says) if is_last() else says
    assert re.search(rf"is at: {here}.* is at: ({there}|{here})", str(caught.value)), caught.value
    with pytest.raises(MismatchError, match="disagree"):
        engine.agree("anything later")


def test_a_wait_that_times_out_names_what_it_waited_for(engine: EngineClient) -> None:
    if not is_last():
        with pytest.raises(DeadlineError, match=r"Waited 1.5 s in barrier for .*HVPIPE_TIMEOUT"):
            engine.agree("barrier")


@pytest.mark.parametrize("kind", ["data parallel", "pipeline"])
def test_a_rank_may_be_late_until_two_steps_have_ended(kind: str) -> None:
    """As a GPU that compiles kernels first."""
    with second_engine(TIMEOUT_S, first_step_timeout_s=60.0) as engine:
        plan_id = engine.add_plan("model", plan_buckets(WEIGHTS, 1000))
        for step in range(3):
            if is_last() and step == 1:
                time.sleep(2 * TIMEOUT_S)
            engine.agree(f"step {step}")
            if kind == "data parallel":
                engine.native.begin_step(plan_id, step, 1.0, False)
            else:
                with engine.recorded("step", "a step"):
                    pass
        if not is_last():
            with pytest.raises(DeadlineError, match=r"Waited 1.5 s in barrier for .*HVPIPE_TIMEOUT"):
                engine.agree("barrier")


def test_a_first_step_that_never_comes_names_its_limit() -> None:
    with second_engine(0.5, first_step_timeout_s=TIMEOUT_S) as engine:
        if not is_last():
            with pytest.raises(
                DeadlineError, match=r"Waited 1.5 s in barrier for .*HVPIPE_FIRST_STEP_TIMEOUT"
            ):
                engine.agree("barrier")


def test_an_all_reduce_that_a_rank_does_not_join(engine: EngineClient) -> None:
    if not is_last():
        with pytest.raises(
            DeadlineError, match=r"Waited 1.5 s in allreduce \(average\) of float32\[5000\] for .*rank"
        ):
            engine.allreduce(ONES)
        with pytest.raises(DeadlineError, match=r"Waited 1\.5 s in allreduce"):
            engine.agree("later")


def test_a_bucket_that_a_rank_does_not_submit(engine: EngineClient) -> None:
    plan = plan_buckets([Gradient("kernel", (300,), "float32"), Gradient("bias", (30,), "float32")], 1000)
    plan_id = engine.add_plan("model", plan)
    engine.native.begin_step(plan_id, 1, 1.0, True)
    engine.native.submit(plan_id, 0, [np.ones(30, np.float32)], 1.0)
    engine.native.collect(plan_id, 0, [np.empty(30, np.float32)])
    if not is_last():
        engine.native.submit(plan_id, 1, [np.ones(300, np.float32)], 1.0)
        with pytest.raises(DeadlineError, match=r"Waited 1\.5 s in kernel for"):
            engine.native.collect(plan_id, 1, [np.empty(300, np.float32)])


def test_a_rank_that_does_not_join_a_bucket_is_named(engine: EngineClient) -> None:
    """Both neighbours in the ring know it: one hears that the rank has not come, and one gets no data."""
    if settings().shared_memory and engine.native.hosts < hvpipe.size():
        pytest.skip("ranks of one host meet in shared memory")
    last = hvpipe.size() - 1
    length = 100_000 * hvpipe.size()  # several messages on every link
    plan_id = engine.add_plan("model", plan_buckets([Gradient("kernel", (length,), "float32")], 4 * length))
    engine.native.begin_step(plan_id, 1, 1.0, True)
    if is_last():
        return
    engine.native.submit(plan_id, 0, [np.ones(length, np.float32)], 1.0)
    behind = "to reach this all-reduce" if hvpipe.rank() == last - 1 else "ring segment"
    with pytest.raises(DeadlineError, match=rf"^(?=.*{behind}).* rank {last}\b"):
        engine.native.collect(plan_id, 0, [np.empty(length, np.float32)])


def test_no_operation_starts_after_a_failure(engine: EngineClient) -> None:
    plan_id = engine.add_plan("model", plan_buckets(WEIGHTS, 1000))
    engine.native.begin_step(plan_id, 1, 1.0, True)
    hvpipe.barrier()
    engine.native.fail("enough")
    out = np.empty(3, np.float32)
    for call in (
        lambda: engine.native.submit(plan_id, 0, [out], 1.0),
        lambda: engine.native.collect(plan_id, 0, [out]),
        lambda: engine.native.begin_step(plan_id, 2, 1.0, True),
        lambda: engine.allreduce(out),
        lambda: engine.broadcast(out),
        lambda: engine.allgather(out),
        lambda: engine.agree("anything"),
    ):
        with pytest.raises(HvpipeError, match="enough"):
            call()


def test_a_patient_wait_outlasts_the_timeout(engine: EngineClient) -> None:
    if is_last():
        time.sleep(2 * TIMEOUT_S)
    engine.agree_patiently("shutdown", 60)


def test_no_operation_starts_after_stop(engine: EngineClient) -> None:
    engine.agree("shutdown")
    engine.stop()
    engine.stop()
    with pytest.raises(HvpipeError, match="has been shut down"):
        engine.allreduce(ONES)


def test_a_trace_shows_each_bucket(engine: EngineClient) -> None:
    plan_id = engine.add_plan("model", plan_buckets([Gradient("kernel", (300,), "float32")], 1000))
    before_s = time.monotonic()
    scale, _ = engine.native.begin_step(plan_id, 1, 1.0, True)
    engine.native.submit(plan_id, 0, [np.ones(300, np.float32)], scale)
    engine.native.collect(plan_id, 0, [np.empty(300, np.float32)])
    engine.allreduce(ONES)
    after_s = time.monotonic()
    found = engine.take_events()
    assert engine.take_events() == []
    kernel = {category: (start, end) for category, name, start, end in found if name == "kernel"}
    assert sorted(kernel) == ["pack", "reduce", "unpack", "wait"]
    edges = [edge for category in ("pack", "wait", "reduce", "unpack") for edge in kernel[category]]
    assert edges == sorted(edges)
    assert before_s <= edges[0] <= edges[-1] <= after_s
    assert ("reduce", "allreduce (average) of float32[5000]") in [(c, n) for c, n, *_ in found]
