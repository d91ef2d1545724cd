"""The GPU that TensorFlow is left with; its own list of GPUs stands in for a machine that has some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.gpu import claim_gpu


class Gpus:
    """What TensorFlow would see and remember."""

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


def session(local_rank: int, local_size: int) -> Any:
    return SimpleNamespace(world=SimpleNamespace(local_rank=local_rank, local_size=local_size))


def test_a_rank_is_left_with_its_own_gpu_whose_memory_grows(machine: Any) -> None:
    gpus = machine(Gpus(4))
    claim_gpu(session(2, 4))
    assert gpus.visible == ["GPU:2"]
    assert gpus.growing == ["GPU:2"]


def test_without_a_gpu_nothing_is_set(machine: Any) -> None:
    gpus = machine(Gpus(0))
    claim_gpu(session(1, 2))
    assert gpus.visible is None


def test_more_ranks_than_gpus_is_an_error(machine: Any) -> None:
    machine(Gpus(2))
    with pytest.raises(HvpipeError, match="3 ranks on this host, 2 GPUs"):
        claim_gpu(session(0, 3))


def test_gpus_that_are_in_use_already_are_an_error_among_several_ranks(machine: Any) -> None:
    machine(Gpus(2, in_use=True))
    claim_gpu(session(0, 1))
    with pytest.raises(HvpipeError, match=r"hvpipe.init\(\) should come before"):
        claim_gpu(session(0, 2))
