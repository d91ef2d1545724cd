"""If TensorFlow sees a GPU that hvpipe cannot open, fit goes on through host memory, and one rank says so.

These cases come before those that open the fake device in the session.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import hvpipe
from hvpipe.engine.engine import EngineClient
from hvpipe.errors import HvpipeError
from hvpipe.session import current
from native_build import build, real_nccl
from training import (
    assert_same_bits,
    assert_same_on_all_ranks,
    compiled,
    fit,
    my_batches,
    parallel,
    state_of,
)


@pytest.mark.parametrize("sees", ["all ranks", "rank 0"])
def test_fit_goes_on_where_a_gpu_does_not_open(monkeypatch: Any, caplog: Any, sees: str) -> None:
    engine = current().engine
    if hvpipe.size() == 1:
        pytest.skip("one rank reduces nothing")
    reference = parallel(compiled())
    fit(reference, my_batches(3))

    settings = dataclasses.replace(engine._settings, job_may_have_gpus=True, device_library="libnowhere.so")
    monkeypatch.setattr(engine, "_settings", settings)
    monkeypatch.setattr(engine, "_all_on_gpus", None)
    mine = ["GPU:0"] if sees == "all ranks" or hvpipe.rank() == 0 else []
    config = SimpleNamespace(get_visible_devices=lambda _: mine, list_physical_devices=lambda _: mine)
    monkeypatch.setattr("hvpipe.keras.gpu.tf", SimpleNamespace(config=config, device=tf.device))
    model = parallel(compiled())
    fit(model, my_batches(3))
    assert_same_on_all_ranks(state_of(model))
    assert_same_bits(state_of(model), state_of(reference))
    said = [r.getMessage() for r in caplog.records if "through ordinary host memory" in r.getMessage()]
    assert len(said) == (hvpipe.rank() == 0)
    wanted = "rank 0 on" if sees == "all ranks" else "have no GPU that TensorFlow sees"
    assert all(wanted in text for text in said)


def test_a_real_nccl_without_a_gpu_says_so_on_all_ranks() -> None:
    """NVIDIA's library loads beside TensorFlow. It finds no driver, whatever the tests' device pretends."""
    library, session = hvpipe.broadcast_object(real_nccl()), current()
    if library is None or hvpipe.size() == 1 or Path("/dev/nvidiactl").exists():
        pytest.skip("needs NCCL (make cuda fetches it), other ranks, and no driver")
    device = hvpipe.broadcast_object(str(build("fake_device.cc")) if hvpipe.rank() == 0 else None)
    changes = {"job_may_have_gpus": True, "device_library": device, "gpus_may_be_shared": True}
    settings = dataclasses.replace(session.settings, nccl_library=str(library), **changes)
    engine = EngineClient(session.world, settings)
    with pytest.raises(HvpipeError, match=r"NCCL call failed: ncclCommInit\w+: .*CUDA driver version"):
        engine.use_gpus_of_all(hvpipe.local_rank())
    engine.agree("the end of the case")
    engine.stop()
