"""Profiles on several ranks, and how `hvpipe profile` loads a model and makes its inputs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError
from hvpipe.keras.graph.layer_graph import layer_graph
from hvpipe.keras.profiling import cluster as cluster_module
from hvpipe.keras.profiling.estimate import estimate
from hvpipe.keras.profiling.model_loader import load_model_and_batch, random_batch
from hvpipe.monitor.visible_gpus import GpuInfo, MigDevice
from hvpipe.plan.greedy import partition
from hvpipe.session import current
from hvpipe.specs.profile import Profile
from hvpipe.specs.profile_request import InputShape, ProfileTask
from pipelines import batches, compile_as_all, mlp

NETS = """
import keras
from neighbour import WIDTH

def small():
    x = keras.Input((WIDTH,))
    return keras.Model(x, keras.layers.Dense(2, name="dense")(x), name="small")

def with_batch():
    return small(), [[0.5] * WIDTH] * 3

def of_width(width):
    return small()

def nothing():
    return None

class Subclassed(keras.Model):
    def call(self, x):
        return x

def subclassed():
    return Subclassed()

def broken():
    import not_there
"""


@pytest.fixture
def nets(tmp_path: Path) -> str:
    """Return a file of functions that imports a module beside it."""
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "neighbour.py").write_text("WIDTH = 5\n")
    return str(tmp_path / "nets.py")


def task(target: str, microbatch: int | None = 4, **more: Any) -> ProfileTask:
    return ProfileTask(target, "/profile.json", "/cluster.json", microbatch, **more)


def test_a_measured_cluster_has_all_ranks_and_can_be_planned() -> None:
    x = keras.Input((64,))
    h = x
    for _ in range(4):
        h = keras.layers.Dense(64)(h)
    profile = hk.measure(keras.Model(x, h), np.ones((16, 64), np.float32), repeats=3)
    cluster = hk.measure_cluster(profile)
    assert all(found == cluster for found in hvpipe.allgather_object(cluster))
    names = [
        f"{host}:{i}" for host, i in hvpipe.allgather_object((current().world.host, hvpipe.local_rank()))
    ]
    assert sorted(device.name for device in cluster.devices) == sorted(names)
    assert cluster.device(names[0]).speed == 1.0
    assert len(cluster.measured) == hvpipe.size() * (hvpipe.size() - 1) // 2
    for device in cluster.devices:
        assert device.speed > 0
        assert device.memory_bytes is not None
        assert device.memory_bytes > 1e6
    theirs = hvpipe.broadcast_object(profile)
    plan = partition(theirs, cluster, stages=min(2, hvpipe.size()))
    plan.check(theirs, cluster)


def test_ranks_of_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Ranks 0 and 2 share GPU 1, whose memory differs from the others'; rank 1 has a slice of GPU 0.

    Each may take nine tenths of its share, less 0.5 GB. Regression: it was the whole share.
    """
    gpus = [
        GpuInfo("GPU-a", "made up", 8 * 10**9, (MigDevice("MIG-a", 1, 0, 3 * 10**9),)),
        GpuInfo("GPU-b", "made up", 6 * 10**9),
        GpuInfo("GPU-c", "made up", 99),
    ]
    monkeypatch.setattr("hvpipe.keras.profiling.cluster.list_gpus", lambda: gpus)
    monkeypatch.setattr("tensorflow.config.list_logical_devices", lambda kind: ["made up"])
    everyone = [("host", "GPU-b"), ("host", "MIG-a"), ("host", "GPU-b"), ("other", "GPU-b")]

    def memory_of_rank(local_rank: int) -> int | None:
        world = SimpleNamespace(host="host", local_rank=local_rank, rank=local_rank, local_size=3)
        engine = SimpleNamespace(allgather_object=lambda mine, what: everyone)
        session = SimpleNamespace(
            world=world, engine=engine, settings=SimpleNamespace(visible_gpus="GPU-b,MIG-a")
        )
        return cluster_module._memory_bytes(session)

    assert [memory_of_rank(rank) for rank in range(3)] == [2_200_000_000] * 3
    gpus.clear()
    assert memory_of_rank(1) is None
    assert "memory of rank 1's GPU is unknown" in caplog.text


