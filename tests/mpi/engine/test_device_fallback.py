"""GPUs or NCCL that some rank cannot use: all ranks take the route through the host, and one of them says so.

The device and NCCL are fakes (tests/support/native).
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import pytest

import hvpipe
from devices import Libraries, OnDevice, needs_others, open_engine, values_of
from hvpipe.engine.engine import EngineClient
from hvpipe.errors import HvpipeError, PeerError
from hvpipe.plan.buckets import Gradient, plan_buckets
from hvpipe.session import current

LAST = -1
"""The last rank."""


def is_rank(wanted: int) -> bool:
    return hvpipe.rank() == wanted % hvpipe.size()


def last() -> int:
    return hvpipe.size() - 1


@pytest.fixture
def warnings(caplog: Any) -> Any:
    """Return a function that returns what hvpipe has warned of."""
    return lambda: [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def assert_trains_through_the_host(engine: EngineClient) -> None:
    """Reduce a bucket of host memory, as TensorFlow's gradients then are."""
    plan = plan_buckets([Gradient("a", (300,), "float32")], 16_000)
    plan_id = engine.add_plan("through the host", plan)
    engine.native.begin_step(plan_id, 0, 1.0, True)
    engine.native.submit(plan_id, 0, [values_of(hvpipe.rank(), 300, "float32")], 1.0)
    total = np.empty(300, np.float32)
    engine.native.collect(plan_id, 0, [total])
    np.testing.assert_array_equal(total, sum(values_of(r, 300, "float32") for r in range(hvpipe.size())))
    engine.agree("end of a case")
    engine.stop()


@pytest.mark.parametrize("broken", ["one rank", "all ranks"])
def test_a_gpu_that_does_not_open_is_used_on_no_rank(
    libraries: Libraries, monkeypatch: Any, warnings: Any, broken: str
) -> None:
    device = ctypes.CDLL(libraries.device)
    held = device.things_held()
    engine = open_engine(libraries, "NCCL", nccl_library="")
    if broken == "all ranks" or is_rank(LAST):
        monkeypatch.setenv("FAKE_DEVICE_BROKEN", "the driver is too old: update it")
    assert not engine.use_gpus_of_all(hvpipe.local_rank())
    assert not engine.use_gpus_of_all(hvpipe.local_rank())
    assert device.things_held() == held
    said = warnings()
    assert len(said) == (hvpipe.rank() == 0)
    first = 0 if broken == "all ranks" else last()
    assert all(f"Received: rank {first} on " in text and "too old: update it" in text for text in said)
    assert all("through ordinary host memory" in text for text in said)
    assert_trains_through_the_host(engine)


def test_a_named_nccl_makes_it_an_error_on_all_ranks(libraries: Libraries, monkeypatch: Any) -> None:
    engine = open_engine(libraries, "NCCL")
    if is_rank(LAST):
        monkeypatch.setenv("FAKE_DEVICE_BROKEN", "the driver is too old")
    for _ in range(2):
        with pytest.raises(
            HvpipeError, match=rf"HVPIPE_NCCL_LIBRARY.*rank {last()} on \S+: the driver is too old"
        ):
            engine.use_gpus_of_all(hvpipe.local_rank())
    with pytest.raises(HvpipeError, match=rf"Every rank should open its GPU.*rank {last()} on"):
        engine.use_device()
    assert_trains_through_the_host(engine)


def test_ranks_of_which_some_see_a_gpu_use_none(libraries: Libraries, warnings: Any) -> None:
    needs_others()
    engine = open_engine(libraries, "NCCL", nccl_library="")
    assert not engine.use_gpus_of_all(None if is_rank(1) else hvpipe.local_rank())
    said = warnings()
    assert len(said) == (hvpipe.rank() == 0)
    assert all(f"Received: ranks 1 of {hvpipe.size()} have no GPU" in text for text in said)
    assert_trains_through_the_host(engine)


def test_a_job_without_gpus_says_nothing(libraries: Libraries, warnings: Any) -> None:
    engine = open_engine(libraries, "NCCL")
    assert not engine.use_gpus_of_all(None)
    assert warnings() == []
    assert_trains_through_the_host(engine)


def test_ranks_that_cannot_have_a_gpu_do_not_meet(warnings: Any) -> None:
    """Regression guard: one more optimizer on a rank is no disagreement in a job without GPUs."""
    engine = current().engine
    if engine.native is None:
        pytest.skip("one rank without MPI has no C++ engine")
    if hvpipe.rank() == 0:
        assert not engine.use_gpus_of_all(None)
    engine.agree("the end of a case")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("id", "ncclGetUniqueId: unhandled cuda error"),
        ("init", "ncclCommInitRankConfig: unhandled cuda error"),
        ("collective", ": unhandled cuda error"),
        ("init-hang", "s for NCCL: joining"),
    ],
)
def test_an_nccl_that_does_not_start_is_used_on_no_rank(
    libraries: Libraries, monkeypatch: Any, warnings: Any, how: str, says: str
) -> None:
    """The other ranks do not wait for the one where it fails."""
    needs_others()
    monkeypatch.setattr("hvpipe.engine.rank_gpu.find_nccl", lambda named: named or libraries.nccl)
    engine = open_engine(libraries, "NCCL", nccl_library="", timeout_s=10.0 if how == "init-hang" else 60.0)
    failing = 0 if how == "id" else 1
    if how == "init-hang" or hvpipe.rank() == failing:
        monkeypatch.setenv("FAKE_NCCL", how)
    start = time.monotonic()
    assert engine.use_gpus_of_all(hvpipe.local_rank())
    assert time.monotonic() - start < 20
    monkeypatch.delenv("FAKE_NCCL", raising=False)
    route = engine.use_device()
    assert route.startswith("through the host: NCCL did not start on rank")
    assert says in route
    assert len([text for text in warnings() if says in text]) == (hvpipe.rank() == 0)
    array = OnDevice(values_of(hvpipe.rank(), 1000, "float32"))
    engine.allreduce(array, op="sum", out=array)
    np.testing.assert_array_equal(
        array.values, sum(values_of(r, 1000, "float32") for r in range(hvpipe.size()))
    )
    assert_trains_through_the_host(engine)


def test_a_named_nccl_that_does_not_start_is_an_error_on_all_ranks(
    libraries: Libraries, monkeypatch: Any
) -> None:
    needs_others()
    engine = open_engine(libraries, "NCCL")
    if hvpipe.rank() == 1:
        monkeypatch.setenv("FAKE_NCCL", "init")
    with pytest.raises(PeerError, match=r"ncclCommInitRankConfig: unhandled cuda error"):
        engine.use_device()
    monkeypatch.delenv("FAKE_NCCL", raising=False)
    assert_trains_through_the_host(engine)


def test_an_nccl_that_one_rank_lacks_is_used_on_no_rank(libraries: Libraries, monkeypatch: Any) -> None:
    needs_others()
    mine = "libnccl-that-is-nowhere.so.2" if is_rank(LAST) else libraries.nccl
    monkeypatch.setattr("hvpipe.engine.rank_gpu.find_nccl", lambda _: mine)
    engine = open_engine(libraries, "NCCL", nccl_library="")
    route = engine.use_device()
    assert route.startswith(f"through the host: rank {last()} on ")
    assert "NCCL does not load" in route
    assert_trains_through_the_host(engine)
