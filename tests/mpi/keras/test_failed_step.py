"""An op of one rank's step fails while another op waits for late ranks: the error comes before they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.horovod.tensorflow as hvd
from hvpipe.engine.engine import EngineClient
from hvpipe.keras.ops import library
from hvpipe.plan.buckets import Gradient, plan_buckets
from hvpipe.session import current

LATE_S = 2.5
ONES = np.ones(1000, np.float32)


@pytest.fixture
def engine() -> EngineClient:
    """Return the engine. Skip the case if there is no other rank."""
    if hvpipe.size() == 1:
        pytest.skip("one rank waits for nobody")
    return current().engine


def fail_beside(waits: Callable[[Any], Any]) -> None:
    """Run an op that waits and an op that fails in one step. The step should end with the failure.

    `waits` gets the number 1. Of a constant, TensorFlow would compute its op before the step runs.
    """

    def pause() -> np.bool_:
        time.sleep(0.5)  # by now the other op waits
        return np.bool_(False)

    @tf.function(autograph=False)
    def step(one: Any) -> Any:
        found = waits(one)
        tf.debugging.Assert(tf.numpy_function(pause, [], tf.bool), ["the op that fails"])
        return found

    with pytest.raises(tf.errors.InvalidArgumentError, match="the op that fails"):
        step(tf.constant(1, tf.int64))


def on_rank_0_first(engine: EngineClient, first: Callable[[], Any], later: Callable[[], Any]) -> None:
    """Run `first` on rank 0. Check that it ends before the other ranks run `later`."""
    engine.agree("the start")
    if hvpipe.rank() == 0:
        first()
        ended_s = time.monotonic()
    else:
        time.sleep(LATE_S)
        ended_s = time.monotonic()
        later()
    failed_s, *others_s = engine.agree("the times", ended_s)
    assert failed_s < min(others_s)


def test_an_announced_step(engine: EngineClient) -> None:
    """Regression: the error waited until all ranks had announced the step, or for the time limit."""
    plan = engine.add_plan("model", plan_buckets([Gradient("w", (1000,), "float32")], 4000))
    on_rank_0_first(
        engine,
        lambda: fail_beside(
            lambda one: library().hvpipe_begin_step(samples=1.0, announced=one, reduces=False, plan=plan)
        ),
        lambda: engine.native.begin_step(plan, 2, 1.0, False),
    )
    engine.remove_plan(plan)


def test_a_collected_bucket(engine: EngineClient) -> None:
    """Regression: the same for the sum of a bucket. The next step may use the bucket again."""
    plan = engine.add_plan("model", plan_buckets([Gradient("w", (1000,), "float32")], 4000))
    total = np.empty_like(ONES)

    def submit() -> None:
        engine.native.submit(plan, 0, [ONES], 1.0)

    def submit_and_fail() -> None:
        submit()
        fail_beside(
            lambda one: library().hvpipe_collect(
                token=one, plan=plan, bucket=0, shapes=[[1000]], T=tf.float32, N=1
            )
        )

    engine.native.begin_step(plan, 1, 1.0, True)
    ended = engine.counters()["operations"]
    on_rank_0_first(engine, submit_and_fail, submit)
    if hvpipe.rank() > 0:
        engine.native.collect(plan, 0, [total])
    while engine.counters()["operations"] < ended + 3:  # the bucket, and two agreements
        time.sleep(0.01)
    time.sleep(0.1)
    engine.native.begin_step(plan, 2, 1.0, True)
    submit()
    engine.native.collect(plan, 0, [total])
    np.testing.assert_array_equal(total, ONES * hvpipe.size())
    engine.remove_plan(plan)


def test_a_named_collective(engine: EngineClient) -> None:
    """Regression: the same for a collective by name. The other ranks get the sum all the same."""
    size = hvpipe.size()

    def reduce(name: str = "late") -> Any:
        return hvd.allreduce(tf.constant(ONES), op=hvd.Sum, name=name)

    def later() -> None:
        np.testing.assert_array_equal(reduce().numpy(), ONES * size)

    on_rank_0_first(engine, lambda: fail_beside(lambda _: reduce()), later)
    np.testing.assert_array_equal(reduce("the next").numpy(), ONES * size)
