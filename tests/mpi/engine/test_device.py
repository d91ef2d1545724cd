"""Device arrays through the whole engine, on a fake device and a fake NCCL (tests/support/native)."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import hvpipe
from arrays import DTYPES
from devices import (
    WAYS,
    Libraries,
    OnDevice,
    finish_stream,
    needs_others,
    open_engine,
    values_of,
    wait_until,
)
from hvpipe.engine.engine import EngineClient
from hvpipe.errors import HvpipeError
from hvpipe.plan.buckets import Gradient, plan_buckets


# One engine for all cases: with many ranks its start takes longer than a case.
@pytest.fixture(params=WAYS, scope="session")
def device_engine(request: Any, libraries: Libraries) -> Iterator[EngineClient]:
    engine = open_engine(libraries, request.param)
    yield engine
    engine.agree("end of the cases")
    engine.stop()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 5, 4097, 100_000])
def test_a_device_array_is_summed_into_another(device_engine: EngineClient, dtype: str, count: int) -> None:
    mine = values_of(hvpipe.rank(), count, dtype)
    out = OnDevice(np.full(count, np.nan).astype(DTYPES[dtype]))
    device_engine.allreduce(OnDevice(mine.copy()), op="sum", out=out)
    wanted = sum(values_of(r, count, dtype).astype(np.float64) for r in range(hvpipe.size()))
    np.testing.assert_array_equal(out.values.astype(np.float64), wanted)


def test_a_device_array_is_averaged_in_place(device_engine: EngineClient) -> None:
    array = OnDevice(values_of(hvpipe.rank(), 1000, "float64"))
    assert device_engine.allreduce(array, out=array) is array
    wanted = sum(values_of(r, 1000, "float64") for r in range(hvpipe.size())) / hvpipe.size()
    np.testing.assert_allclose(array.values, wanted, rtol=1e-15)


def test_an_average_may_have_a_sum_beyond_its_type(device_engine: EngineClient) -> None:
    array = OnDevice(np.full(5, 60_000, np.float16))
    device_engine.allreduce(array, out=array)
    np.testing.assert_allclose(array.values, 60_000, rtol=1e-3)


def test_calls_of_several_threads_take_turns(device_engine: EngineClient) -> None:
    """Regression: they shared the events and the staging memory, and the ranks disagreed about their order.

    On rank 0 each call has a thread, in the order of the other ranks' calls, which come late.
    """
    needs_others()
    calls: list[tuple[Any, Any]] = []
    for count in (100_000, 10, 3):
        array = OnDevice(np.full(count, hvpipe.rank() + 1.0, np.float32))
        calls.append((functools.partial(device_engine.allreduce, op="sum", out=array), array))
        calls.append((device_engine.broadcast, np.full(count, hvpipe.rank() + 7.0)))
    device_engine.use_device()
    device_engine.agree("the start")
    if hvpipe.rank() == 0:
        with ThreadPoolExecutor(len(calls)) as threads:
            running = []
            for call, array in calls:
                running.append(threads.submit(call, array))
                time.sleep(0.1)
            found = [each.result() for each in running]
    else:
        time.sleep(1.0)
        found = [call(array) for call, array in calls]
    for summed, sent in zip(found[::2], found[1::2], strict=True):
        assert set(summed.values) == {sum(range(1, hvpipe.size() + 1))}
        assert set(sent) == {7.0}


MODEL = [
    Gradient("a", (3,), "float32"),
    Gradient("b", (50_000,), "float32"),
    Gradient("c", (40, 7), "float16"),
    Gradient("d", (), "float64"),
    Gradient("f", (0, 4), "float32"),
    Gradient("g", (1_111,), "bfloat16"),
    *(Gradient(f"many-{i}", (5,), "float32") for i in range(200)),
]


@pytest.mark.parametrize("compression", [None, "bf16"])
def test_steps_of_buckets_are_packed_reduced_and_unpacked(
    device_engine: EngineClient, compression: str | None
) -> None:
    plan = plan_buckets(MODEL, 16_000, compression)
    device_engine.use_device()
    plan_id = device_engine.add_plan(f"on a device, {compression}", plan, on_device=True)
    core = device_engine.native
    size = hvpipe.size()
    for step in range(3):
        scale, total = core.begin_step(plan_id, step, 1.0, True)
        assert (scale, total) == (1 / size, size)
        # Each rank submits in its own order. The engine must agree on one.
        order = np.random.default_rng([step, hvpipe.rank()]).permutation(len(plan.buckets))
        for index in order:
            bucket = plan.buckets[index]
            gradients = [values_of(hvpipe.rank() + step, n, bucket.dtype) for n in bucket.counts]
            device_engine.submit_on_device(plan_id, int(index), [OnDevice(g) for g in gradients], 0.5)
        for index, bucket in enumerate(plan.buckets):
            outs = [OnDevice(np.full(n, np.nan).astype(DTYPES[bucket.dtype])) for n in bucket.counts]
            device_engine.collect_on_device(plan_id, index, outs)
            for out, n in zip(outs, bucket.counts, strict=True):
                terms = [values_of(r + step, n, bucket.dtype).astype(np.float64) for r in range(size)]
                np.testing.assert_array_equal(out.values.astype(np.float64), 0.5 * sum(terms))


def assert_summed(engine: EngineClient, plan_id: int, counts: tuple[int, ...]) -> None:
    """Reduce a step's buckets of one array each, of this many elements."""
    arrays = [OnDevice(values_of(hvpipe.rank(), count, "float32")) for count in counts]
    for bucket, array in enumerate(arrays):
        engine.submit_on_device(plan_id, bucket, [array], 1.0)
    for bucket, array in enumerate(arrays):
        engine.collect_on_device(plan_id, bucket, [array])
        wanted = sum(values_of(r, array.values.size, "float32") for r in range(hvpipe.size()))
        np.testing.assert_array_equal(array.values, wanted)


