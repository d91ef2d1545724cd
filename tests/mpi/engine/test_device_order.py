"""What streams of a device wait for. The fake device runs work as late as CUDA allows (tests/support/native).

So after a forgotten wait, work reads what is not written yet, or what is already written over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hvpipe
from devices import WAYS, Libraries, OnDevice, needs_others, open_engine, values_of, wait_until
from hvpipe.engine.engine import EngineClient
from hvpipe.plan.buckets import Gradient, plan_buckets

MADE_ON, USED_ON = 11, 12  # two streams
# Two buckets in memory of NCCL. The one of two gradients has a gap between them.
MODEL = [Gradient(f"of {count}", (count,), "float32") for count in (1_000, 300_001, 500_000)]


@pytest.fixture(params=WAYS, scope="module")
def device_engine(request: Any, libraries: Libraries) -> Iterator[EngineClient]:
    engine = open_engine(libraries, request.param)
    engine.use_device()
    yield engine
    engine.agree("end of the cases")
    engine.stop()


def empty(count: int, stream: int = MADE_ON) -> OnDevice:
    return OnDevice(np.full(count, np.nan, np.float32), stream)


def sum_of(count: int, step: int = 0) -> Any:
    return sum(values_of(rank + step, count, "float32") for rank in range(hvpipe.size()))


def take_steps(
    engine: EngineClient, name: str, steps: int, on_stream: bool = False, model: list[Gradient] = MODEL
) -> tuple[int, list[list[OnDevice]]]:
    """Train steps with gradients of one stream and sums for another. Return the plan and each step's sums.

    Nothing has read the sums yet, so their stream has not unpacked them.
    """
    plan = plan_buckets(model, 2_000_000)
    plan_id = engine.add_plan(name, plan, on_device=True)
    sums: list[list[OnDevice]] = []
    for step in range(steps):
        engine.native.begin_step(plan_id, step, 1.0, True)
        for index, bucket in enumerate(plan.buckets):
            gradients = [values_of(hvpipe.rank() + step, count, "float32") for count in bucket.counts]
            engine.submit_on_device(plan_id, index, [OnDevice(g, MADE_ON) for g in gradients], 1.0)
        sums.append([])
        for index, bucket in enumerate(plan.buckets):
            outs = [empty(count, USED_ON) for count in bucket.counts]
            engine.collect_on_device(plan_id, index, outs, on_stream)
            sums[-1] += outs
    return plan_id, sums


@pytest.mark.parametrize("on_stream", [False, True])
def test_a_bucket_is_packed_again_after_its_sum_was_read(
    device_engine: EngineClient, on_stream: bool
) -> None:
    _, steps = take_steps(device_engine, f"several streams {on_stream}", 5, on_stream)
    for step, sums in enumerate(steps):
        for out in sums:
            np.testing.assert_array_equal(out.values, sum_of(len(out), step))


def test_nccl_scatters_as_backward_goes_and_gathers_as_forward_goes(libraries: Libraries) -> None:
    needs_others()
    engine = open_engine(libraries, "NCCL")
    engine.use_device()
    calls = ctypes.CDLL(libraries.nccl).fake_nccl_calls
    calls.restype = ctypes.c_char_p
    calls()  # those of other cases
    _, (sums,) = take_steps(engine, "in order", 1)
    assert [len(out) for out in sums] == [500_000, 300_001, 1_000]
    made = [call.decode().split(":") for call in calls().split()]
    last, first = made[0][1], made[1][1]  # the first layers are in the second bucket
    assert int(last) > int(first)
    assert made == [["scatter", last], ["scatter", first], ["gather", first], ["gather", last]]
    engine.agree("end of a case")
    engine.stop()


def late_sum(engine: EngineClient, step: int = 0) -> OnDevice:
    """Return an array into which its stream has still to unpack the sum of all ranks."""
    _, sums = take_steps(engine, "late", step + 1, model=[Gradient("one", (5_000,), "float32")])
    return sums[-1][0]


def test_an_all_reduce_waits_for_the_stream_of_its_array(device_engine: EngineClient) -> None:
    array = late_sum(device_engine)
    device_engine.allreduce(array, op="sum", out=array)
    np.testing.assert_array_equal(array.values, sum_of(len(array)) * np.float32(hvpipe.size()))


def test_a_broadcast_waits_for_the_stream_of_its_array(device_engine: EngineClient) -> None:
    array = late_sum(device_engine)
    if hvpipe.rank() == 0:
        array = OnDevice(values_of(77, len(array), "float32"))
    device_engine.broadcast(array)
    np.testing.assert_array_equal(array.values, values_of(77, len(array), "float32"))


def test_a_message_is_sent_after_the_work_on_its_stream(device_engine: EngineClient) -> None:
    needs_others()
    rank, size = hvpipe.rank(), hvpipe.size()
    array = late_sum(device_engine)
    out = empty(len(array))
    requests = [
        device_engine.receive_on_device(out, (rank - 1) % size, 0, "a message"),
        device_engine.send(array, (rank + 1) % size, 0, "a message"),
    ]
    for request in requests:
        request.wait()
    np.testing.assert_array_equal(out.values, sum_of(len(out)))


def test_a_message_is_received_after_the_work_on_its_stream(device_engine: EngineClient) -> None:
    needs_others()
    rank, size = hvpipe.rank(), hvpipe.size()
    array = late_sum(device_engine)
    sent = OnDevice(values_of(100 + rank, len(array), "float32"))
    requests = [
        device_engine.receive_on_device(array, (rank - 1) % size, 0, "a message"),
        device_engine.send(sent, (rank + 1) % size, 0, "a message"),
    ]
    for request in requests:
        request.wait()
    wanted = values_of(100 + (rank - 1) % size, len(array), "float32")
    np.testing.assert_array_equal(array.values, wanted)


def test_a_group_sums_after_the_work_on_an_arrays_stream(device_engine: EngineClient) -> None:
    """What is sent is written late, and the sum is read late."""
    needs_others()
    size = hvpipe.size()
    group = device_engine.add_group(range(size))
    outs = []
    for step in range(3):
        array = late_sum(device_engine, step)
        request = device_engine.post_group_reduce(group, len(array), "float32", "a group's sum")
        device_engine.send_posted(request.number, array)
        outs.append(empty(len(array)))
        request.wait()
        device_engine.take_posted(request.number, outs[-1])
    for step, out in enumerate(outs):
        np.testing.assert_array_equal(out.values, sum_of(len(out), step) * np.float32(size))


def test_memory_of_a_posted_message_is_used_again_after_it_was_read(device_engine: EngineClient) -> None:
    needs_others()
    rank, size, count = hvpipe.rank(), hvpipe.size(), 4_000
    outs = [empty(count) for _ in range(4)]
    for number, out in enumerate(outs):
        received = device_engine.post_receive(4 * count, (rank - 1) % size, 5, "a message")
        sent = device_engine.post_send((rank + 1) % size, 5, "a message")
        array = OnDevice(values_of(100 * number + rank, count, "float32"), MADE_ON)
        device_engine.send_posted(sent.number, array)
        received.wait()
        device_engine.take_posted(received.number, out)
        sent.wait()
    for number, out in enumerate(outs):
        wanted = values_of(100 * number + (rank - 1) % size, count, "float32")
        np.testing.assert_array_equal(out.values, wanted)


def test_a_removed_plan_ends_after_its_sums_were_read(
    device_engine: EngineClient, libraries: Libraries
) -> None:
    device = ctypes.CDLL(libraries.device)
    held = device.things_held()
    plan_id, (sums,) = take_steps(device_engine, "removed", 1)
    device_engine.remove_plan(plan_id)
    wait_until(lambda: device.things_held() <= held)
    assert device.things_held() == held
    for out in sums:
        np.testing.assert_array_equal(out.values, sum_of(len(out)))


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_ends_after_its_sums_were_read(libraries: Libraries, way: str) -> None:
    device = ctypes.CDLL(libraries.device)
    held = device.things_held()
    engine = open_engine(libraries, way)
    engine.use_device()
    _, sums = take_steps(engine, "the last step", 2)
    engine.agree("end of a case")
    engine.stop()
    engine.native = None
    assert device.things_held() == held
    for out in sums[-1]:
        np.testing.assert_array_equal(out.values, sum_of(len(out), 1))
