"""A pipeline refuses models, plans and options that cannot run, and says what is wanted."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError, MismatchError, PlanError
from hvpipe.keras.graph.layer_graph import layer_graph
from hvpipe.keras.pipeline import plan_choice
from hvpipe.keras.profiling.estimate import estimate
from hvpipe.plan.greedy import partition
from hvpipe.plan.pipelining import Pipelining
from hvpipe.specs.cluster import Cluster, Device, Host, equal_cluster
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile
from pipelines import (
    mlp,
    unit_profile,
)


class Real(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return tf.math.real(x)


def with_complex_numbers() -> keras.Model:
    """Build a model with complex numbers between all layers but the first and the last."""
    inputs = keras.Input((12,))
    x = keras.ops.cast(keras.layers.Dense(12)(inputs), "complex64")
    for _ in range(8):
        x = x * x
    return keras.Model(inputs, keras.layers.Dense(4)(Real()(x)))


def test_complex_numbers_between_stages_are_refused() -> None:
    """No gradient would come back, so the layers before would silently stay unchanged."""
    profile = unit_profile(layer_graph(with_complex_numbers()))
    if hvpipe.size() == 1:
        hk.pipeline_parallel(with_complex_numbers, profile=profile)
        return
    with pytest.raises(
        HvpipeError, match=r"cannot send complex tensors to each other: .* Received: complex64 from multiply"
    ):
        hk.pipeline_parallel(with_complex_numbers, profile=profile)


def reads_text() -> keras.Model:
    words = keras.Input((), dtype="string")
    x = keras.layers.Embedding(4, 8)(keras.layers.StringLookup(vocabulary=["a", "b"])(words))
    return keras.Model(words, keras.layers.Dense(4)(keras.layers.Dense(4)(x)))


def test_text_for_several_ranks_is_refused() -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank has all stages")
    with pytest.raises(HvpipeError, match=r"read text should be in the first stage, .* text for stage 0 on"):
        hk.pipeline_parallel(reads_text, stages=1)


class Subclassed(keras.Model):
    def call(self, inputs: Any) -> Any:
        return inputs


def with_an_input(**options: Any) -> keras.Model:
    inputs = keras.Input((4,)), keras.Input((4,), name="maybe", **options)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Dense(4)(inputs[0])))


def of_a_fixed_batch() -> keras.Model:
    return keras.Sequential([keras.Input(batch_shape=(8, 12)), *(keras.layers.Dense(4) for _ in range(4))])


def over_open_times() -> keras.Model:
    return keras.Sequential(
        [keras.Input((None, 3)), keras.layers.TimeDistributed(keras.layers.Dense(4)), keras.layers.LSTM(4)]
    )


@pytest.mark.parametrize(
    ("build", "options", "says"),
    [
        (mlp, {"stages": 99}, r"stages should be .* Received: stages=99"),
        (mlp, {"stages": 0}, r"Received: stages=0"),
        (mlp, {"microbatches": 0}, r"microbatches"),
        (mlp, {"schedule": "2f2b"}, r"schedule should be one of"),
        (mlp, {"schedule": "interleaved", "chunks": 1}, r"chunks"),
        (
            mlp,
            {"schedule": "interleaved", "chunks": 50, "microbatches": 64},
            r"as many stages as layer calls",
        ),
        (mlp, {"chunks": 3}, r"chunks should be 2 or more with schedule='interleaved'.*Received: .*chunks=3"),
        (mlp, {"microbatches": "4"}, r"microbatches should be a whole number. Received: microbatches='4'"),
        (mlp, {"stages": True}, r"Received: stages=True"),
        (mlp, {"replicas": 2}, r"replicas should be .*Received: replicas=2"),
        (mlp, {"replicas": (1, 98)}, r"replicas should be"),
        (mlp, {"replicas": ()}, r"replicas should be"),
        (Subclassed, {}, r"subclassed model into a function"),
        (lambda: None, {}, r"should return a Keras model"),
        (3, {}, r"needs a Keras model or a function"),
        (functools.partial(with_an_input, optional=True), {}, r"'maybe' with optional=True"),
        (functools.partial(with_an_input, sparse=True), {}, r"'maybe' with sparse=True"),
        (over_open_times, {}, r"fixed number of time steps.* Received: time_distributed on .*None, None, 3"),
        (of_a_fixed_batch, {}, r"without batch_shape. Received: an input of shape \(8, 12\)"),
    ],
)
def test_bad_input_is_refused(build: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(HvpipeError, match=says):
        hk.pipeline_parallel(build, **options)


def test_interleaved_stages_need_a_micro_batch_for_each_rank() -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank has a micro-batch")
    with pytest.raises(HvpipeError, match=rf"at least the number of ranks, {hvpipe.size()}\."):
        hk.pipeline_parallel(mlp, microbatches=hvpipe.size() - 1, schedule="interleaved")


def test_a_profile_or_plan_of_another_model_or_cluster_is_refused() -> None:
    other = Profile.of([LayerCost("a", 1, 2), LayerCost("b", 1, 2)], [("a", "b")], model="other")
    with pytest.raises(PlanError, match="profile should be of this model"):
        hk.pipeline_parallel(mlp, profile=other)
    # The model is checked first: other devices would not help.
    says = r"of this model, .* the plan has layer 'a' and 1 more, which the model lacks; the model has layer"
    with pytest.raises(PlanError, match=says):
        hk.pipeline_parallel(mlp, partition(other, equal_cluster(1), 1))
    if hvpipe.size() == 1:
        return
    own = estimate(layer_graph(mlp()), samples=1)
    plan = partition(own, equal_cluster(1), 1)
    with pytest.raises(PlanError, match="plan's devices should be the ranks of this run"):
        hk.pipeline_parallel(mlp, plan)
    document = plan.to_json()
    document["stages"][0]["devices"] = ["rank0"]
    with pytest.raises(PlanError, match="plan should have a device for every rank"):
        hk.pipeline_parallel(mlp, type(plan).from_json(document))


def test_a_cluster_of_other_devices_is_refused_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the search took half a minute, and its plan was refused."""
    monkeypatch.setattr(plan_choice, "plan_for_every_device", lambda *_: pytest.fail("searched"))
    hosts = tuple(Host(f"x{n}", (Device(f"x{n}"),)) for n in range(hvpipe.size()))
    with pytest.raises(PlanError, match=r"cluster's devices should be the ranks .* devices=\['x0'"):
        hk.pipeline_parallel(mlp, cluster=Cluster(hosts))