MEMORY = {
    "there is some": "nccl",
    "of an older NCCL": "nccl_without_memory",
    "not on one rank": "nccl",
    "that another process takes, too": "nccl",
    "in pieces of 512 MiB": "nccl",  # as on an H100 with NVSwitches, where a few buckets would fill the GPU
}


@pytest.mark.parametrize("memory", MEMORY)
def test_large_buckets_are_registered_with_nccl_on_all_ranks_or_none(
    libraries: Libraries, monkeypatch: Any, memory: str
) -> None:
    needs_others()
    library = getattr(libraries, MEMORY[memory])
    engine = open_engine(libraries, "NCCL", nccl_library=library)
    if memory == "in pieces of 512 MiB":
        monkeypatch.setenv("FAKE_DEVICE_UNIT", str(512 << 20))
    if memory == "that another process takes, too":
        monkeypatch.setenv("FAKE_NCCL", "memory-shared")
    if memory == "not on one rank" and hvpipe.rank() == 1:
        monkeypatch.setenv("FAKE_NCCL", "memory")
    engine.use_device()
    nccl = ctypes.CDLL(library)
    held, registered = nccl.nccl_memory_held(), nccl.nccl_registrations()
    layers = [Gradient("small", (1_000,), "float32"), Gradient("large", (300_001,), "float32")]
    plan_id = engine.add_plan("a", plan_buckets(layers, 1_000_000), on_device=True)
    for step in range(2):
        engine.native.begin_step(plan_id, step, 1.0, True)
        assert_summed(engine, plan_id, (300_001, 1_000))
    large = 1 if memory in ("there is some", "that another process takes, too") else 0
    assert nccl.nccl_memory_held() - held == large
    assert nccl.nccl_registrations() - registered == large
    engine.agree("end of a case")
    engine.stop()
    engine.native = None
    assert nccl.nccl_memory_held() == held


