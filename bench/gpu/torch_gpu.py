"""PyTorch's arrays, matrix products and clock on this rank's GPU. The only file that imports PyTorch."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
from typing import Any

import torch

from bench.gpu.rows import Numbers

AHEAD_CYCLES = 20_000_000  # some 10 ms
MATRIX = 4096  # a product of two takes some 0.2 ms on an H100 or H200


def count_gpus() -> int:
    """Return how many GPUs this process may use."""
    return torch.cuda.device_count()


class DlpackOnly:
    """A tensor that offers only DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


class TorchGpu:
    """Arrays on the GPU of this local rank, or on the only one, work for it, and its clock.

    All work goes to the default stream.
    """

    def __init__(self, local_rank: int) -> None:
        torch.cuda.set_device(local_rank % count_gpus())
        self.name = f"{_driver()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}"
        self._matrix = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
        self._product = torch.empty_like(self._matrix)

    def put(self, values: Numbers, dtype: str) -> torch.Tensor:
        """Return a new device array of these numbers."""
        return torch.from_numpy(values).cuda().to(getattr(torch, dtype))

    def get(self, array: torch.Tensor) -> Numbers:
        """Return the numbers of a device array, once all enqueued work is done."""
        found: Numbers = array.double().cpu().numpy()
        return found

    def faces(self, array: torch.Tensor) -> dict[str, Any]:
        """Return the same memory as other libraries and protocols present it."""
        faces: dict[str, Any] = {"DLPack": DlpackOnly(array)}
        with contextlib.suppress(ImportError):
            faces["CuPy"] = importlib.import_module("cupy").asarray(array)
        return faces

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def multiply(self) -> None:
        """Enqueue a matrix product, much shorter than an all-reduce of 64 MB."""
        torch.mm(self._matrix, self._matrix, out=self._product)

    def hold(self) -> None:
        """Keep the device waiting while the host enqueues what is measured."""
        torch.cuda._sleep(AHEAD_CYCLES)

    def side_stream(self) -> contextlib.AbstractContextManager[object]:
        """Use another stream inside the block. It and the default stream do not wait for each other."""
        return torch.cuda.stream(torch.cuda.Stream())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        """Return a point in the enqueued work."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the seconds between two marks; waits for both."""
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def _driver() -> str:
    """Return the GPU's name and the driver's version."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return torch.cuda.get_device_name()
    return done.stdout.splitlines()[0].replace(", ", ", driver ")
