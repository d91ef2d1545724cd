"""Arrays in device memory, of any framework: their address, dtype, shape and stream."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvpipe.errors import HvpipeError

_CUDA, _CUDA_MANAGED = 2, 13  # device types of DLPack
_DEFAULT_STREAM = 1  # CUDA also calls it 0
_BY_TYPESTR = {"<f4": "float32", "<f8": "float64", "<f2": "float16", "<V2": "bfloat16"}
_BY_CODE = {(2, 32): "float32", (2, 64): "float64", (2, 16): "float16", (4, 16): "bfloat16"}


@dataclass(frozen=True)
class DeviceArray:
    """A C-contiguous array in device memory; `stream` is the CUDA stream that writes and reads it."""

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    stream: int
    read_only: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """Its address and its size in bytes."""
        return self.address, self.nbytes


def is_device_array(array: Any) -> bool:
    """Tell whether an array is in a GPU's memory (CuPy, PyTorch, Numba, JAX, ...)."""
    if _interface(array) is not None:
        return True
    if not hasattr(array, "__dlpack_device__"):
        return False
    return int(array.__dlpack_device__()[0]) in (_CUDA, _CUDA_MANAGED)


def device_array(array: Any, native: Any) -> DeviceArray:
    """Describe an array in device memory by its `__cuda_array_interface__` or DLPack.

    The stream is the one that the array names. PyTorch's tensors name none, so theirs is PyTorch's current
    stream. Otherwise it is the default stream.

    Args:
        array: The array, of any framework.
        native: The compiled module, which reads DLPack.

    Raises:
        HvpipeError: If the array cannot be reduced: its dtype, its layout, or no access to its memory.
    """
    interface = _interface(array)
    if interface is None:
        try:
            address, nbytes, code, bits, shape = native.device_memory(array)
        except TypeError as error:
            raise HvpipeError(
                f"A device array should support DLPack. Received: {type(array).__name__}, which does not"
            ) from error
        return DeviceArray(
            address, nbytes, tuple(shape), _dtype(_BY_CODE.get((code, bits)), f"{code}/{bits}"), 0
        )
    shape = tuple(interface["shape"])
    dtype = _dtype(_BY_TYPESTR.get(interface["typestr"]), interface["typestr"])
    itemsize = int(interface["typestr"][2:])
    strides = interface.get("strides")
    if strides is not None and tuple(strides) != _contiguous(shape, itemsize):
        raise HvpipeError(
            f"A device array should be C-contiguous. Received: shape={shape}, strides={tuple(strides)}"
        )
    address = int(interface["data"][0])
    stream = int(interface.get("stream") or 0) if "stream" in interface else _stream_of_torch(array)
    read_only = bool(interface["data"][1])
    return DeviceArray(address, math.prod(shape) * itemsize, shape, dtype, stream, read_only)


def check_writable(array: DeviceArray) -> DeviceArray:
    """Return the array; raise HvpipeError if it is read-only."""
    if array.read_only:
        raise HvpipeError(
            f"A writable device array is needed. Received: a read-only {array.dtype}{list(array.shape)}"
        )
    return array


def common_stream(arrays: Sequence[DeviceArray]) -> int:
    """Return the CUDA stream of all these arrays (1 for the default stream, also called 0).

    Raises:
        HvpipeError: If they name several streams, because nothing would order the work across them.
    """
    streams = {array.stream or _DEFAULT_STREAM for array in arrays}
    if len(streams) != 1:
        raise HvpipeError(f"Device arrays should be on one stream. Received: streams={sorted(streams)}")
    return streams.pop()


def _interface(array: Any) -> Any:
    """Return its `__cuda_array_interface__`, or None."""
    try:
        return getattr(array, "__cuda_array_interface__", None)
    except RuntimeError as error:  # from PyTorch, for a tensor that requires grad
        raise HvpipeError(
            "A device array should give access to its memory. If a PyTorch tensor requires grad, pass its "
            f"detach(). Received: {error}"
        ) from error


def _stream_of_torch(array: Any) -> int:
    """Return PyTorch's current stream, which writes its tensors; 0 for an array that is not PyTorch's.

    PyTorch's own streams do not wait for the default stream. Work enqueued there would read a tensor too
    early.
    """
    torch = sys.modules.get("torch")  # a PyTorch tensor implies that PyTorch was imported
    if torch is None or not isinstance(array, torch.Tensor):
        return 0
    return int(torch.cuda.current_stream(array.device).cuda_stream)


def _dtype(name: str | None, received: str) -> str:
    if name is None:
        wanted = ", ".join(_BY_TYPESTR.values())
        raise HvpipeError(f"A device array should be of {wanted}. Received: dtype={received}")
    return name


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