def test_with_many_ranks_one_link_is_measured_between_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: 256 ranks measured 32,640 pairs one after the other, for hours."""
    asked = []

    def measured(engine: Any, pairs: Any = None, computing: Any = None) -> dict[Any, Any]:
        asked.append(pairs)
        return {pair: f"link {pair}" for pair in pairs or ()}

    monkeypatch.setattr(cluster_module, "measure_links", measured)
    hosts = ["a", "a", "b", *"a" * 14]
    links: Any = cluster_module._links(current(), hosts)
    assert asked == [[(0, 1), (0, 2)]]
    assert len(links) == 17 * 16 // 2
    assert {links[0, 2], links[2, 9]} == {"link (0, 2)"}
    cluster_module._links(current(), hosts[1:])
    assert asked[1] is None


def own_profile() -> Profile:
    """Return an mlp profile as if measured here. The slowest layer is the first on rank 0, else the last."""
    profile = estimate(layer_graph(mlp()), samples=4)
    layers = [dataclasses.replace(layer, forward_s=0.01, backward_s=0.02) for layer in profile.layers]
    place = 0 if hvpipe.rank() == 0 else -1
    layers[place] = dataclasses.replace(layers[place], forward_s=0.1, backward_s=0.2)
    return dataclasses.replace(profile, layers=tuple(layers))


@pytest.mark.parametrize("in_files", [False, True])
def test_ranks_with_different_measurements_make_the_same_plan(in_files: bool, tmp_path: Path) -> None:
    """Regression: each rank cut the model by its own profile. The files exist on rank 0 only."""
    profile: Any = own_profile()
    cluster: Any = hk.measure_cluster(profile)
    if in_files:
        files = tmp_path / "profile.json", tmp_path / "cluster.json"
        if hvpipe.rank() == 0:
            profile.write(files[0])
            cluster.write(files[1])
        profile, cluster = files
    pipe = compile_as_all(hk.pipeline_parallel(mlp, hvpipe.size(), profile=profile, cluster=cluster))
    assert sorted(hvpipe.allgather_object(pipe.stage_numbers)) == [(n,) for n in range(hvpipe.size())]
    if hvpipe.size() > 1:
        assert pipe.stages.cuts[0].calls == (0,)
    assert np.isfinite(pipe.train_on_batch(*batches(mlp, 8))).all()


def test_a_profile_has_the_times_of_each_kind_of_processor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 has one kind, all others another. If they are GPUs, a warning tells how links were measured."""
    monkeypatch.setattr(cluster_module, "processor", lambda: f"made up {min(hvpipe.rank(), 1)}")
    monkeypatch.setattr(cluster_module, "_sends_by_nccl", lambda session: True)
    profile, cluster = hk.measure_ranks(own_profile())
    assert ("links were measured in the memory of the hosts" in caplog.text) == (hvpipe.rank() == 0)
    assert all(found == (profile, cluster) for found in hvpipe.allgather_object((profile, cluster)))
    assert (cluster.action_s > 0) == (hvpipe.size() > 1)
    types = {device.name: device.type for device in cluster.devices}
    mine = types[f"{current().world.host}:{hvpipe.local_rank()}"]
    assert mine == ("" if hvpipe.rank() == 0 else "made up 1")
    for layer, own in zip(profile.on(mine).layers, own_profile().layers, strict=True):
        assert layer.forward_s == pytest.approx(own.forward_s)
    pipe = compile_as_all(hk.pipeline_parallel(mlp, hvpipe.size(), profile=profile, cluster=cluster))
    assert np.isfinite(pipe.train_on_batch(*batches(mlp, 8))).all()


def test_no_rank_waits_if_rank_0_cannot_read_the_profile(tmp_path: Path) -> None:
    with pytest.raises(HvpipeError, match=r"reading a profile .* rank 0: .*profile.json should be a JSON"):
        hk.pipeline_parallel(mlp, profile=tmp_path / "profile.json")


def test_unnamed_layers_have_the_same_names_in_every_build() -> None:
    """One script measures a function's model, builds it again, and trains by that profile."""

    def build() -> keras.Model:
        x = keras.Input((6,))
        h = x
        for _ in range(4):
            h = keras.layers.Dense(6)(h)
        return keras.Model(x, h)

    keras.layers.Dense(1)
    batch = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    profile = hk.measure(build, batch[:4], repeats=1)
    assert [layer.name for layer in profile.layers] == ["dense", "dense#2", "dense#3", "dense#4"]
    profile = hvpipe.broadcast_object(profile)
    pipe = hk.pipeline_parallel(build, microbatches=hvpipe.size(), profile=profile)
    pipe.compile("sgd", "mse")
    history = pipe.fit(batch, batch, epochs=2, batch_size=8, verbose=0).history
    assert history["loss"][1] < history["loss"][0]


def test_a_function_in_a_file(nets: str) -> None:
    model, batch = load_model_and_batch(task(f"{nets}:small"))
    assert model.name == "small"
    assert all(variable._value is None for variable in model.variables)
    assert hk.measure(lambda: model, batch, repeats=1).batch_size == 4


