"""Arrays in device memory through the whole engine, on a device and an NCCL made for tests (tests/native)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from mpi.arrays import DTYPES, Array
from native_build import build

import hvpipe
from hvpipe.engine import Engine
from hvpipe.errors import DeadlineError, HvpipeError, MismatchError, PeerError
from hvpipe.plan.buckets import Gradient, plan_buckets
from hvpipe.session import current

WAYS = ("NCCL", "NCCL inside hosts", "host")
TYPESTR = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<V2"}


class OnDevice:
    """An array that says it lies on a device, as CuPy's and PyTorch's do."""

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
    device: str
    nccl: str
    old_nccl: str
    nccl_without_memory: str


@pytest.fixture(scope="session")
def libraries(world: None) -> Libraries:
    """Built by one rank for all."""
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


def open_engine(libraries: Libraries, way: str, **changes: Any) -> Engine:
    session = current()
    if session.engine.core is None:
        pytest.skip("one rank without MPI has no C++ engine")
    if way == "NCCL inside hosts":
        if session.engine.core.hosts == 1:
            pytest.skip("one host")
        changes.setdefault("nccl_span", "host")
    changes.setdefault("nccl_library", "none" if way == "host" else libraries.nccl)
    changes.setdefault("device_library", libraries.device)
    # Hosts that are made up have the same GPUs.
    changes.setdefault("gpus_may_be_shared", session.settings.ranks_per_host > 0)
    settings = replace(session.settings, **changes)
    return Engine(session.world, settings, settings.ranks_per_host)


# One engine for all cases: under a crowd of ranks its start takes longer than a case.
@pytest.fixture(params=WAYS, scope="session")
def device_engine(request: Any, libraries: Libraries) -> Iterator[Engine]:
    engine = open_engine(libraries, request.param)
    yield engine
    engine.agree("end of the cases")
    engine.stop()


def values_of(rank: int, count: int, dtype: str) -> Array:
    # Whole numbers, so that any order of adding gives the same sum.
    return np.random.default_rng([rank, count]).integers(-8, 8, count).astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 5, 4097, 100_000])
def test_a_device_array_is_summed_into_another(device_engine: Engine, dtype: str, count: int) -> None:
    mine = values_of(hvpipe.rank(), count, dtype)
    out = OnDevice(np.full(count, np.nan).astype(DTYPES[dtype]))
    device_engine.allreduce(OnDevice(mine.copy()), op="sum", out=out)
    wanted = sum(values_of(r, count, dtype).astype(np.float64) for r in range(hvpipe.size()))
    np.testing.assert_array_equal(out.values.astype(np.float64), wanted)


def test_it_is_averaged_in_place(device_engine: Engine) -> None:
    array = OnDevice(values_of(hvpipe.rank(), 1000, "float64"))
    assert device_engine.allreduce(array, out=array) is array
    wanted = sum(values_of(r, 1000, "float64") for r in range(hvpipe.size())) / hvpipe.size()
    np.testing.assert_allclose(array.values, wanted, rtol=1e-15)


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
    device_engine: Engine, compression: str | None
) -> None:
    plan = plan_buckets(MODEL, 16_000, compression)
    device_engine.use_device()
    plan_id = device_engine.add_plan(f"on a device, {compression}", plan, on_device=True)
    core = device_engine.core
    size = hvpipe.size()
    for step in range(3):
        scale, total = core.begin_step(plan_id, step, 1.0, True)
        assert (scale, total) == (1 / size, size)
        # Each rank in its own order: the engine must bring them into one.
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


MEMORY = {"there is some": "nccl", "of an older NCCL": "nccl_without_memory", "not on one rank": "nccl"}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("way", WAYS[:2])
def test_large_buckets_are_registered_with_nccl_on_all_ranks_or_none(
    libraries: Libraries, monkeypatch: Any, way: str, memory: str
) -> None:
    needs_others()
    library = getattr(libraries, MEMORY[memory])
    engine = open_engine(libraries, way, nccl_library=library)
    if memory == "not on one rank" and hvpipe.rank() == 1:
        monkeypatch.setenv("FAKE_NCCL", "memory")
    if "by NCCL" not in engine.use_device():
        pytest.skip("hosts with different numbers of ranks")
    nccl = ctypes.CDLL(library)
    held, registered = nccl.nccl_memory_held(), nccl.nccl_registrations()
    layers = [Gradient("small", (1_000,), "float32"), Gradient("large", (300_001,), "float32")]
    plan_id = engine.add_plan("a", plan_buckets(layers, 1_000_000), on_device=True)
    for step in range(2):
        engine.core.begin_step(plan_id, step, 1.0, True)
        arrays = [OnDevice(values_of(hvpipe.rank(), count, "float32")) for count in (300_001, 1_000)]
        for bucket, array in enumerate(arrays):
            engine.submit_on_device(plan_id, bucket, [array], 1.0)
        for bucket, array in enumerate(arrays):
            engine.collect_on_device(plan_id, bucket, [array])
            wanted = sum(values_of(r, array.values.size, "float32") for r in range(hvpipe.size()))
            np.testing.assert_array_equal(array.values, wanted)
    large = 1 if memory == "there is some" else 0
    assert nccl.nccl_memory_held() - held == large
    assert nccl.nccl_registrations() - registered == large
    engine.agree("end of a case")
    engine.stop()
    engine.core = None
    assert nccl.nccl_memory_held() == held


def test_a_thread_keeps_the_device_that_it_has(device_engine: Engine, libraries: Libraries) -> None:
    device = ctypes.CDLL(libraries.device)
    array = OnDevice(np.ones(10, np.float32))
    device_engine.allreduce(array, out=array)
    assert device.current_device() == -1


@pytest.mark.parametrize("last", [False, True])
def test_a_device_array_is_filled_with_the_roots_numbers(device_engine: Engine, last: bool) -> None:
    root = hvpipe.size() - 1 if last else 0
    array = OnDevice(values_of(hvpipe.rank(), 30_000, "float32"))
    device_engine.broadcast(array, root)
    np.testing.assert_array_equal(array.values, values_of(root, 30_000, "float32"))


def test_which_way_data_goes_is_said(libraries: Libraries) -> None:
    engine = open_engine(libraries, "NCCL")
    one = hvpipe.size() == 1
    assert engine.use_device() == ("one rank" if one else "by NCCL 2.30.5")
    assert engine.use_device() == engine.use_device()
    engine.agree("end of a case")
    engine.stop()
    engine = open_engine(libraries, "host")
    assert engine.use_device() == ("one rank" if one else "through the host: no NCCL was named")
    engine.stop()
    engine = open_engine(libraries, "NCCL", nccl_span="host")
    assert engine.use_device() == way_of_a_span_of_hosts()
    engine.agree("end of a case")
    engine.stop()


def way_of_a_span_of_hosts() -> str:
    hosts = current().engine.core.hosts
    if hvpipe.size() == 1:
        return "one rank"
    if hosts == 1:
        return "by NCCL 2.30.5"
    if hvpipe.size() == 3:
        return (
            "through the host: NCCL stays inside hosts (HVPIPE_NCCL_SPAN=host) only where all have the same "
            "number of ranks. Received: 3 ranks on 2 hosts"
        )
    return "by NCCL 2.30.5 inside hosts, through the host and MPI between them"


def test_between_hosts_each_rank_carries_its_part_alone(libraries: Libraries) -> None:
    engine = open_engine(libraries, "NCCL inside hosts")
    if "inside hosts, through" not in engine.use_device():
        pytest.skip("hosts with different numbers of ranks")
    # 8 bytes beyond what two ranks share equally: padded.
    layers = [Gradient("a", (4_001,), "float64"), Gradient("b", (30_000,), "float64")]
    plan_id = engine.add_plan("a", plan_buckets(layers, 250_000, None), on_device=True)
    sent = engine.counters()["network_bytes_sent"]
    engine.core.begin_step(plan_id, 0, 1.0, True)
    announced = engine.counters()["network_bytes_sent"] - sent
    arrays = [OnDevice(values_of(hvpipe.rank(), 30_000, "float64")), OnDevice(np.ones(4_001))]
    for bucket, array in enumerate(arrays):
        engine.submit_on_device(plan_id, bucket, [array], 1.0)
    for bucket, array in enumerate(arrays):
        engine.collect_on_device(plan_id, bucket, [array])
    wanted = sum(values_of(r, 30_000, "float64") for r in range(hvpipe.size()))
    np.testing.assert_array_equal(arrays[0].values, wanted)
    np.testing.assert_array_equal(arrays[1].values, np.full(4_001, hvpipe.size()))
    # A ring of H hosts sends 2 (H - 1) / H of a rank's part.
    hosts, local = engine.core.hosts, engine.core.local_size
    share = 2 * (hosts - 1) / hosts * 8 * (30_000 + 4_002) / local
    assert announced == 0
    assert engine.counters()["network_bytes_sent"] - sent == share
    engine.agree("end of a case")
    engine.stop()


def test_ranks_that_differ_on_where_nccl_goes_are_told_so(libraries: Libraries) -> None:
    needs_others()
    engine = open_engine(libraries, "NCCL", nccl_span="host" if hvpipe.rank() == 1 else "world")
    with pytest.raises(HvpipeError, match=r"NCCL should serve all ranks.*another HVPIPE_NCCL_SPAN"):
        engine.use_device()
    engine.stop()


def test_host_memory_is_made_once_and_given_back(libraries: Libraries) -> None:
    device = ctypes.CDLL(libraries.device)
    held = device.things_held()
    engine = open_engine(libraries, "host")
    engine.use_device()
    before = device.host_memory_allocations()
    # Two sizes of room: up to 64 KiB, and up to 512 KiB.
    for count in (10, 1_000, 16_000, 7, 100_000, 50_000, 130_000, 1_000):
        array = OnDevice(np.ones(count, np.float32))
        engine.allreduce(array, op="sum", out=array)
        np.testing.assert_array_equal(array.values, np.full(count, hvpipe.size()))
        engine.broadcast(array)
    assert device.host_memory_allocations() - before == (2 if hvpipe.size() > 1 else 0)
    plan_id = engine.add_plan("a", plan_buckets([Gradient("a", (3,), "float32")], 16_000, None), True)
    before = device.host_memory_allocations()
    for step in range(3):
        engine.core.begin_step(plan_id, step, 1.0, True)
        array = OnDevice(np.ones(3, np.float32))
        engine.submit_on_device(plan_id, 0, [array], 1.0)
        engine.collect_on_device(plan_id, 0, [array])
    assert device.host_memory_allocations() == before
    engine.agree("end of a case")
    engine.stop()
    engine.core = None
    assert device.things_held() == held


def needs_others() -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank has nobody to wait for")


def test_an_nccl_of_another_version_on_one_rank_is_refused(libraries: Libraries) -> None:
    needs_others()
    odd = {"nccl_library": libraries.old_nccl} if hvpipe.rank() == 1 else {}
    engine = open_engine(libraries, "NCCL", **odd)
    with pytest.raises(HvpipeError, match=r"NCCL should serve all ranks.*different versions"):
        engine.use_device()
    engine.stop()


def test_nccl_that_does_not_start_on_one_rank_is_an_error_on_all(
    libraries: Libraries, monkeypatch: Any
) -> None:
    needs_others()
    first = hvpipe.rank() == 0
    engine = open_engine(libraries, "NCCL")
    if first:
        monkeypatch.setenv("FAKE_NCCL", "id")
    with pytest.raises(PeerError, match="ncclGetUniqueId: unhandled" if first else "did not start on rank 0"):
        engine.use_device()
    engine.stop()


def test_two_ranks_on_one_device_are_told_so(libraries: Libraries, monkeypatch: Any) -> None:
    needs_others()
    monkeypatch.setenv("FAKE_DEVICES", "1")
    engine = open_engine(libraries, "NCCL", gpus_may_be_shared=False)
    with pytest.raises(HvpipeError, match=r"a GPU of its own.*ranks \d and \d on .*test device 0"):
        engine.use_device()
    engine.stop()


def test_more_ranks_than_devices_is_an_error(libraries: Libraries, monkeypatch: Any) -> None:
    if hvpipe.local_size() < 3 or current().settings.ranks_per_host:
        pytest.skip("needs three ranks on a host")
    monkeypatch.setenv("FAKE_DEVICES", "2")
    engine = open_engine(libraries, "NCCL")
    with pytest.raises(HvpipeError, match=r"Received: \d ranks on this host, 2 GPUs visible"):
        engine.use_device()
    engine.stop()


def test_host_memory_on_one_rank_is_a_mismatch(libraries: Libraries) -> None:
    needs_others()
    engine = open_engine(libraries, "host", timeout_s=4.0)
    engine.use_device()
    array = np.ones(10, np.float32)
    if hvpipe.rank() == 0:
        with pytest.raises(MismatchError, match="on a device"):
            engine.allreduce(array, out=array)
    else:
        # Where the ranks of a host meet in shared memory, the first to notice takes the others' record.
        on_device = OnDevice(array)
        with pytest.raises((MismatchError, DeadlineError)):
            engine.allreduce(on_device, out=on_device)
    engine.stop()


@pytest.mark.parametrize(
    ("variable", "how", "kind", "says"),
    [
        ("FAKE_NCCL", "async", PeerError, "remote process exited"),
        ("FAKE_NCCL", "hang", DeadlineError, "NCCL to start it"),
        ("FAKE_DEVICE_HANGS", "1", DeadlineError, "test device . to finish.*NCCL waits for all ranks"),
    ],
)
def test_what_fails_in_the_background_ends_the_engine(
    libraries: Libraries, monkeypatch: Any, variable: str, how: str, kind: type[Exception], says: str
) -> None:
    needs_others()
    engine = open_engine(libraries, "NCCL", timeout_s=2.0)
    engine.use_device()
    monkeypatch.setenv(variable, how)
    array = OnDevice(np.ones(10, np.float32))
    with pytest.raises(kind, match=says):
        engine.allreduce(array, out=array)
    monkeypatch.delenv(variable)
    with pytest.raises(kind, match=says):  # and nothing goes on after that
        engine.allreduce(array, out=array)
    engine.stop()


@pytest.mark.parametrize("way", WAYS[:2])
def test_a_bucket_that_nccl_does_not_end_ends_the_engine(
    libraries: Libraries, monkeypatch: Any, way: str
) -> None:
    needs_others()
    engine = open_engine(libraries, way, timeout_s=2.0)
    if "by NCCL" not in engine.use_device():
        pytest.skip("hosts with different numbers of ranks")
    plan_id = engine.add_plan("a", plan_buckets([Gradient("a", (3,), "float32")], 16_000), on_device=True)
    engine.core.begin_step(plan_id, 0, 1.0, True)
    monkeypatch.setenv("FAKE_NCCL", "hang")
    array = OnDevice(np.ones(3, np.float32))
    engine.submit_on_device(plan_id, 0, [array], 1.0)
    with pytest.raises(DeadlineError, match="NCCL to start it"):
        engine.collect_on_device(plan_id, 0, [array])
    engine.stop()


def test_a_bucket_that_cannot_be_packed_ends_the_engine(libraries: Libraries, monkeypatch: Any) -> None:
    device = ctypes.CDLL(libraries.device)
    held = device.things_held()
    engine = open_engine(libraries, "host")
    engine.use_device()
    plan_id = engine.add_plan("a", plan_buckets([Gradient("a", (3,), "float32")], 16_000), on_device=True)
    engine.core.begin_step(plan_id, 0, 1.0, True)
    monkeypatch.setenv("FAKE_DEVICE_FAILS", "1")
    array = OnDevice(np.ones(3, np.float32))
    for call in (
        lambda: engine.submit_on_device(plan_id, 0, [array], 1.0),
        lambda: engine.collect_on_device(plan_id, 0, [array]),
    ):
        with pytest.raises(PeerError, match="a launch failed"):
            call()
    engine.stop()
    engine.core = None
    assert device.things_held() > held  # what messages may still name is not given back


def test_nccl_that_does_not_leave_is_an_error_of_stop(libraries: Libraries, monkeypatch: Any) -> None:
    needs_others()
    for stops in (True, False):
        engine = open_engine(libraries, "NCCL")
        engine.use_device()
        monkeypatch.setenv("FAKE_NCCL", "finalize")
        if stops:
            with pytest.raises(PeerError, match="ncclCommFinalize: remote process exited"):
                engine.stop()
        engine.core = None  # its end raises nothing
        monkeypatch.delenv("FAKE_NCCL")


def test_what_cannot_be_reduced_is_refused(device_engine: Engine) -> None:
    good = OnDevice(np.ones((4, 4), np.float32))
    with pytest.raises(HvpipeError, match=r"C-contiguous device array.*strides"):
        device_engine.allreduce(OnDevice(np.ones((4, 4), np.float32).T[:2]), out=good)
    with pytest.raises(HvpipeError, match=r"out should be a float32\[4, 4\].*Received: float32\[3\]"):
        device_engine.allreduce(good, out=OnDevice(np.ones(3, np.float32)))
    with pytest.raises(HvpipeError, match="wants out="):
        device_engine.allreduce(good)


def test_buckets_on_a_device_take_no_host_arrays(device_engine: Engine) -> None:
    device_engine.use_device()
    plan = plan_buckets([Gradient("a", (3,), "float32")], 16_000, None)
    plan_id = device_engine.add_plan("on a device", plan, on_device=True)
    with pytest.raises(HvpipeError, match="one of device memory"):
        device_engine.core.submit(plan_id, 0, [np.ones(3, np.float32)], 1.0)


def test_without_the_library_it_is_said_how_to_get_it(libraries: Libraries) -> None:
    engine = open_engine(libraries, "host", device_library="libnowhere.so")
    array = OnDevice(np.ones(3, np.float32))
    with pytest.raises(HvpipeError, match="built where CUDA's compiler is"):
        engine.allreduce(array, out=array)
    engine.stop()


def test_hvpipes_own_library_says_that_there_is_no_driver(libraries: Libraries) -> None:
    from hvpipe.engine import native_directory

    own = native_directory() / "libhvpipe_cuda.so"
    if not own.exists():
        pytest.skip("hvpipe was built without nvcc")
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is a GPU")
    engine = open_engine(libraries, "host", device_library=str(own))
    with pytest.raises(HvpipeError, match=r"A CUDA device should be usable.*Received: (no|a) driver"):
        engine.use_device()
    engine.stop()
