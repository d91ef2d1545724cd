"""Arrays in device memory, of any framework: where they lie, what they hold, and which GPU a rank has."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvpipe.errors import HvpipeError

_CUDA, _CUDA_MANAGED = 2, 13  # device types of DLPack
_DEFAULT_STREAM = 1  # CUDA's name for the one that 0 means as well
_BY_TYPESTR = {"<f4": "float32", "<f8": "float64", "<f2": "float16", "<V2": "bfloat16"}
_BY_CODE = {(2, 32): "float32", (2, 64): "float64", (2, 16): "float16", (4, 16): "bfloat16"}


@dataclass(frozen=True)
class DeviceArray:
    """A C-contiguous array in device memory; `stream` is the CUDA stream that it is made and used on."""

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    stream: int
    read_only: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """Where it lies: address and bytes."""
        return self.address, self.nbytes


def is_device_array(array: Any) -> bool:
    """Whether it lies in a GPU's memory (CuPy, PyTorch, Numba, JAX, ...)."""
    if _interface(array) is not None:
        return True
    if not hasattr(array, "__dlpack_device__"):
        return False
    return int(array.__dlpack_device__()[0]) in (_CUDA, _CUDA_MANAGED)


def device_array(array: Any, native: Any) -> DeviceArray:
    """Look into an array by `__cuda_array_interface__` or DLPack; HvpipeError where it cannot be reduced.

    The stream is the one that the array names, for PyTorch's tensors, which name none, PyTorch's current one,
    else the default stream.
    """
    interface = _interface(array)
    if interface is None:
        try:
            address, nbytes, code, bits, shape = native.device_memory(array)
        except TypeError as error:
            raise HvpipeError(
                "A device array that shows its memory by DLPack is wanted. "
                f"Received: {type(array).__name__}, which does not"
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
            f"A C-contiguous device array is wanted. Received: shape={shape}, strides={tuple(strides)}"
        )
    address = int(interface["data"][0])
    stream = int(interface.get("stream") or 0) if "stream" in interface else _stream_of_torch(array)
    read_only = bool(interface["data"][1])
    return DeviceArray(address, math.prod(shape) * itemsize, shape, dtype, stream, read_only)


def check_writable(array: DeviceArray) -> DeviceArray:
    """The array, if it may be written; HvpipeError else."""
    if array.read_only:
        raise HvpipeError(
            "A device array that can be written is wanted. "
            f"Received: a read-only {array.dtype}{list(array.shape)}"
        )
    return array


def common_stream(arrays: Sequence[DeviceArray]) -> int:
    """The CUDA stream that all of them name (0 is 1, the default one); HvpipeError where they name several.

    Nothing would order what is enqueued on one stream with what another one does.
    """
    streams = {array.stream or _DEFAULT_STREAM for array in arrays}
    if len(streams) != 1:
        raise HvpipeError(f"Device arrays of one stream are wanted. Received: streams={sorted(streams)}")
    return streams.pop()


def assign_gpu(local_rank: int, local_size: int, visible: int) -> int:
    """Which of the GPUs that this process sees is this rank's: its own by number, or the only one there is.

    Raises HvpipeError where there are more ranks on the host than GPUs.
    """
    if visible >= local_size:
        return local_rank
    if visible == 1:
        return 0  # a launcher gave each rank its own, or they share one: NCCL's start tells
    raise HvpipeError(
        "Each rank should have a GPU of its own: start at most as many ranks on a host as it has GPUs. "
        f"Received: {local_size} ranks on this host, {visible} GPUs visible (CUDA_VISIBLE_DEVICES)"
    )


def find_nccl(named: str) -> str:
    """What to load NCCL from: what the user named, the NVIDIA wheel's, or the system's; "" for none."""
    if named:
        return "" if named == "none" else named
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        library = Path(folder) / "lib" / "libnccl.so.2"
        if library.exists():
            return str(library)
    return "libnccl.so.2"


def _interface(array: Any) -> Any:
    """Its `__cuda_array_interface__`, or None."""
    try:
        return getattr(array, "__cuda_array_interface__", None)
    except RuntimeError as error:  # PyTorch's, for a tensor that it differentiates by
        raise HvpipeError(
            "A device array that shows its memory is wanted; for a tensor of PyTorch that requires grad, its "
            f"detach(). Received: {error}"
        ) from error


def _stream_of_torch(array: Any) -> int:
    """The stream that PyTorch enqueues on now, and so made a tensor on; 0 for what is not PyTorch's.

    Its own streams do not wait for the default one: what was enqueued there would read a tensor too early.
    """
    torch = sys.modules.get("torch")  # imported, if the array is its
    if torch is None or not isinstance(array, torch.Tensor):
        return 0
    return int(torch.cuda.current_stream(array.device).cuda_stream)


def _dtype(name: str | None, received: str) -> str:
    if name is None:
        wanted = ", ".join(_BY_TYPESTR.values())
        raise HvpipeError(f"A device array of {wanted} is wanted. Received: dtype={received}")
    return name


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
