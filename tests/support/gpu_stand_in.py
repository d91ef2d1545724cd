"""A rank of bench.gpu.check without a GPU: NumPy arrays that claim to lie on the fake device."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import ml_dtypes
import numpy as np

from bench.gpu import check_worker
from bench.gpu.rows import Numbers
from devices import TYPESTR, finish_stream
from hvpipe.engine.engine import EngineClient


class OnDevice(np.ndarray[Any, Any]):
    """An array that claims to lie on a device, as CuPy's and PyTorch's arrays do, on the default stream."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": TYPESTR[self.dtype.name],
            "data": (self.ctypes.data, False),
            "strides": None if self.flags.c_contiguous else self.strides,
            "version": 3,
        }


class StandIn:
    """bench.gpu.torch_gpu.TorchGpu in NumPy. If STAND_IN_BREAKS is set, `faces` fails."""

    name = "stand-in"

    def __init__(self, local_rank: int) -> None:
        self._matrix = np.ones((64, 64))
        self._arrays: list[Any] = []  # the fake device may still use them

    def put(self, values: Numbers, dtype: str) -> Any:
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        self._arrays.append(values.astype(kind).view(OnDevice))
        return self._arrays[-1]

    def get(self, array: Any) -> Numbers:
        self.synchronize()
        return np.array(array, np.float64, subok=False)

    def faces(self, array: Any) -> dict[str, Any]:
        if "STAND_IN_BREAKS" in os.environ:
            raise RuntimeError("broken for a test")
        return {"a view": array.view()}

    def copy(self, target: Any, source: Any) -> None:
        self.synchronize()
        target[...] = source

    def multiply(self) -> None:
        self._matrix @ self._matrix

    def hold(self) -> None: ...

    def side_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        assert finish_stream(1, 20)

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, begin: float, end: float) -> float:
        return end - begin


def spoil_all_reduce() -> None:
    """Make the last number of every sum wrong."""
    whole = EngineClient.allreduce

    def spoilt(self: EngineClient, array: Any, op: Any = "average", *, out: Any) -> Any:
        whole(self, array, op, out=out)
        out[-1] += 1
        return out

    EngineClient.allreduce = spoilt  # type: ignore[method-assign]


def open_stand_in(local_rank: int) -> StandIn:
    if os.environ.get("STAND_IN_WRONG_RANK") == str(local_rank):
        spoil_all_reduce()
    return StandIn(local_rank)


if __name__ == "__main__":
    check_worker.main(open_stand_in)
