"""Arrays in the memory of a fake device, and engines opened on that device (tests/support/native)."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

import hvpipe
from arrays import DTYPES, Array
from hvpipe.engine.engine import EngineClient
from hvpipe.session import current
from native_build import build

WAYS = ("NCCL", "host")
TYPESTR = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<V2"}


class OnDevice:
    """An array with the `__cuda_array_interface__` that CuPy's and PyTorch's device arrays have.

    Args:
        values: Its numbers, which it changes in place.
        stream: The fake device's stream that writes and reads the array; 1: the default stream.
    """

    # The fake device may use arrays of a case until `let_arrays_go`.
    _used: ClassVar[list[OnDevice]] = []

    def __init__(self, values: Array, stream: int = 1) -> None:
        self._used.append(self)
        self._values = values
        self._stream = stream
        self.__cuda_array_interface__ = {
            "shape": values.shape,
            "typestr": TYPESTR[values.dtype.name],
            "data": (values.ctypes.data, False),
            "strides": None if values.flags.c_contiguous else values.strides,
            "version": 3,
            "stream": stream,
        }

    @property
    def values(self) -> Array:
        """The numbers, after the work that the array's stream holds now; of no other stream."""
        assert finish_stream(self._stream, 20), "work on the fake device that does not end"
        return self._values

    def __len__(self) -> int:
        return len(self._values)

    @classmethod
    def let_arrays_go(cls) -> None:
        """End a case: free its arrays, unless work of a failed engine may still use them."""
        if all(finish_stream(stream, 0) for stream in {array._stream for array in cls._used}):
            cls._used.clear()


def finish_stream(stream: int, limit_s: float) -> bool:
    """Run the work of a stream of the fake device. Return whether it ended in time."""
    path = os.environ.get("FAKE_NCCL_DEVICE")
    if path is None:
        return True
    finish = ctypes.CDLL(path).fake_device_finish
    finish.argtypes = [ctypes.c_void_p, ctypes.c_double]
    return bool(finish(stream, limit_s))


def wait_until(done: Callable[[], bool], limit_s: float = 20) -> None:
    """Look every 10 ms, until `done`, for at most `limit_s`. The caller then asserts what it waited for."""
    end_s = time.monotonic() + limit_s
    while not done() and time.monotonic() < end_s:
        time.sleep(0.01)


@dataclass(frozen=True)
class Libraries:
    """Paths of the libraries built from tests/support/native."""

    device: str
    nccl: str
    old_nccl: str
    nccl_without_memory: str


def open_engine(libraries: Libraries, way: str, **changes: Any) -> EngineClient:
    """Open an engine that sends data through `way`, with `changes` to its settings."""
    session = current()
    if session.engine.native is None:
        pytest.skip("one rank without MPI has no C++ engine")
    changes.setdefault("nccl_library", "none" if way == "host" else libraries.nccl)
    changes.setdefault("device_library", libraries.device)
    # The simulated hosts share the GPUs of this machine.
    changes.setdefault("gpus_may_be_shared", session.settings.ranks_per_host > 0)
    changes.setdefault("first_step_timeout_s", changes.get("timeout_s", session.settings.timeout_s))
    settings = replace(session.settings, job_may_have_gpus=True, **changes)
    return EngineClient(session.world, settings)


def open_impatient(libraries: Libraries, way: str, timeout_s: float) -> EngineClient:
    """Open an engine and its device, and only then make `timeout_s` its limit.

    While the device opens, ranks of a busy machine may be later than that.
    """
    patience_s = current().settings.timeout_s
    engine = open_engine(libraries, way, timeout_s=timeout_s, first_step_timeout_s=patience_s)
    engine.use_device()
    engine.agree("the start of a case")
    engine.native.end_first_steps()
    return engine


def open_in_session() -> str:
    """Open the fake device and NCCL in the session's engine. Return the path of the device's library."""
    engine = current().engine
    made = [str(build(f"fake_{name}.cc")) for name in ("device", "nccl")] if hvpipe.rank() == 0 else None
    library, nccl = hvpipe.broadcast_object(made)
    os.environ["FAKE_NCCL_DEVICE"] = library
    engine._settings = replace(
        engine._settings, device_library=library, nccl_library=nccl, gpus_may_be_shared=True
    )
    assert engine.use_device().startswith("by NCCL")
    return str(library)


def values_of(rank: int, count: int, dtype: str) -> Array:
    # Integers, so that the order of addition does not change the sum.
    return np.random.default_rng([rank, count]).integers(-8, 8, count).astype(DTYPES[dtype])


def needs_others() -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank has nobody to wait for")
