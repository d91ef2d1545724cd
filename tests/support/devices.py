"""Arrays in the memory of a fake device, and engines opened on that device (tests/support/native)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import hvpipe
from arrays import DTYPES, Array
from hvpipe.comm.engine import Engine
from hvpipe.session import current

WAYS = ("NCCL", "NCCL inside hosts", "host")
TYPESTR = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<V2"}


class OnDevice:
    """An array with the `__cuda_array_interface__` that CuPy's and PyTorch's device arrays have."""

    def __init__(self, values: Array) -> None:
        self.values = values
        self.__cuda_array_interface__ = {
            "shape": values.shape,
            "typestr": TYPESTR[values.dtype.name],
            "data": (values.ctypes.data, False),
            "strides": None if values.flags.c_contiguous else values.strides,
            "version": 3,
            "stream": 1,
        }


@dataclass(frozen=True)
class Libraries:
    """Paths of the libraries built from tests/support/native."""

    device: str
    nccl: str
    old_nccl: str
    nccl_without_memory: str


def open_engine(libraries: Libraries, way: str, **changes: Any) -> Engine:
    """Open an engine that sends data through `way`, with `changes` to its settings."""
    session = current()
    if session.engine.core is None:
        pytest.skip("one rank without MPI has no C++ engine")
    if way == "NCCL inside hosts":
        if session.engine.core.hosts == 1:
            pytest.skip("one host")
        changes.setdefault("nccl_span", "host")
    changes.setdefault("nccl_library", "none" if way == "host" else libraries.nccl)
    changes.setdefault("device_library", libraries.device)
    # The simulated hosts share the GPUs of this machine.
    changes.setdefault("gpus_may_be_shared", session.settings.ranks_per_host > 0)
    changes.setdefault("first_step_timeout_s", changes.get("timeout_s", session.settings.timeout_s))
    settings = replace(session.settings, job_may_have_gpus=True, **changes)
    return Engine(session.world, settings)


def values_of(rank: int, count: int, dtype: str) -> Array:
    # Integers, so that the order of addition does not change the sum.
    return np.random.default_rng([rank, count]).integers(-8, 8, count).astype(DTYPES[dtype])


def needs_others() -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank has nobody to wait for")