def test_a_cluster_with_too_little_memory_and_no_profile_warns(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: memory was checked for micro-batches of one sample, and nothing said so."""
    hosts = tuple(Host(f"x{n}", (Device(f"rank{n}", memory_bytes=1),)) for n in range(hvpipe.size()))
    with pytest.raises(HvpipeError, match="memory of every device"):
        hk.pipeline_parallel(mlp, cluster=Cluster(hosts))
    assert ("memory of micro-batches of one sample" in caplog.text) == (hvpipe.rank() == 0)


def test_a_stages_text_that_names_no_file_is_told_what_stages_may_be() -> None:
    with pytest.raises(HvpipeError, match=r"stages should be 'auto', a plan .* Received: 'two', no file"):
        hk.pipeline_parallel(mlp, stages="two")


def of_width(width: int, image: int = 6) -> keras.Model:
    layers = keras.layers
    inputs = keras.Input((image, image, 3))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(width, 3)(layers.Conv2D(width, 3)(inputs)))
    return keras.Model(inputs, layers.Dense(4)(x))


def test_a_profile_or_plan_of_other_sizes_is_refused() -> None:
    """Unnamed layers have the same names in both models."""
    own, other = (estimate(layer_graph(of_width(width)), samples=4) for width in (8, 16))
    size = hvpipe.size()
    pipe = hk.pipeline_parallel(functools.partial(of_width, 8), stages=1, profile=own)
    assert pipe.stage_numbers == (0,)
    with pytest.raises(PlanError, match=r"'conv2d' has 896 bytes of trained weights; .* it has 1792"):
        hk.pipeline_parallel(functools.partial(of_width, 8), stages=1, profile=other)
    with pytest.raises(PlanError, match=r"'conv2d' has 8192 bytes of output for 4 samples; .* has 2048"):
        hk.pipeline_parallel(functools.partial(of_width, 8, 10), stages=1, profile=own)
    scaled = own.at_batch(7)
    hk.pipeline_parallel(functools.partial(of_width, 8), stages=1, profile=scaled)
    plan = partition(other, equal_cluster(size), size)
    with pytest.raises(PlanError, match=r"plan should be of this model.* same names and other weights"):
        hk.pipeline_parallel(functools.partial(of_width, 8), plan)


def of_units(units: int, activation: str | None = None) -> keras.Model:
    dense = keras.layers.Dense
    hidden = [dense(units, activation, name=f"d{n}") for n in range(5)]
    return keras.Sequential([keras.Input((10,)), *hidden, dense(3)])


def without_weights(pool: int) -> keras.Model:
    layers = keras.layers
    flat = [layers.AveragePooling2D(pool, padding="same"), layers.GlobalAveragePooling2D()]
    return keras.Sequential([keras.Input((9, 9, 2)), layers.Conv2D(2, 3), *flat, *map(layers.Dense, (4, 3))])


def test_pipelines_that_differ_between_ranks_are_told_apart() -> None:
    """Regression: the message was cut in a word, and advised to look for calls of only some ranks."""
    last = hvpipe.size() - 1
    if last == 0:
        pytest.skip("one rank agrees with itself")
    odd = int(hvpipe.rank() == last)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (mlp, {"microbatches": 4 + odd}, "arguments.* Received: microbatches=4 on rank 0 and microbatches=5"),
        (
            mlp,
            {"schedule": ("gpipe", "1f1b")[odd]},
            "Received: schedule='gpipe' on rank 0 and schedule='1f1b'",
        ),
        (
            functools.partial(of_units, 16 + odd),
            {},
            r"same model .*: layer 0, 'd0', Dense with variables float32\[10, 16\], .* on rank 0 "
            r"and layer 0, 'd0', Dense with variables float32\[10, 17\], .*",
        ),
        (  # regression: nothing compared the settings of layers
            functools.partial(of_units, 16, ("relu", "tanh")[odd]),
            {},
            r"same model .*: layer 0 \(Dense\) activation: 'relu' on rank 0 and 'tanh'",
        ),
        (
            functools.partial(without_weights, 2 + odd),
            {},
            r"layer 1, .* with no variables and output float32\[None, 4, 4, 2\], on rank 0 and .* 3, 3, 2\],",
        ),
    ]
    for build, options, says in cases:
        with pytest.raises(MismatchError, match=rf"{says} on rank {last}$"):
            hk.pipeline_parallel(build, **options)


def test_options_that_contradict_a_plan_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"microbatches": 7}, "microbatches=7 and a plan with microbatches=5"),
        ({"schedule": "1f1b"}, "schedule='1f1b' and a plan with schedule='gpipe'"),
        ({"recompute": True}, "recompute=True and a plan with recompute=False"),
        ({"chunks": 3}, "chunks=3 and a plan with chunks=1"),
        ({"replicas": [9]}, r"replicas=\(9,\) and a plan with replicas=\("),
    ]
    size = hvpipe.size()
    profile = estimate(layer_graph(mlp()), samples=1)
    plan = partition(profile, equal_cluster(size), size, Pipelining("gpipe", 5))
    renamed = [dataclasses.replace(stage, devices=(f"rank{rank}",)) for rank, stage in enumerate(plan.stages)]
    plan = dataclasses.replace(plan, stages=tuple(renamed))
    for options, says in cases:
        with pytest.raises(HvpipeError, match=says):
            hk.pipeline_parallel(mlp, plan, **options)
    same = {"microbatches": 5, "schedule": "gpipe", "recompute": False, "replicas": (1,) * size}
    hk.pipeline_parallel(mlp, plan, **same, profile=profile, cluster=equal_cluster(size))
    with pytest.raises(PlanError, match="cluster should be the one that was planned for"):
        hk.pipeline_parallel(mlp, plan, cluster=equal_cluster(size, speeds=(0.5,)))


def test_a_call_of_the_whole_model_is_refused() -> None:
    pipe = hk.pipeline_parallel(mlp)
    with pytest.raises(HvpipeError, match="on all ranks together"):
        pipe(np.zeros((2, 12), np.float32))
