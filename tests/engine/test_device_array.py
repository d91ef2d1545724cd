"""Reading device arrays through their protocols."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvpipe.engine.device_array import (
    check_writable,
    common_stream,
    device_array,
    is_device_array,
)
from hvpipe.errors import HvpipeError


class Described:
    """An object with `__cuda_array_interface__`."""

    def __init__(self, **changes: Any) -> None:
        plain = {"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "version": 3}
        self.__cuda_array_interface__ = plain | changes


class OnDlpackDevice:
    def __init__(self, kind: int) -> None:
        self.kind = kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


class Native:
    """Stands in for the compiled module, which reads DLPack."""

    def device_memory(self, array: Any) -> tuple[int, int, int, int, list[int]]:
        return 8192, 12, 4, 16, [2, 3]


def test_device_memory_is_distinguished_from_host_memory() -> None:
    assert is_device_array(Described())
    assert is_device_array(OnDlpackDevice(2))
    assert is_device_array(OnDlpackDevice(13))
    assert not is_device_array(OnDlpackDevice(1))
    assert not is_device_array(np.ones(3))
    assert not is_device_array([1, 2])


def test_the_interface_is_read() -> None:
    found = device_array(Described(typestr="<f8", stream=7), None)
    assert (found.address, found.nbytes, found.shape) == (4096, 48, (2, 3))
    assert (found.dtype, found.stream) == ("float64", 7)
    assert device_array(Described(strides=(12, 4), stream=None), None).stream == 0


def test_dlpack_is_read() -> None:
    found = device_array(OnDlpackDevice(2), Native())
    assert (found.span, found.shape, found.dtype) == ((8192, 12), (2, 3), "bfloat16")


def test_strides_and_types_that_are_not_supported() -> None:
    with pytest.raises(HvpipeError, match=r"C-contiguous.*strides=\(4, 8\)"):
        device_array(Described(strides=(4, 8)), None)
    with pytest.raises(
        HvpipeError, match=r"should be of float32, float64, float16, bfloat16. Received: dtype=<i4"
    ):
        device_array(Described(typestr="<i4"), None)


class Differentiated:
    """Acts like a PyTorch tensor that requires grad."""

    @property
    def __cuda_array_interface__(self) -> None:
        raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")


def test_a_tensor_that_requires_grad_is_refused_with_a_remedy() -> None:
    with pytest.raises(HvpipeError, match=r"detach\(\).*Received: Can't get"):
        is_device_array(Differentiated())


def test_an_array_without_dlpack_access_is_refused_by_name() -> None:
    class Refuses:
        def device_memory(self, array: Any) -> None:
            raise TypeError("device_memory(): incompatible function arguments")

    with pytest.raises(HvpipeError, match=r"should support DLPack. Received: OnDlpackDevice"):
        device_array(OnDlpackDevice(2), Refuses())


def test_a_read_only_array_is_not_written() -> None:
    found = device_array(Described(data=(4096, True)), None)
    with pytest.raises(HvpipeError, match=r"writable device array.*Received: a read-only float32\[2, 3\]"):
        check_writable(found)
    plain = device_array(Described(), None)
    assert check_writable(plain) is plain


class Tensor(Described):
    """Acts like a PyTorch tensor: version 2 of the interface, which has no stream."""

    device = "cuda:1"

    def __init__(self) -> None:
        super().__init__(version=2)


def test_a_pytorch_tensor_is_on_pytorchs_current_stream(monkeypatch: Any) -> None:
    streams = {"cuda:0": 5, "cuda:1": 9}
    cuda = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=streams[device]))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, cuda=cuda))
    assert device_array(Tensor(), None).stream == 9
    assert device_array(Described(version=2), None).stream == 0
    assert common_stream([device_array(Described(stream=9), None), device_array(Tensor(), None)]) == 9


def on_stream(stream: int) -> Any:
    return device_array(Described(stream=stream), None)


def test_arrays_of_one_stream_are_accepted() -> None:
    assert common_stream([on_stream(7), on_stream(7)]) == 7
    # Numba may give no stream, CuPy 1: both mean the default stream.
    assert common_stream([on_stream(0), on_stream(1)]) == 1


def test_arrays_of_several_streams_are_refused() -> None:
    with pytest.raises(HvpipeError, match=r"one stream.*Received: streams=\[1, 7\]"):
        common_stream([on_stream(7), on_stream(0)])
