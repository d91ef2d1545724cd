"""Failures between ranks with device arrays: which ranks get the error, how soon, and what remains allocated.

The device and NCCL are fakes (tests/support/native).
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import time
from typing import Any

import numpy as np
import pytest

import hvpipe
from devices import WAYS, Libraries, OnDevice, needs_others, open_engine, open_impatient
from hvpipe.errors import DeadlineError, HvpipeError, MismatchError, PeerError
from hvpipe.plan.buckets import Gradient, plan_buckets
from hvpipe.session import current


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


def test_two_ranks_on_one_device_are_an_error(libraries: Libraries, monkeypatch: Any) -> None:
    needs_others()
    monkeypatch.setenv("FAKE_DEVICES", "1")
    engine = open_engine(libraries, "NCCL", gpus_may_be_shared=False)
    with pytest.raises(HvpipeError, match=r"a GPU of its own.*ranks \d and \d on .*test device 0"):
        engine.use_device()
    engine.stop()


def test_two_ranks_on_one_device_may_be_without_nccl(
    libraries: Libraries, monkeypatch: Any, caplog: Any
) -> None:
    """Only NCCL needs a device for each rank. Here NCCL is optional and missing, and the engine logs that."""
    needs_others()
    caplog.set_level(logging.INFO, "hvpipe")
    monkeypatch.setenv("FAKE_DEVICES", "1")
    monkeypatch.setattr("hvpipe.engine.rank_gpu.find_nccl", lambda _: "libnccl-that-is-nowhere.so.2")
    engine = open_engine(libraries, "NCCL", nccl_library="", gpus_may_be_shared=False)
    assert re.match(r"through the host: rank 0 on \S+: NCCL does not load", engine.use_device())
    engine.agree("end of a case")
    engine.stop()
    assert levels_of_the_way(caplog) == ["WARNING" if hvpipe.rank() == 0 else "INFO"]


def test_a_user_who_asked_for_the_host_gets_no_warning(libraries: Libraries, caplog: Any) -> None:
    needs_others()
    caplog.set_level(logging.INFO, "hvpipe")
    for way in ("host", "NCCL"):
        engine = open_engine(libraries, way)
        engine.use_device()
        engine.agree("end of a case")
        engine.stop()
    assert levels_of_the_way(caplog) == ["INFO", "INFO"]


def levels_of_the_way(caplog: Any) -> list[str]:
    """Return the levels at which the engine logged the path of GPU data."""
    return [record.levelname for record in caplog.records if "data on GPUs goes" in record.getMessage()]


def test_parts_of_one_device_go_through_the_host(libraries: Libraries, monkeypatch: Any) -> None:
    needs_others()
    if current().settings.ranks_per_host:
        pytest.skip("hosts that are made up have devices of one name")
    monkeypatch.setenv("FAKE_DEVICE_PARTS", "1")
    monkeypatch.setattr("hvpipe.engine.rank_gpu.find_nccl", lambda named: named or libraries.nccl)
    engine = open_engine(libraries, "NCCL", nccl_library="", gpus_may_be_shared=False)
    assert engine.use_device().startswith("through the host: NCCL does not join parts of one GPU")
    engine.stop()
    engine = open_engine(libraries, "NCCL", gpus_may_be_shared=False)
    with pytest.raises(HvpipeError, match=r"NCCL should serve all ranks.*parts of one GPU"):
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
    engine = open_impatient(libraries, "host", 5.0)
    array = np.ones(10, np.float32)
    if hvpipe.rank() == 0:
        with pytest.raises(MismatchError, match="on a device"):
            engine.allreduce(array, out=array)
    else:
        # Ranks of one host meet in shared memory, where the first to notice takes the record of the others.
        on_device = OnDevice(array)
        with pytest.raises((MismatchError, DeadlineError)):
            engine.allreduce(on_device, out=on_device)
    engine.stop()


@pytest.mark.parametrize(
    ("variable", "how", "kind", "says"),
    [
        ("FAKE_NCCL", "async", PeerError, "remote process exited"),
        ("FAKE_NCCL", "hang", DeadlineError, "NCCL to start it"),
        ("FAKE_DEVICE_HANGS", "1", DeadlineError, "test device . to finish.*NCCL waits for all . ranks"),
    ],
)
def test_a_background_failure_ends_the_engine(
    libraries: Libraries, monkeypatch: Any, variable: str, how: str, kind: type[Exception], says: str
) -> None:
    needs_others()
    engine = open_impatient(libraries, "NCCL", 5.0)
    monkeypatch.setenv(variable, how)
    array = OnDevice(np.ones(10, np.float32))
    with pytest.raises(kind, match=says):
        engine.allreduce(array, out=array)
    monkeypatch.delenv(variable)
    with pytest.raises(kind, match=says):  # later calls fail too
        engine.allreduce(array, out=array)
    engine.stop()


def test_an_abort_that_hangs_does_not_delay_the_error(libraries: Libraries, monkeypatch: Any) -> None:
    needs_others()
    engine = open_impatient(libraries, "NCCL", 5.0)
    monkeypatch.setenv("FAKE_NCCL_ABORT", "hang")
    monkeypatch.setenv("FAKE_NCCL", "async")
    array = OnDevice(np.ones(10, np.float32))
    start = time.monotonic()
    with pytest.raises(PeerError, match="remote process exited"):
        engine.allreduce(array, out=array)
    engine.stop()
    engine.native = None
    assert time.monotonic() - start < 30  # the abort takes 60 s


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_leaves_late_is_no_error_on_the_others(libraries: Libraries, way: str) -> None:
    """Rank 0 leaves late when it writes a long trace. NCCL and MPI wait for it, but not forever."""
    needs_others()
    engine = open_impatient(libraries, way, 5.0)
    if hvpipe.rank() == 0:
        time.sleep(3)
    engine.stop()


def test_a_bucket_that_hangs_in_nccl_ends_the_engine(libraries: Libraries, monkeypatch: Any) -> None:
    needs_others()
    engine = open_impatient(libraries, "NCCL", 5.0)
    plan_id = engine.add_plan("a", plan_buckets([Gradient("a", (3,), "float32")], 16_000), on_device=True)
    engine.native.begin_step(plan_id, 0, 1.0, True)
    monkeypatch.setenv("FAKE_NCCL", "hang")
    array = OnDevice(np.ones(3, np.float32))
    engine.submit_on_device(plan_id, 0, [array], 1.0)
    with pytest.raises(DeadlineError, match="NCCL to start it"):
        engine.collect_on_device(plan_id, 0, [array])
    engine.stop()


def test_gradients_that_do_not_fit_are_an_error_with_their_bytes(
    libraries: Libraries, monkeypatch: Any
) -> None:
    engine = open_engine(libraries, "host")
    engine.use_device()
    layers = [Gradient("a", (1_000_000,), "float32"), Gradient("b", (500_000,), "float32")]
    plan = plan_buckets(layers, 1_000_000)
    monkeypatch.setenv("FAKE_DEVICE_FREE", "5000000")
    with pytest.raises(
        HvpipeError,
        match=r"free block of 6 MB for the gradients' 2 buckets: free are 5 MB of 2000 MB\..*compression",
    ):
        engine.add_plan("a", plan, on_device=True)
    monkeypatch.setenv("FAKE_DEVICE_FREE", "6000000")
    monkeypatch.setenv("FAKE_DEVICE_FULL", "1")  # pieces of device memory that are too small
    with pytest.raises(
        HvpipeError,
        match=r"free block of 2 MB for a bucket of gradients: free are 6 MB of 2000 MB, in smaller blocks: "
        r"try HVPIPE_BUCKET_BYTES=1000\d{3}",
    ):
        engine.add_plan("a", plan, on_device=True)
    engine.stop()


def test_memory_that_nccl_cannot_allocate_is_an_error_with_its_bytes(
    libraries: Libraries, monkeypatch: Any
) -> None:
    needs_others()
    engine = open_engine(libraries, "NCCL")
    engine.use_device()
    plan = plan_buckets([Gradient("a", (1_000_000,), "float32")], 1_000_000)
    monkeypatch.setenv("FAKE_DEVICE_FREE", "1000000000")  # the fake NCCL lowers it
    monkeypatch.setenv("FAKE_NCCL", "memory-full")
    with pytest.raises(
        HvpipeError, match=r"free block of [45] MB for a bucket of gradients: free are 3 MB of 2000 MB"
    ):
        engine.add_plan("a", plan, on_device=True)
    monkeypatch.setenv("FAKE_DEVICE_FREE", "1000000000")
    monkeypatch.setenv("FAKE_NCCL", "memory")
    with pytest.raises(PeerError, match="ncclMemAlloc: unhandled cuda error"):
        engine.add_plan("a", plan, on_device=True)
    monkeypatch.delenv("FAKE_NCCL")
    engine.agree("end of a case")
    engine.stop()


def test_arrays_of_another_device_are_refused(libraries: Libraries, monkeypatch: Any) -> None:
    """The check comes before any launch.

    On a GPU, a launch on a wrong address ends all work of the process.
    """
    engine = open_engine(libraries, "host")
    engine.use_device()
    array = OnDevice(np.ones(3, np.float32))
    plan_id = engine.add_plan("a", plan_buckets([Gradient("a", (3,), "float32")], 16_000), on_device=True)
    engine.native.begin_step(plan_id, 0, 1.0, True)
    monkeypatch.setenv("FAKE_DEVICE_FAILS", "1")  # any launch fails
    monkeypatch.setenv("FAKE_DEVICE_ELSEWHERE", "1")
    for call in (
        lambda: engine.allreduce(array, out=array),
        lambda: engine.broadcast(array),
        lambda: engine.submit_on_device(plan_id, 0, [array], 1.0),
    ):
        with pytest.raises(HvpipeError, match="should lie on this test device"):
            call()
    engine.stop()


@pytest.mark.parametrize(
    ("variable", "kind", "says"),
    [
        ("FAKE_DEVICE_FAILS", PeerError, "a launch failed"),
        # Regression: only errors of hvpipe's own ended the engine, and the peers waited for the bucket.
        ("FAKE_DEVICE_NO_HOST_MEMORY", HvpipeError, "Out of host memory on this rank"),
    ],
)
def test_a_bucket_that_cannot_be_packed_ends_the_engine(
    libraries: Libraries, monkeypatch: Any, variable: str, kind: type[Exception], says: str
) -> None:
    device = ctypes.CDLL(libraries.device)
    held = device.things_held()
    engine = open_engine(libraries, "host")
    engine.use_device()
    plan_id = engine.add_plan("a", plan_buckets([Gradient("a", (3,), "float32")], 16_000), on_device=True)
    engine.native.begin_step(plan_id, 0, 1.0, True)
    monkeypatch.setenv(variable, "1")
    array = OnDevice(np.ones(3, np.float32))
    for call in (
        lambda: engine.submit_on_device(plan_id, 0, [array], 1.0),
        lambda: engine.collect_on_device(plan_id, 0, [array]),
    ):
        with pytest.raises(kind, match=says):
            call()
    engine.stop()
    engine.native = None
    assert device.things_held() > held  # the engine keeps what messages may still use


def test_a_failed_nccl_finalize_is_an_error_of_stop(libraries: Libraries, monkeypatch: Any) -> None:
    needs_others()
    engine = open_engine(libraries, "NCCL")
    engine.use_device()
    monkeypatch.setenv("FAKE_NCCL", "finalize")
    with pytest.raises(PeerError, match="ncclCommFinalize: remote process exited"):
        engine.stop()
    engine.native = None  # deleting it raises nothing


def test_a_missing_device_library_is_named(libraries: Libraries) -> None:
    engine = open_engine(libraries, "host", device_library="libnowhere.so")
    array = OnDevice(np.ones(3, np.float32))
    with pytest.raises(HvpipeError, match=r"hvpipe's GPU library does not load.*libnowhere"):
        engine.allreduce(array, out=array)
    engine.stop()


def test_hvpipes_own_library_reports_a_missing_driver(libraries: Libraries) -> None:
    from hvpipe.environment.native import native_directory

    own = native_directory() / "libhvpipe_cuda.so"
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is a GPU")
    engine = open_engine(libraries, "host", device_library=str(own))
    with pytest.raises(HvpipeError, match=r"No CUDA device can be used: .*(there is no|Received: a) driver"):
        engine.use_device()
    engine.stop()
