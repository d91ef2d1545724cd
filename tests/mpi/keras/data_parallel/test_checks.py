"""Gradients that are not finite, and weights that differ between ranks: noticed, alike on all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError, MismatchError
from training import (
    assert_same_bits,
    assert_same_on_all_ranks,
    compiled,
    fit,
    my_batches,
    parallel,
    samples,
    state_of,
)


def is_last() -> bool:
    return hvpipe.rank() == hvpipe.size() - 1


def batches(without: int | None = None, nan_in: int | None = None) -> Any:
    """Return four batches of this rank, without one of them, or with a NaN in one on the last rank only."""
    x, y = samples(4 * 8 * hvpipe.size())
    mine = slice(hvpipe.rank() * 32, (hvpipe.rank() + 1) * 32)
    x, y = x[mine].copy(), y[mine]
    if nan_in is not None and is_last():
        x[8 * nan_in, 3] = np.nan
    kept = [slice(8 * i, 8 * i + 8) for i in range(4) if i != without]
    x, y = np.concatenate([x[part] for part in kept]), np.concatenate([y[part] for part in kept])
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)


@pytest.mark.parametrize(
    "overlap",
    [pytest.param("step", marks=[pytest.mark.every_size, pytest.mark.older_tensorflow]), "backward"],
)
def test_a_step_is_skipped_as_a_whole(overlap: str, caplog: pytest.LogCaptureFixture) -> None:
    """Weights, slots and the step count are as if the batch had never been there."""
    skipping = parallel(compiled(optimizer=keras.optimizers.Adam(0.01)), overlap, nonfinite="skip")
    fit(skipping, batches(nan_in=1))
    found = state_of(skipping)
    assert int(skipping.optimizer.iterations) == 3
    told = [r.getMessage() for r in caplog.records if "skipped step" in r.getMessage()]
    assert len(told) == (hvpipe.rank() == 0)
    if told:
        assert "skipped step 2 on all ranks (skipped so far: 1)" in told[0]
    without = parallel(compiled(optimizer=keras.optimizers.Adam(0.01)), overlap)
    fit(without, batches(without=1))
    assert_same_bits(found, state_of(without))
    assert_same_on_all_ranks(found)


@pytest.mark.every_size
def test_accumulated_gradients_are_skipped_together() -> None:
    """The sum of micro-steps 1 and 2 is dropped; that of 3 and 4 updates."""

    def run(data: Any, **options: Any) -> Any:
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        model = parallel(compiled(optimizer=optimizer), **options)
        fit(model, data, epochs=1)
        return model

    model = run(batches(nan_in=1), nonfinite="skip")
    kernel = model.get_weights()[0]
    assert (kernel == run(batches().skip(2)).get_weights()[0]).all()
    assert (kernel != compiled().get_weights()[0]).any()
    assert int(model.optimizer._iterations) == 4
    assert np.isnan(run(batches(nan_in=1)).get_weights()[0]).any()


@pytest.mark.every_size
def test_a_guard_ends_with_its_data_parallel() -> None:
    """Regression: on one rank it went on to skip steps, and told nobody."""
    model = parallel(compiled(), nonfinite="raise")
    fit(model, batches())
    fit(parallel(model), batches(nan_in=1))
    assert np.isnan(model.get_weights()[0]).any()


@pytest.mark.parametrize("overlap", ["step", "none"])
def test_all_ranks_raise(overlap: str) -> None:
    model = parallel(compiled(), overlap, nonfinite="raise")
    says = rf"NaN or Inf in the sum .* of sequential/dense/kernel.*, from rank {hvpipe.size() - 1}, at step 2"
    with pytest.raises(HvpipeError, match=says):
        fit(model, batches(nan_in=1))
    assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.parametrize(("overlap", "nonfinite"), [("step", "skip"), ("step", "raise"), ("stale", "skip")])
def test_rank_0_alone_may_read_weights(
    overlap: str, nonfinite: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading finishes an update earlier than other ranks do. Each step still names its own rank."""
    model = parallel(compiled(), overlap, nonfinite=nonfinite, warmup_steps=0)
    x, y = samples(32, seed=hvpipe.rank())
    bad = {0: 16, hvpipe.size() - 1: 8}.get(hvpipe.rank())
    if bad is not None:
        x[bad] = np.nan
    read = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: model.get_weights())
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    callbacks = [read] if hvpipe.rank() == 0 else []
    if nonfinite == "raise":
        with pytest.raises(HvpipeError, match=rf", from rank {hvpipe.size() - 1}, at step 2\."):
            fit(model, data, callbacks=callbacks)
        return
    fit(model, data, callbacks=callbacks)
    assert_same_on_all_ranks(state_of(model))
    assert np.isfinite(model.get_weights()[0]).all()
    told = [r.getMessage() for r in caplog.records if "skipped step" in r.getMessage()]
    wanted = [("step 2 ", f"from rank {hvpipe.size() - 1}"), ("step 3 ", "from rank 0")]
    assert len(told) == (2 if hvpipe.rank() == 0 else 0), told
    for text, (step, rank) in zip(told, wanted, strict=hvpipe.rank() == 0):
        assert step in text
        assert text.endswith(rank)


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_a_step_among_several_of_one_call(overlap: str) -> None:
    """Regression: the finite gradients of the step after it hid those that were not."""
    model = parallel(compiled(steps_per_execution=4), overlap, nonfinite="raise")
    with pytest.raises(HvpipeError, match=r"NaN or Inf in the sum .* at step [34]"):
        fit(model, batches(nan_in=1))


@pytest.mark.every_size
def test_the_first_variable_and_rank_that_differ_are_named() -> None:
    model = parallel(compiled(), verify_every=2)
    fit(model, my_batches(4))

    def spoil(batch: int, logs: Any) -> None:
        if batch == 2 and is_last():
            bias = model.trainable_variables[1]
            bias.assign(bias + 1e-6)

    spoiling = keras.callbacks.LambdaCallback(on_train_batch_end=spoil)
    if hvpipe.size() == 1:
        fit(model, my_batches(4), callbacks=[spoiling])
        return
    last = hvpipe.size() - 1
    with pytest.raises(MismatchError, match=rf"after step 8\..*dense/bias differs on rank {last} from"):
        fit(model, my_batches(4), callbacks=[spoiling])


def test_bad_arguments() -> None:
    with pytest.raises(HvpipeError, match="Received: nonfinite='stop'"):
        hk.data_parallel(compiled(), nonfinite="stop")
    with pytest.raises(HvpipeError, match="Received: verify_every=0"):
        hk.data_parallel(compiled(), verify_every=0)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(HvpipeError, match="skips steps with NaN or Inf itself"):
        fit(parallel(compiled(optimizer=scaled), nonfinite="skip"), batches())
