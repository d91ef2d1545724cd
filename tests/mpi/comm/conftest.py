"""Run these cases on every rank in step. Without a launcher there is one rank."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

import hvpipe
from devices import Libraries, OnDevice
from distributed import rank_in_environment
from hvpipe.comm.engine import Engine
from hvpipe.comm.native import import_native
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
    current().world.connect(every_group())
    if os.environ.get("TEST_OVER_CALLS") == "1":
        with engine_over_named_calls():
            yield
    else:
        yield
    hvpipe.shutdown()


def every_group() -> list[tuple[int, ...]]:
    """Return all groups of two or more ranks, except the one of all ranks."""
    everyone = range(hvpipe.size())
    return [ranks for count in range(2, hvpipe.size()) for ranks in itertools.combinations(everyone, count)]


@contextlib.contextmanager
def engine_over_named_calls() -> Iterator[None]:
    """Let named collectives carry the engine's data, as Horovod's do, instead of MPI's transports."""
    session = current()
    over_mpi, calls = session.engine.core, session.named_calls()
    for ranks in every_group():
        calls.add_set(list(ranks))
    options = {"timeout_s": session.settings.timeout_s, "trace": False}
    session.engine.core = import_native().Engine.create_over_calls(calls, first_on_host=0, hosts=1, **options)
    yield
    session.engine.core.stop()
    session.engine.core = over_mpi


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
def engine() -> Engine:
    return current().engine


@pytest.fixture
def core(engine: Engine) -> Any:
    """Return the C++ engine. Skip the case if there is none."""
    if engine.core is None:
        pytest.skip("one rank without MPI has no C++ engine")
    return engine.core
