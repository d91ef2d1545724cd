"""The world over Horovod, with a stand-in for a Horovod of one rank. tests/peers has the real one."""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from hvpipe.comm.discover import Launch
from hvpipe.comm.horovod import HorovodWorld, open_world
from hvpipe.comm.native import import_native
from hvpipe.comm.settings import Settings
from hvpipe.errors import DeadlineError, HvpipeError, InitError

NAMES: list[str] = []


def _reduced(x: Any, *, name: str, prescale_factor: float, postscale_factor: float, **_: Any) -> Any:
    NAMES.append(name)
    return tf.identity(x * prescale_factor * postscale_factor, name=name)


def _same(x: Any, *_: Any, name: str, **__: Any) -> Any:
    NAMES.append(name)
    return tf.identity(x, name=name)


@pytest.fixture
def hvd(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Return the part of Horovod's module that hvpipe uses, for one rank."""
    monkeypatch.setitem(sys.modules, "horovod", types.SimpleNamespace(__version__="0.28.1"))  # type: ignore[misc]
    ops = types.SimpleNamespace(_allreduce=_reduced, allgather=_same, broadcast=_same)
    NAMES.clear()
    return types.SimpleNamespace(
        tf=tf,
        mpi_ops=ops,
        global_process_set=None,
        Sum="sum",
        **{name: lambda value=value: value for name, value in (("rank", 0), ("size", 1))},
        **{name: lambda value=value: value for name, value in (("local_rank", 0), ("local_size", 1))},
        mpi_enabled=lambda: False,
    )


@pytest.fixture
def world(hvd: Any) -> Iterator[HorovodWorld]:
    made = HorovodWorld(hvd, Settings(timeout_s=1.0))
    yield made
    made.close()


def test_objects_and_description(world: HorovodWorld) -> None:
    assert world.library_version == "Horovod 0.28.1 on Gloo"
    assert world.allgather_object({"a": [1]}) == [{"a": [1]}]
    assert world.gather_object("x") == ["x"]
    assert world.broadcast_object(("y", 2)) == ("y", 2)
    assert world.clock_offset_s() == 0.0
    world.barrier()
    with pytest.raises(HvpipeError, match=r"root should be a rank, 0 to 0\. Received: root=1"):
        world.broadcast_object(1, root=1)


def test_a_wait_has_a_deadline(world: HorovodWorld, hvd: Any) -> None:
    never = threading.Event()
    hvd.mpi_ops.allgather = lambda x, **_: tf.py_function(lambda y: (never.wait(5), y)[1], [x], x.dtype)
    with pytest.raises(DeadlineError, match=r"Rank 0 of 1 .* waited for the barrier.* within 1 s"):
        world.barrier()
    never.set()


def test_the_queue_runs_calls_by_name(world: HorovodWorld) -> None:
    """Names keep no character that TensorFlow refuses, and nothing before the last slash counts."""
    calls = world.make_named_calls(Settings())
    import_native().set_default_named_calls(calls)
    try:
        calls.barrier("a name/with: signs", 0)
    finally:
        import_native().set_default_named_calls(None)
        calls.stop()
    assert [name.rpartition("/")[2] for name in NAMES] == [
        "hvpipe.allgather.barrier.a_20_name_2f_with_3a__20_signs"
    ]


def test_a_failed_call_is_an_error_of_its_caller(world: HorovodWorld, hvd: Any) -> None:
    def fail(_: Any, **__: Any) -> Any:
        raise RuntimeError("Horovod has been shut down")

    hvd.mpi_ops.allgather = fail
    calls = world.make_named_calls(Settings())
    with pytest.raises(HvpipeError, match=r"Horovod's barrier named b failed: Horovod has been shut down"):
        calls.barrier("b", 0)
    calls.stop()


@pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="Horovod is installed")
def test_without_horovod_the_error_says_how_to_get_it() -> None:
    with pytest.raises(InitError, match=r"pip install 'hvpipe\[horovod\]'.*Received: ModuleNotFoundError"):
        open_world(Launch("horovodrun", 0, 2, 0, 2), Settings())
