"""Runs these cases on every rank in step; without a launcher there is one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import hvpipe
from distributed import rank_in_environment
from hvpipe.engine import Engine
from hvpipe.session import current
from in_step import InStep


def pytest_configure(config: pytest.Config) -> None:
    if rank_in_environment() is not None:
        config.pluginmanager.register(InStep(), "in-step")


@pytest.fixture(scope="session", autouse=True)
def world() -> Iterator[None]:
    """One hvpipe session for all cases."""
    hvpipe.init()
    yield
    hvpipe.shutdown()


@pytest.fixture
def engine() -> Engine:
    return current().engine


@pytest.fixture
def core(engine: Engine) -> Any:
    """The C++ engine, where there is one."""
    if engine.core is None:
        pytest.skip("one rank without MPI has no C++ engine")
    return engine.core
