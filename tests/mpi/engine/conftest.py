"""Run these cases on every rank in step. Without a launcher there is one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

import hvpipe
from devices import Libraries, OnDevice
from distributed import rank_in_environment
from hvpipe.engine.engine import EngineClient
from hvpipe.session import current
from in_step import InStep
from native_build import build


def pytest_configure(config: pytest.Config) -> None:
    if rank_in_environment() is not None:
        config.pluginmanager.register(InStep(), "in-step")


@pytest.fixture(scope="session", autouse=True)
def world() -> Iterator[None]:
    """Open one hvpipe session for all cases."""
    hvpipe.init()
    yield
    hvpipe.shutdown()


@pytest.fixture(scope="session")
def libraries(world: None) -> Libraries:
    """Build the test libraries on one rank for all ranks."""
    made = None
    if hvpipe.rank() == 0:
        paths = (
            *(build("fake_device.cc"), build("fake_nccl.cc")),
            *(build("fake_nccl.cc", "-DVERSION=22203"), build("fake_nccl.cc", "-DWITHOUT_MEMORY")),
        )
        made = Libraries(*map(str, paths))
    found: Libraries = hvpipe.broadcast_object(made)
    os.environ["FAKE_NCCL_DEVICE"] = found.device
    return found


@pytest.fixture(autouse=True)
def free_arrays() -> Iterator[None]:
    yield
    OnDevice.let_arrays_go()


@pytest.fixture
def engine() -> EngineClient:
    return current().engine


@pytest.fixture
def core(engine: EngineClient) -> Any:
    """Return the C++ engine. Skip the case if there is none."""
    if engine.native is None:
        pytest.skip("one rank without MPI has no C++ engine")
    return engine.native
