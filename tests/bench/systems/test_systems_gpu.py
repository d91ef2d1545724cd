"""Systems on hosts with GPUs, tested without any: each rank gets its own GPU, and timed steps have ended."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.cluster.spec import ClusterSpec, HostSpec
from bench.hosts.hosts import ThisHost
from bench.hosts.process_placement import Placement
from bench.rounds.job import RankJob
from bench.rounds.record import Task
from bench.systems import horovod_tape, loop, mirrored, parameter_server
from bench.training.prepare import claim_gpu
from hvpipe.errors import HvpipeError


class FakeTensorFlow:
    """Has two GPUs, and a server that ends at once and records CUDA_VISIBLE_DEVICES."""

    def __init__(self) -> None:
        self.visible: list[str] = []
        self.growing: list[str] = []
        self.server_config = SimpleNamespace(gpu_options=SimpleNamespace())
        self.shown: str | None = None
        growth = SimpleNamespace(set_memory_growth=lambda gpu, _: self.growing.append(gpu))
        self.config = SimpleNamespace(
            list_physical_devices=lambda kind: ["GPU 0", "GPU 1"],
            set_visible_devices=lambda gpus, kind: self.visible.extend(gpus),
            get_visible_devices=lambda kind: self.visible,
            experimental=growth,
        )
        self.compat = SimpleNamespace(v1=SimpleNamespace(ConfigProto=lambda **_: self.server_config))
        resolver = SimpleNamespace(cluster_spec=dict)
        self.distribute = SimpleNamespace(
            cluster_resolver=SimpleNamespace(TFConfigClusterResolver=lambda: resolver), Server=self._serve
        )

    def _serve(self, *_: Any, **__: Any) -> Any:
        self.shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        return SimpleNamespace(join=lambda: None)


@pytest.fixture
def tensorflow(monkeypatch: pytest.MonkeyPatch) -> FakeTensorFlow:
    made = FakeTensorFlow()
    monkeypatch.setitem(sys.modules, "tensorflow", made)
    monkeypatch.setattr(os, "environ", dict(os.environ, CUDA_VISIBLE_DEVICES="4,6"))
    return made


def test_local_ranks_are_counted_on_each_host() -> None:
    spec = ClusterSpec((HostSpec("a", slots=2), HostSpec("b"), HostSpec("c", slots=2)))
    placement = Placement(SimpleNamespace(spec=spec), 4)  # type: ignore[arg-type]
    assert placement.local_ranks_and_sizes == [(0, 2), (1, 2), (0, 1), (0, 1)]
    assert Placement(ThisHost(), 2).local_ranks_and_sizes == [(0, 2), (1, 2)]


def test_a_rank_uses_only_the_gpu_of_its_local_rank_and_lets_its_memory_grow(
    tensorflow: FakeTensorFlow,
) -> None:
    claim_gpu(1, 2)
    assert (tensorflow.visible, tensorflow.growing) == (["GPU 1"], ["GPU 1"])


def test_more_ranks_than_gpus_are_an_error(tensorflow: FakeTensorFlow) -> None:
    with pytest.raises(HvpipeError, match="Received: 3 ranks on this host, 2 GPUs"):
        claim_gpu(0, 3)


def test_without_gpus_nothing_is_claimed(tensorflow: FakeTensorFlow) -> None:
    tensorflow.config.list_physical_devices = lambda kind: []
    claim_gpu(0, 3)
    assert tensorflow.visible == []


@pytest.mark.parametrize(("job", "shown", "gpu"), [("ps", "", {}), ("worker", "4,6", "1")])
def test_a_worker_gets_one_gpu_and_a_parameter_server_none(
    job: str, shown: str, gpu: object, tensorflow: FakeTensorFlow, tmp_path: Path
) -> None:
    what = {"environment": {}, "task": {"threads": 1}, "size": 2, "local_ranks_and_sizes": [(0, 2), (1, 2)]}
    (tmp_path / "job.json").write_text(json.dumps(what))
    parameter_server.serve(tmp_path, job, 1)
    options = vars(tensorflow.server_config.gpu_options)
    assert tensorflow.shown == shown
    assert options == ({"visible_device_list": gpu, "allow_growth": True} if gpu else {})


def test_mirrored_workers_use_nccl_on_gpus_and_a_ring_otherwise(tensorflow: FakeTensorFlow) -> None:
    assert mirrored._reduced_by(tensorflow) == "RING"
    claim_gpu(0, 2)
    assert mirrored._reduced_by(tensorflow) == "NCCL"


@pytest.mark.parametrize(
    ("gpus", "nccl", "says"),
    [
        (True, 0, r"built with NCCL .*Received: Horovod 0\.28\.1 without NCCL in "),
        (True, 21805, "the model is built"),
        (False, 0, "the model is built"),
    ],
)
def test_horovod_needs_nccl_on_gpus(
    gpus: bool,
    nccl: int,
    says: str,
    tensorflow: FakeTensorFlow,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make_model(*_: object) -> None:
        raise RuntimeError("the model is built")

    hvd = SimpleNamespace(init=lambda: None, rank=lambda: 0, size=lambda: 1, nccl_built=lambda: nccl)
    monkeypatch.setitem(sys.modules, "horovod", SimpleNamespace(tensorflow=hvd, __version__="0.28.1"))
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", hvd)
    monkeypatch.setattr(horovod_tape, "prepare_tensorflow", lambda threads: None)
    monkeypatch.setattr(horovod_tape, "make_model", make_model)
    if not gpus:
        tensorflow.config.list_physical_devices = lambda kind: []
    with pytest.raises(RuntimeError, match=says):
        horovod_tape.train(RankJob(Task("digits", 4), 0, 1, {}, tmp_path))


def test_a_loop_waits_for_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = RankJob(Task("resnet50", 4, warm_up=1, steps=2), 0, 1, {}, tmp_path)
    order: list[str] = []
    monkeypatch.setattr(job.watch, "step", lambda: order.append("timed"))
    step = SimpleNamespace(numpy=lambda: order.append("ended"))
    loop.run(None, None, job, iter("abc"), lambda batch: step)
    assert order == ["ended", "timed"] * 3