def test_a_thread_keeps_the_device_that_it_has(device_engine: EngineClient, libraries: Libraries) -> None:
    device = ctypes.CDLL(libraries.device)
    array = OnDevice(np.ones(10, np.float32))
    device_engine.allreduce(array, out=array)
    assert device.current_device() == -1


@pytest.mark.parametrize("last", [False, True])
def test_a_device_array_is_filled_with_the_roots_numbers(device_engine: EngineClient, last: bool) -> None:
    root = hvpipe.size() - 1 if last else 0
    array = OnDevice(values_of(hvpipe.rank(), 30_000, "float32"))
    device_engine.broadcast(array, root)
    np.testing.assert_array_equal(array.values, values_of(root, 30_000, "float32"))


def test_use_device_returns_the_path_of_the_data(libraries: Libraries) -> None:
    engine = open_engine(libraries, "NCCL")
    one = hvpipe.size() == 1
    assert engine.use_device() == ("one rank" if one else "by NCCL 2.30.5")
    assert engine.use_device() == engine.use_device()
    engine.agree("end of a case")
    engine.stop()
    engine = open_engine(libraries, "host")
    assert engine.use_device() == ("one rank" if one else "through the host: no NCCL was named")
    engine.stop()


def test_nccl_allocates_before_tensorflow_takes_the_memory(libraries: Libraries) -> None:
    """A small and a large collective of each kind run before `use_device` returns."""
    needs_others()
    device, nccl = ctypes.CDLL(libraries.device), ctypes.CDLL(libraries.nccl)
    held, before = things(device, nccl), nccl.nccl_collectives()
    engine = open_engine(libraries, "NCCL")
    engine.use_device()
    assert nccl.nccl_collectives() - before == 2 * 4
    engine.agree("end of a case")
    engine.stop()
    engine.native = None
    assert things(device, nccl) == held


def test_two_threads_may_be_the_first_to_use_the_device(libraries: Libraries) -> None:
    """Regression: both opened it."""
    engine = open_engine(libraries, "NCCL")
    with ThreadPoolExecutor(2) as threads:
        routes = list(threads.map(lambda _: engine.use_device(), range(2)))
    assert routes[0] == routes[1]
    engine.agree("end of a case")
    engine.stop()


def test_host_memory_is_allocated_once_and_freed(libraries: Libraries) -> None:
    device = ctypes.CDLL(libraries.device)
    held = device.things_held()
    engine = open_engine(libraries, "host")
    engine.use_device()
    before = device.host_memory_allocations()
    # The arrays need two buffer sizes: up to 64 KiB, and up to 512 KiB.
    for count in (10, 1_000, 16_000, 7, 100_000, 50_000, 130_000, 1_000):
        array = OnDevice(np.ones(count, np.float32))
        engine.allreduce(array, op="sum", out=array)
        np.testing.assert_array_equal(array.values, np.full(count, hvpipe.size()))
        engine.broadcast(array)
    assert device.host_memory_allocations() - before == (2 if hvpipe.size() > 1 else 0)
    plan_id = engine.add_plan("a", plan_buckets([Gradient("a", (3,), "float32")], 16_000, None), True)
    before = device.host_memory_allocations()
    for step in range(3):
        engine.native.begin_step(plan_id, step, 1.0, True)
        array = OnDevice(np.ones(3, np.float32))
        engine.submit_on_device(plan_id, 0, [array], 1.0)
        engine.collect_on_device(plan_id, 0, [array])
    assert device.host_memory_allocations() == before
    engine.agree("end of a case")
    engine.stop()
    engine.native = None
    assert device.things_held() == held


