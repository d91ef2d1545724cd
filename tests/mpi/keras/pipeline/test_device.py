"""Pipelines whose tensors stay on a fake device, whose memory is host memory (tests/support/native)."""

from __future__ import annotations

import ctypes
from typing import Any

import keras
import numpy as np
import pytest

import hvpipe
import hvpipe.keras as hk
from devices import open_in_session
from hvpipe.engine.engine import EngineClient
from hvpipe.keras import ops
from hvpipe.keras.pipeline import model as pipeline_model
from hvpipe.session import current
from pipelines import MODELS, WITHIN, batches, check_same, compile_as_all, pipelined, plain, spread


@pytest.fixture(scope="module")
def device() -> Any:
    """Open the fake device and the fake NCCL in the session's engine. Return the device's library."""
    if hvpipe.size() == 1:
        pytest.skip("one rank has nobody to write to")
    return ctypes.CDLL(open_in_session())


def nccl() -> Any:
    """Return the fake NCCL."""
    return ctypes.CDLL(current().engine._settings.nccl_library)


@pytest.fixture
def sent(device: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Keep the tensors of new pipelines on the device. Return the list of tensors sent between devices."""
    tensors: list[Any] = []

    def send_message(number: int, tensor: Any) -> None:
        tensors.append(tensor)
        wire(number, tensor)

    wire = ops.send_message
    monkeypatch.setattr(ops, "send_message", send_message)
    monkeypatch.setattr(pipeline_model, "device_of_messages", lambda _: "CPU:0")
    return tensors


@pytest.mark.parametrize(
    ("name", "schedule"), [("unet", "1f1b"), ("transformer", "interleaved"), ("resnet", "zb-h1")]
)
def test_tensors_on_devices_and_through_the_host_train_alike(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch, sent: list[Any]
) -> None:
    options = {"chunks": 2} if schedule == "interleaved" else {}
    there = pipelined(name, schedule=schedule, **options)
    # TensorFlow keeps integers, such as the transformer's tokens, in host memory.
    assert {tensor.dtype.name for tensor in sent} <= {"float32", "float64"}
    monkeypatch.setattr(pipeline_model, "device_of_messages", lambda _: None)
    before = len(sent)
    here = spread(name, schedule)
    assert len(sent) == before
    assert there.history == here.history
    assert there.evaluation == here.evaluation
    np.testing.assert_array_equal(there.prediction, here.prediction)
    for number, value in here.weights.items():
        np.testing.assert_array_equal(there.weights[number], value, err_msg=str(number))


def test_half_types_and_open_shapes(sent: list[Any]) -> None:
    """Stages exchange bfloat16, and sequences whose length the model leaves open."""
    keras.utils.set_random_seed(5)
    inputs = keras.Input((None, 4))
    x = inputs
    for _ in range(3 * hvpipe.size()):
        x = keras.layers.Dense(4, dtype="mixed_bfloat16")(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(x)))
    pipe = hk.pipeline_parallel(model, microbatches=4)
    pipe.compile("sgd", "mse")
    for length in (3, 5):
        x = np.random.default_rng(length).normal(size=(8, length, 4)).astype(np.float32)
        assert np.isfinite(pipe.train_on_batch(x, x[:, 0, :1]))
    assert "bfloat16" in {tensor.dtype.name for tensor in sent}
    assert {3, 5} <= {length for tensor in sent for length in tensor.shape[1:2]}


def test_messages_reuse_memory(device: Any, sent: list[Any]) -> None:
    """Messages need more memory only if more are in flight at once. NCCL connects the ranks before."""
    keras.utils.set_random_seed(5)
    x, y = batches(MODELS["mlp"], 8)
    microbatches, steps = 4, 12
    pipe = compile_as_all(hk.pipeline_parallel(MODELS["mlp"], microbatches=microbatches))
    held, communicators = [], nccl().nccl_communicators()
    for _ in range(steps):
        before = len(sent)
        pipe.train_on_batch(x, y)
        assert len(sent) - before >= microbatches
        current().engine.agree("end of a step")
        held.append(device.things_held())
    assert held[-1] - held[0] < steps, held
    assert nccl().nccl_communicators() == communicators


@pytest.mark.every_size
def test_replicas_sum_their_gradients_on_devices(monkeypatch: pytest.MonkeyPatch, sent: list[Any]) -> None:
    replicas = (hvpipe.size() - 1, 1) if hvpipe.size() > 2 else (2,)
    monkeypatch.delattr(EngineClient, "group_allreduce")  # through host memory
    check_same(pipelined("resnet", replicas=replicas), plain("resnet"), WITHIN)
    assert sent
