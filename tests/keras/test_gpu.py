"""GPU placement with TensorFlow. Fakes replace TensorFlow's list of GPUs, so no GPU is needed."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from hvpipe.environment.settings import Settings
from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.bucket_reduce import BucketReducer, ReduceOptions, _table_bytes
from hvpipe.keras.data_parallel.optimizer_hook import OptimizerHook
from hvpipe.keras.data_parallel.overlap import OverlapOptions
from hvpipe.keras.data_parallel.overlap_modes import OVERLAPS, NoOverlap
from hvpipe.keras.data_parallel.samples import SampleCounter, SamplesIn
from hvpipe.keras.data_parallel.train_steps import TrainSteps
from hvpipe.keras.gpu import claim_gpu, device_of_messages, on_the_host, reduces_on_gpu
from hvpipe.keras.instance_methods import InstanceMethods
from hvpipe.monitor.visible_gpus import GpuInfo


class Gpus:
    """The GPUs that TensorFlow would find, and the settings that it would receive."""

    def __init__(self, count: int, in_use: bool = False) -> None:
        self.names = [f"GPU:{i}" for i in range(count)]
        self.in_use = in_use
        self.visible: list[str] | None = None
        self.growing: list[str] = []

    def list_physical_devices(self, kind: str) -> list[str]:
        return self.names if kind == "GPU" else ["CPU:0"]

    def set_visible_devices(self, devices: list[str], kind: str) -> None:
        if self.in_use:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        self.visible = devices

    def set_memory_growth(self, device: str, enable: bool) -> None:
        if enable:
            self.growing.append(device)


@pytest.fixture
def machine(monkeypatch: Any) -> Any:
    def with_gpus(gpus: Gpus) -> Gpus:
        monkeypatch.setattr(tf.config, "list_physical_devices", gpus.list_physical_devices)
        monkeypatch.setattr(tf.config, "set_visible_devices", gpus.set_visible_devices)
        monkeypatch.setattr(tf.config.experimental, "set_memory_growth", gpus.set_memory_growth)
        return gpus

    return with_gpus


def session(local_rank: int, local_size: int, visible_gpus: str | None = None, device: str = "") -> Any:
    world = SimpleNamespace(rank=local_rank, local_rank=local_rank, local_size=local_size)
    settings = SimpleNamespace(visible_gpus=visible_gpus, device_library=device)
    return SimpleNamespace(world=world, settings=settings)


def test_a_rank_sees_only_its_own_gpu_with_memory_growth(machine: Any) -> None:
    gpus = machine(Gpus(4))
    claim_gpu(session(2, 4))
    assert gpus.visible == ["GPU:2"]
    assert gpus.growing == ["GPU:2"]


def test_a_memory_limit_set_by_the_user_stays(machine: Any, monkeypatch: Any) -> None:
    gpus = machine(Gpus(4))

    def refuse(device: str, enable: bool) -> None:
        raise ValueError("Cannot set memory growth on device when virtual devices configured")

    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", refuse)
    claim_gpu(session(2, 4))
    assert gpus.visible == ["GPU:2"]


def test_without_a_gpu_nothing_is_set(machine: Any) -> None:
    gpus = machine(Gpus(0))
    claim_gpu(session(1, 2))
    assert gpus.visible is None


def test_without_a_driver_its_absence_is_no_error(machine: Any, monkeypatch: Any, capfd: Any) -> None:
    """TensorFlow writes to file descriptor 2. What else it says stays, as does all with a driver."""

    class Complains(Gpus):
        def list_physical_devices(self, kind: str) -> list[str]:
            os.write(2, b"E0000 failed call to cuInit: UNKNOWN ERROR (303)\nW0000 something else\n")
            return super().list_physical_devices(kind)

    machine(Complains(0))
    monkeypatch.setattr("hvpipe.engine.rank_gpu._MADE_BY_DRIVERS", ())
    claim_gpu(session(0, 1))
    assert capfd.readouterr().err == "W0000 something else\n"
    claim_gpu(session(0, 1, device="libdriver.so"))
    assert "cuInit" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("rank", "visible", "listed", "said"),
    [(0, None, 2, 1), (0, "1", 2, 1), (0, "", 2, 0), (0, None, 0, 0), (1, None, 2, 0)],
)
def test_gpus_that_tensorflow_does_not_see_are_reported_once(
    machine: Any, monkeypatch: Any, caplog: Any, rank: int, visible: str | None, listed: int, said: int
) -> None:
    """Only rank 0 warns, and not if CUDA_VISIBLE_DEVICES hides the GPUs."""
    machine(Gpus(0))
    gpus = [GpuInfo(f"GPU-{i}", "Test GPU") for i in range(listed)]
    monkeypatch.setattr("hvpipe.keras.gpu.list_gpus", lambda: gpus)
    claim_gpu(session(rank, 2, visible))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == said
    assert all("TensorFlow sees none and trains on the CPU" in line for line in lines)


def test_more_ranks_than_gpus_is_an_error(machine: Any) -> None:
    machine(Gpus(2))
    with pytest.raises(HvpipeError, match="3 ranks on this host, 2 GPUs"):
        claim_gpu(session(0, 3))


def test_gpus_that_are_in_use_already_are_an_error_among_several_ranks(machine: Any) -> None:
    machine(Gpus(2, in_use=True))
    claim_gpu(session(0, 1))
    with pytest.raises(HvpipeError, match=r"hvpipe.init\(\) should come before"):
        claim_gpu(session(0, 2))


class EngineClient:
    """An engine whose ranks can or cannot open their GPUs. It records which one this rank has."""

    nccl_connects_all = False

    def __init__(self, opens: bool) -> None:
        self.native = object()
        self.opens = opens
        self.ordinal: int | None = None
        self.on_device: bool | None = None

    def use_gpus_of_all(self, ordinal: int | None) -> bool:
        self.ordinal = ordinal
        return self.opens and ordinal is not None

    def add_plan(self, name: str, plan: Any, on_device: bool) -> int:
        self.on_device = on_device
        self.removed: list[int] = []
        return 7

    def remove_plan(self, plan: int) -> None:
        self.removed.append(plan)


def sees(monkeypatch: Any, gpus: list[str]) -> None:
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus if kind == "GPU" else ["CPU:0"])
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: [f"GPU:{i}" for i in range(4)])


@pytest.mark.parametrize(
    ("gpus", "opens", "ordinal"), [([], False, None), (["GPU:0"], True, 0), (["GPU:2"], False, 2)]
)
def test_gradients_and_messages_stay_on_gpus_if_all_ranks_can(
    monkeypatch: Any, gpus: list[str], opens: bool, ordinal: int | None
) -> None:
    sees(monkeypatch, gpus)
    engine = EngineClient(opens)
    engine.ordinal = -1
    session = SimpleNamespace(engine=engine, settings=Settings())
    assert reduces_on_gpu(session) is opens
    assert engine.ordinal == ordinal
    assert device_of_messages(session) == ("GPU:0" if opens else None)
    engine.ordinal = -1
    assert not reduces_on_gpu(SimpleNamespace(engine=engine, settings=Settings(elastic=True)))
    assert engine.ordinal == -1  # not even asked


def test_the_gpu_is_the_one_that_tensorflow_uses(monkeypatch: Any) -> None:
    """This includes a GPU that the user chose before hvpipe.init()."""
    sees(monkeypatch, ["GPU:2"])
    engine = EngineClient(opens=True)
    reduces_on_gpu(SimpleNamespace(engine=engine, settings=Settings()))
    assert engine.ordinal == 2


@pytest.mark.parametrize(("opens", "place"), [(True, "GPU"), (False, "CPU")])
def test_ops_are_placed_on_the_device_of_their_plans_memory(
    monkeypatch: Any, opens: bool, place: str
) -> None:
    """TensorFlow sees a GPU, and every rank opens its own, or one cannot. The graph never runs."""
    sees(monkeypatch, ["GPU:0"])
    engine = EngineClient(opens)
    session = SimpleNamespace(engine=engine, settings=Settings(bucket_bytes=1000), announcements=0)
    reducer = BucketReducer(session, "gradients", [tf.Variable([1.0, 2.0], name="weight")])

    def step() -> Any:
        gradients = [tf.constant([3.0, 4.0])]
        return reducer.collect_all(reducer.submit(reducer.announce(tf.constant(1.0)), gradients))

    graph = tf.function(step).get_concrete_function().graph
    placed = {op.type: op.device for op in graph.get_operations() if op.type.startswith("Hvpipe")}
    assert engine.on_device is opens
    assert placed["HvpipeSubmit"].endswith(f"{place}:0")
    assert placed["HvpipeCollect"].endswith(f"{place}:0")


@pytest.mark.older_tensorflow
@pytest.mark.parametrize("overlap", ["backward", "step", "stale"])
def test_hvpipes_own_numbers_stay_on_the_host(monkeypatch: Any, overlap: str) -> None:
    """Reading a number from a GPU waits for all work enqueued there. The graph never runs."""
    sees(monkeypatch, ["GPU:0"])
    made: dict[str, str] = {}
    make = tf.Variable

    def note(*args: Any, **kwargs: Any) -> Any:
        made[kwargs["name"]] = context.context().device_name or ""
        return make(*args, **kwargs)

    weights = [keras.Variable([1.0, 2.0]), keras.Variable([[3.0] * 4] * 4)]
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(weights)
    settings = Settings(bucket_bytes=16)
    noted = {"announcements": 0, "averagings": 0, "averaged": {}, "looked_at": set()}
    session = SimpleNamespace(engine=EngineClient(opens=True), settings=settings, **noted)
    monkeypatch.setattr(tf, "Variable", note)
    overlapped = OptimizerHook(
        session, optimizer, weights, OVERLAPS[overlap](OverlapOptions()), ReduceOptions()
    )
    with on_the_host():
        counter = SampleCounter(SamplesIn(None, lambda batch: tf.shape(batch)[0]))
    monkeypatch.setattr(tf, "Variable", make)

    def step() -> None:
        counter.is_new()
        batch = tf.ones([8, 2])
        overlapped.begin(counter.add(batch), batch)
        overlapped.apply([tf.ones([2]), tf.ones([4, 4])], weights)

    graph = tf.function(step, autograph=False).get_concrete_function().graph
    own = {"hvpipe_step", "hvpipe_samples"} | ({"hvpipe_token"} if overlap in ("step", "stale") else set())
    own |= {"hvpipe_updates"} if overlap == "step" else set()
    assert made.keys() == own
    for name in own:
        assert made[name].endswith("CPU:0"), name
    placed = {(op.type, op.device.rpartition("device:")[2]) for op in graph.get_operations()}
    asked = {"HvpipeBeginStep", "Greater", "Equal", "AddN"}
    on_host = {kind for kind, device in placed if kind in asked and device == "CPU:0"}
    assert on_host == asked - ({"AddN", "Greater"} if overlap == "backward" else set())
    assert not {kind for kind, device in placed if kind in asked and device != "CPU:0"}


@pytest.mark.parametrize(("size", "place"), [(1, ""), (2, "CPU:0")])
def test_a_single_rank_keeps_its_counters_on_the_models_device(
    monkeypatch: Any, size: int, place: str
) -> None:
    """Keras may compile a single rank's steps with XLA on a GPU.

    XLA cannot reach variables on other devices.
    """
    made: list[str] = []
    make = tf.Variable

    def note(*args: Any, **kwargs: Any) -> Any:
        if kwargs["name"] == "hvpipe_samples":
            made.append((context.context().device_name or "").rpartition("device:")[2])
        return make(*args, **kwargs)

    monkeypatch.setattr(tf, "Variable", note)
    session: Any = SimpleNamespace(world=SimpleNamespace(size=size), sample_counters=[], settings=Settings())
    TrainSteps(session, None, InstanceMethods(None), NoOverlap, 0, ReduceOptions(), SamplesIn(None))
    assert made == [place, place]


def test_a_plan_is_removed_when_it_is_ended_or_forgotten(monkeypatch: Any) -> None:
    sees(monkeypatch, [])
    engine = EngineClient(opens=True)
    session = SimpleNamespace(engine=engine, settings=Settings(bucket_bytes=1000), announcements=0)
    reducer = BucketReducer(session, "gradients", [tf.Variable([1.0])])
    reducer.end()
    reducer.end()
    assert engine.removed == [7]
    del reducer
    reducer = BucketReducer(session, "gradients", [tf.Variable([1.0])])
    assert engine.removed == []
    del reducer
    gc.collect()
    assert engine.removed == [7]


@pytest.mark.parametrize(
    ("given", "on_device", "nccl", "ranks_here", "wanted"),
    [
        (7, True, True, 2, 7),
        (None, False, False, 2, 1 << 20),
        (None, True, False, 2, 1 << 20),  # its buckets go through the host anyway
        (None, True, True, 2, 64 << 20),
        (None, True, True, 4, None),  # on one host
    ],
)
def test_from_which_size_on_a_table_sends_its_rows(
    given: int | None, on_device: bool, nccl: bool, ranks_here: int, wanted: int | None
) -> None:
    made: Any = SimpleNamespace(
        settings=SimpleNamespace(table_bytes=given),
        engine=SimpleNamespace(nccl_connects_all=nccl),
        world=SimpleNamespace(size=4, local_size=ranks_here),
    )
    assert _table_bytes(made, on_device) == wanted