@pytest.mark.parametrize("way", WAYS)
def test_the_buffers_of_a_removed_plan_are_freed(libraries: Libraries, way: str) -> None:
    device, nccl = ctypes.CDLL(libraries.device), ctypes.CDLL(libraries.nccl)
    engine = open_engine(libraries, way)
    engine.use_device()
    held, of_nccl, registered = things(device, nccl)
    layers = [Gradient("small", (1_000,), "float32"), Gradient("large", (300_001,), "float32")]
    plan = plan_buckets(layers, 1_000_000)
    for trial in range(3):
        plan_id = engine.add_plan(f"trial {trial}", plan, on_device=True)
        engine.native.begin_step(plan_id, 0, 1.0, True)
        engine.remove_plan(plan_id)  # no effect while a step is under way
        assert_summed(engine, plan_id, (300_001, 1_000))
        engine.remove_plan(plan_id)
        wait_until(lambda: things(device, nccl) == (held, of_nccl, registered))
        assert things(device, nccl) == (held, of_nccl, registered)
    with pytest.raises(HvpipeError, match="was removed"):
        engine.native.begin_step(plan_id, 1, 1.0, True)
    engine.agree("end of a case")
    engine.stop()


def things(device: Any, nccl: Any) -> tuple[int, int, int]:
    return device.things_held(), nccl.nccl_memory_held(), nccl.nccl_registrations()


class ByDlpack:
    """A NumPy array whose DLPack interface claims a device of this type."""

    def __init__(self, values: Any, device: int) -> None:
        self.values, self.device = values, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.values.__dlpack__()
        new = ctypes.pythonapi.PyCapsule_GetPointer
        new.restype, new.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # The layout of DLTensor: the data's address, then the device's type.
        ctypes.c_int32.from_address(new(capsule, b"dltensor") + 8).value = self.device
        return capsule


@pytest.mark.parametrize("kind", [2, 13])
def test_device_and_managed_arrays_are_taken_by_dlpack(device_engine: EngineClient, kind: int) -> None:
    mine = values_of(hvpipe.rank(), 100, "float32")
    out = np.full(100, np.nan, np.float32)
    device_engine.allreduce(ByDlpack(mine, kind), op="sum", out=ByDlpack(out, kind))
    assert finish_stream(1, 20)
    np.testing.assert_array_equal(out, sum(values_of(r, 100, "float32") for r in range(hvpipe.size())))
    with pytest.raises(HvpipeError, match=r"C-contiguous device array.*a stride of 4 elements where 1"):
        device_engine.allreduce(ByDlpack(np.ones((4, 4), np.float32).T, kind), out=ByDlpack(out, kind))


def test_a_read_only_array_is_not_written(device_engine: EngineClient) -> None:
    array = OnDevice(np.ones(3, np.float32))
    kept = OnDevice(np.ones(3, np.float32))
    kept.__cuda_array_interface__["data"] = (kept.values.ctypes.data, True)
    with pytest.raises(HvpipeError, match="writable device array"):
        device_engine.allreduce(array, out=kept)
    with pytest.raises(HvpipeError, match="writable device array"):
        device_engine.broadcast(kept)


def test_what_cannot_be_reduced_is_refused(device_engine: EngineClient) -> None:
    good = OnDevice(np.ones((4, 4), np.float32))
    with pytest.raises(HvpipeError, match=r"device array should be C-contiguous.*strides"):
        device_engine.allreduce(OnDevice(np.ones((4, 4), np.float32).T[:2]), out=good)
    with pytest.raises(HvpipeError, match=r"out should be a float32\[4, 4\].*Received: float32\[3\]"):
        device_engine.allreduce(good, out=OnDevice(np.ones(3, np.float32)))
    with pytest.raises(HvpipeError, match="needs out="):
        device_engine.allreduce(good)


def test_buckets_on_a_device_take_no_host_arrays(device_engine: EngineClient) -> None:
    device_engine.use_device()
    plan = plan_buckets([Gradient("a", (3,), "float32")], 16_000, None)
    plan_id = device_engine.add_plan("on a device", plan, on_device=True)
    with pytest.raises(HvpipeError, match="This bucket uses device memory"):
        device_engine.native.submit(plan_id, 0, [np.ones(3, np.float32)], 1.0)