def test_the_model_of_the_example() -> None:
    example = Path(__file__).parents[4] / "examples" / "train_pipeline.py"
    model, (batch,) = load_model_and_batch(task(f"{example}:default_gpt"))
    assert (model.name, len(batch)) == ("gpt", 4)
    assert np.isfinite(model(batch)).all()
    assert len(layer_graph(model).calls) > 10


def test_a_function_that_brings_its_batch(nets: str) -> None:
    model, batch = load_model_and_batch(task(f"{nets}:with_batch", microbatch=None))
    assert hk.measure(lambda: model, np.asarray(batch), repeats=1).batch_size == 3


@pytest.mark.parametrize(
    ("function", "microbatch", "says"),
    [
        ("absent", 4, "should have a function 'absent'.*Received: small, with_batch, of_width"),
        ("WIDTH", 4, "should have a function 'WIDTH'"),
        ("of_width", 4, r"should take no arguments.*Received: of_width\(width\)"),
        ("nothing", 4, "should return a Keras model. Received: NoneType"),
        ("subclassed", None, "Turn a subclassed model into a function"),
        ("small", None, "Give --microbatch, the number of samples"),
    ],
)
def test_unsuitable_functions(nets: str, function: str, microbatch: int | None, says: str) -> None:
    with pytest.raises(HvpipeError, match=says):
        load_model_and_batch(task(f"{nets}:{function}", microbatch))


def test_a_wrong_shape_is_told_before_the_microbatch_that_is_missing(nets: str) -> None:
    with pytest.raises(HvpipeError, match=r"--input-shape should fit the input .*\[5\]. Received: \[7, 7\]"):
        load_model_and_batch(task(f"{nets}:small", None, input_shapes=(InputShape("", (7, 7)),)))


def test_an_error_inside_the_function_is_not_hidden(nets: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        load_model_and_batch(task(f"{nets}:broken"))


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("hvpipe_no_such_module:f", "hvpipe_no_such_module should be a module that can be imported"),
        ("json.no_such_part:f", "json.no_such_part should be a module"),
        ("/absent.py:f", "Received: '/absent.py', which is not one"),
    ],
)
def test_missing_modules_and_files(target: str, says: str) -> None:
    with pytest.raises(HvpipeError, match=says):
        load_model_and_batch(task(target))


def test_random_values_suit_every_input() -> None:
    """Integers stay below an Embedding's rows. If nothing limits them, they are 0 and 1."""
    image = keras.Input((None, None, 3), name="image")
    word, flag = keras.Input((7,), dtype="int32", name="word"), keras.Input((1,), dtype="int64", name="flag")
    h = keras.layers.GlobalAveragePooling2D()(image)
    h = h + keras.layers.Embedding(11, 3)(word)[:, 0] + keras.ops.cast(flag, "float32")
    model = keras.Model({"word": word, "image": image, "flag": flag}, h)
    (batch,) = random_batch(model, 50, [InputShape("image", (8, 9, 3))])
    assert {name: (x.shape, x.dtype.name) for name, x in batch.items()} == {
        "image": ((50, 8, 9, 3), "float32"),
        "word": ((50, 7), "int32"),
        "flag": ((50, 1), "int64"),
    }
    assert sorted(np.unique(batch["word"])) == list(range(11))
    assert sorted(np.unique(batch["flag"])) == [0, 1]
    assert 0 <= batch["image"].min() < batch["image"].max() < 1
    assert hk.measure(model, (batch,), repeats=1).batch_size == 50


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ([], r"leaves axes of a sample open, \[None, 3\].*--input-shape points=64,3$"),
        ([InputShape("", (5, 4))], r"should fit the input 'points', \[None, 3\]. Received: \[5, 4\]"),
        ([InputShape("", (5,))], r"Received: \[5\]"),
        ([InputShape("pixels", (5, 3))], "one of the inputs points. Received: pixels"),
    ],
)
def test_unsuitable_shapes(shapes: list[InputShape], says: str) -> None:
    x = keras.Input((None, 3), name="points")
    model = keras.Model(x, keras.layers.Dense(2)(x))
    with pytest.raises(HvpipeError, match=says):
        random_batch(model, 2, shapes)


def test_text_inputs_cannot_be_generated() -> None:
    x = keras.Input((1,), dtype="string", name="title")
    model = keras.Model(x, keras.layers.Identity()(x))
    with pytest.raises(HvpipeError, match="Received: input 'title' of dtype string"):
        random_batch(model, 2)
