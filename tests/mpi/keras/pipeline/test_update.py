"""Gradients on pipeline ranks: shared weights get the sum of their gradients, with any optimizer."""

from __future__ import annotations

import dataclasses
from itertools import chain
from typing import Any

import keras
import pytest

import hvpipe
import hvpipe.keras as hk
from hvpipe.keras.pipeline.tensor_channel import TensorChannel
from hvpipe.keras.pipeline.update import PipelineUpdate
from hvpipe.session import current
from pipelines import MODELS, batches, check_same, compile_as_all, mlp, plain, train

WITHIN = 1e-5


def crossed(count: int) -> keras.Model:
    """Build two layers of the same shape. Calls of the first surround `count` - 2 calls of the second."""
    inputs = x = keras.Input((12,))
    outer, inner = keras.layers.Dense(12, activation="tanh"), keras.layers.Dense(12, activation="relu")
    for layer in (outer, *[inner] * (count - 2), outer):
        x = layer(x)
    return keras.Model(inputs, x)


def crossed_in_four_calls() -> keras.Model:
    return crossed(4)


def crossed_in_two_calls_a_rank() -> keras.Model:
    return crossed(2 * hvpipe.size())


IN_STAGES = (crossed_in_four_calls, {}, [(0, 1), (2, 3)])
INTERLEAVED = (crossed_in_two_calls_a_rank, {"schedule": "interleaved"}, [(0,), (1,), (2,), (3,)])


@pytest.mark.parametrize(
    ("bucket_bytes", "build", "options", "cuts_of_two"),
    [
        pytest.param(None, *IN_STAGES),
        pytest.param(1, *IN_STAGES, marks=pytest.mark.every_size),
        pytest.param(None, *INTERLEAVED, marks=pytest.mark.every_size),
        pytest.param(1, *INTERLEAVED),
    ],
)
def test_layers_shared_in_another_order_get_their_own_gradients(
    bucket_bytes: int | None,
    build: Any,
    options: dict[str, Any],
    cuts_of_two: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank meets the layers in its own order: by its stage, or by which of its stages ends first.

    Gradients are summed in as few buckets as possible, or in one bucket for each.
    """
    if bucket_bytes is not None:
        settings = dataclasses.replace(current().settings, bucket_bytes=bucket_bytes)
        monkeypatch.setattr(current(), "settings", settings)
    name = build.__name__
    monkeypatch.setitem(MODELS, name, build)
    keras.utils.set_random_seed(5)
    pipe = compile_as_all(hk.pipeline_parallel(build, microbatches=4, **options))
    if hvpipe.size() == 2:
        assert [cut.calls for cut in pipe.stages.cuts] == cuts_of_two
    check_same(train(pipe, pipe.stages.graph, batches(build)), plain(name), WITHIN)


def each_rank_twice() -> keras.Model:
    """Build a layer for each rank. The calls go over all layers twice."""
    inputs = x = keras.Input((12,))
    shared = [keras.layers.Dense(12, activation="tanh") for _ in range(hvpipe.size())]
    for layer in [*shared, *shared]:
        x = layer(x)
    return keras.Model(inputs, x)


def test_a_layer_in_two_stages_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other rank has the layer, so its gradient is summed here."""
    monkeypatch.setitem(MODELS, "each_rank_twice", each_rank_twice)
    keras.utils.set_random_seed(5)
    pipe = compile_as_all(hk.pipeline_parallel(each_rank_twice, microbatches=4, schedule="interleaved"))
    size = hvpipe.size()
    assert [cut.calls for cut in pipe.stages.cuts] == [(call,) for call in range(2 * size)]
    check_same(train(pipe, pipe.stages.graph, batches(each_rank_twice)), plain("each_rank_twice"), WITHIN)


def test_gradients_for_the_previous_stage_are_sent_before_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum takes time on this rank, because it reads all gradients of the stage."""
    happened: list[str] = []
    for kind, method in ((TensorChannel, "send"), (PipelineUpdate, "stage_done")):
        own = getattr(kind, method)

        def noted(owner: Any, *args: Any, method: str = method, own: Any = own, **options: Any) -> None:
            happened.append(method)
            own(owner, *args, **options)

        monkeypatch.setattr(kind, method, noted)
    pipe = compile_as_all(hk.pipeline_parallel(mlp, microbatches=4))
    pipe.train_on_batch(*batches(mlp, 8))
    assert happened.count("stage_done") == 1
    assert happened[-1] == "stage_done"
    assert len(happened) > 1 or hvpipe.size() == 1


def test_sums_over_replicas_begin_before_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are sent while other stages still run."""
    if hvpipe.size() == 1:
        pytest.skip("replicas are several ranks")
    begun: list[bool] = []
    own = PipelineUpdate.apply

    def noted(update: PipelineUpdate) -> None:
        begun.extend(bucket.pending is not None for bucket in chain(*update._buckets))
        own(update)

    monkeypatch.setattr(PipelineUpdate, "apply", noted)
    pipe = compile_as_all(hk.pipeline_parallel(mlp, stages=1, microbatches=4))
    pipe.train_on_batch(*batches(mlp, 8))
    assert begun
    assert all(begun)


def test_sums_are_not_held_until_the_next_step() -> None:
    pipe = compile_as_all(hk.pipeline_parallel(mlp, stages=1, microbatches=4))
    pipe.train_on_batch(*batches(mlp, 8))
    (driver,) = pipe._drivers
    buckets = list(chain(*driver._update._buckets))
    assert bool(buckets) == (hvpipe.size() > 1)
    assert all(bucket.pending is None for bucket in buckets)
