"""Device arrays sent from one rank to another, and summed over groups.

The device and NCCL are fakes (tests/support/native).
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hvpipe
from arrays import DTYPES
from devices import WAYS, Libraries, OnDevice, needs_others, open_engine, open_impatient, values_of
from hvpipe.engine.engine import EngineClient
from hvpipe.errors import DeadlineError, HvpipeError, MismatchError, PeerError

COUNTS = (0, 1, 5, 4097, 100_000)


@pytest.fixture(params=WAYS, scope="module")
def engine(request: Any, libraries: Libraries) -> Iterator[EngineClient]:
    needs_others()
    opened = open_engine(libraries, request.param)
    opened.use_device()
    yield opened
    opened.agree("end of the cases")
    opened.stop()


def empty(count: int, dtype: str = "float32") -> OnDevice:
    return OnDevice(np.full(count, np.nan).astype(DTYPES[dtype]))


def sent_by(rank: int, tag: int) -> Any:
    """Return the array that `rank` sends with a tag. Each pair has its own length and numbers."""
    return values_of(100 * rank + tag, COUNTS[(rank + tag) % len(COUNTS)], "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_go_around_the_ring(engine: EngineClient, dtype: str) -> None:
    rank, size = hvpipe.rank(), hvpipe.size()
    before = (rank - 1) % size
    for count in COUNTS:
        out = empty(count, dtype)
        received = engine.receive_on_device(out, before, 0, "a message")
        sent = engine.send(OnDevice(values_of(rank, count, dtype)), (rank + 1) % size, 0, "a message")
        received.wait()
        sent.wait()
        np.testing.assert_array_equal(out.values, values_of(before, count, dtype))


def test_an_nccl_before_2_27_gets_no_second_communicator(libraries: Libraries) -> None:
    needs_others()
    older = open_engine(libraries, "NCCL", nccl_library=libraries.old_nccl)
    assert re.match(r"by NCCL 2\.22\.3; a pipeline's tensors through the host", older.use_device())
    assert (older.nccl_connects_all, older.messages_by_nccl) == (True, False)
    rank, size = hvpipe.rank(), hvpipe.size()
    out = empty(5)
    received = older.receive_on_device(out, (rank - 1) % size, 0, "a message")
    older.send(OnDevice(values_of(rank, 5, "float32")), (rank + 1) % size, 0, "a message").wait()
    received.wait()
    np.testing.assert_array_equal(out.values, values_of((rank - 1) % size, 5, "float32"))
    total = OnDevice(np.ones(5, np.float32))
    request = older.post_group_reduce(older.add_group(range(size)), 5, "float32", "a sum")
    older.send_posted(request.number, total)
    request.wait()
    older.take_posted(request.number, total)
    np.testing.assert_array_equal(total.values, size)
    older.agree("end of a case")
    older.stop()


@pytest.mark.parametrize("first", ["sends", "receives"])
def test_all_send_to_all_in_any_order(engine: EngineClient, first: str) -> None:
    """Every rank sends to all others with many tags, and receives in an order of its own."""
    rank, size, tags = hvpipe.rank(), hvpipe.size(), 12
    pairs = [(other, tag) for other in range(size) if other != rank for tag in range(tags)]
    order = np.random.default_rng(rank)
    outs = {pair: empty(len(sent_by(*pair))) for pair in pairs}
    requests = []

    def send() -> None:
        for other, tag in order.permutation(pairs).tolist():
            requests.append(engine.send(OnDevice(sent_by(rank, tag)), other, tag, f"message {tag}"))

    def receive() -> None:
        for other, tag in order.permutation(pairs).tolist():
            requests.append(engine.receive_on_device(outs[other, tag], other, tag, f"message {tag}"))

    for work in (send, receive) if first == "sends" else (receive, send):
        work()
    for request in requests:
        request.wait()
    for pair, out in outs.items():
        np.testing.assert_array_equal(out.values, sent_by(*pair))


def test_messages_of_one_tag_keep_their_order(engine: EngineClient) -> None:
    rank, size = hvpipe.rank(), hvpipe.size()
    outs = [empty(9) for _ in range(5)]
    requests = [engine.receive_on_device(out, (rank - 1) % size, 3, "a message") for out in outs]
    for number in range(5):
        array = OnDevice(np.full(9, number, np.float32))
        requests.append(engine.send(array, (rank + 1) % size, 3, "a message"))
    for request in requests:
        request.wait()
    assert [out.values[0] for out in outs] == [0, 1, 2, 3, 4]


def test_a_message_received_later_does_not_block_others(engine: EngineClient) -> None:
    """A message that no rank waits for yet lets later messages of other tags pass."""
    rank, size = hvpipe.rank(), hvpipe.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = [engine.send(OnDevice(np.full(7, tag, np.float32)), after, tag, "a message") for tag in (0, 1)]
    outs = [empty(7), empty(7)]
    engine.receive_on_device(outs[1], before, 1, "a message").wait()
    engine.receive_on_device(outs[0], before, 0, "a message").wait()
    for request in sent:
        request.wait()
    assert [out.values[0] for out in outs] == [0, 1]


def test_messages_between_all_reduces(engine: EngineClient) -> None:
    rank, size = hvpipe.rank(), hvpipe.size()
    out = empty(5000)
    received = engine.receive_on_device(out, (rank - 1) % size, 0, "a message")
    total = OnDevice(np.ones(3000, np.float32))
    engine.allreduce(total, op="sum", out=total)
    sent = engine.send(OnDevice(values_of(rank, 5000, "float32")), (rank + 1) % size, 0, "a message")
    engine.allreduce(total, op="average", out=total)
    received.wait()
    sent.wait()
    np.testing.assert_array_equal(out.values, values_of((rank - 1) % size, 5000, "float32"))
    np.testing.assert_array_equal(total.values, np.full(3000, size, np.float32))


def groups_of_neighbours(engine: EngineClient) -> dict[tuple[int, ...], int]:
    """Make all groups of two neighbours, and one of all ranks. Return those with this rank."""
    rank, size = hvpipe.rank(), hvpipe.size()
    wanted = sorted({*((first, first + 1) for first in range(size - 1)), tuple(range(size))})
    return {ranks: engine.add_group(ranks) for ranks in wanted if rank in ranks}


def sum_over(
    engine: EngineClient, group: int, array: OnDevice, out: OnDevice | None, what: str = "a group's sum"
) -> Callable[[], None]:
    """Start a group's sum. Return a function that waits for it; without `out`, nobody takes the sum."""
    request = engine.post_group_reduce(group, len(array), array.values.dtype.name, what)
    engine.send_posted(request.number, array)

    def wait() -> None:
        request.wait()
        if out is not None:
            engine.take_posted(request.number, out)

    return wait


def test_groups_that_overlap_sum_between_messages(engine: EngineClient) -> None:
    """A rank is in up to three groups. All sums and messages are under way at once; some ranks are late."""
    rank, size, times = hvpipe.rank(), hvpipe.size(), 6
    groups = groups_of_neighbours(engine)
    pairs = [(other, tag) for other in range(size) if other != rank for tag in range(4)]
    order = np.random.default_rng(rank)
    messages = {pair: empty(len(sent_by(*pair))) for pair in pairs}
    requests = [
        engine.receive_on_device(out, other, tag, "a message") for (other, tag), out in messages.items()
    ]
    outs, waits = {}, []
    for number, (count, dtype) in enumerate([(3_001, "float32"), (0, "float32"), (77, "float64")] * 2):
        for ranks in sorted(groups, key=lambda _: order.random()):
            array = OnDevice(values_of(100 * number + rank, count, dtype))
            outs[ranks, number] = empty(count, dtype)
            waits.append(sum_over(engine, groups[ranks], array, outs[ranks, number]))
        time.sleep(0.002 * order.random())
        for other, tag in pairs[number::times]:
            requests.append(engine.send(OnDevice(sent_by(rank, tag)), other, tag, "a message"))
    for wait in reversed(waits):
        wait()
    for request in requests:
        request.wait()
    for pair, out in messages.items():
        np.testing.assert_array_equal(out.values, sent_by(*pair))
    for (ranks, number), out in outs.items():
        wanted = sum(values_of(100 * number + member, len(out), out.values.dtype.name) for member in ranks)
        np.testing.assert_array_equal(out.values, wanted)


def test_a_sum_takes_no_device_before_all_ranks_have_data(engine: EngineClient) -> None:
    """Every rank but the first computes its summand from a message of the rank below."""
    rank, size = hvpipe.rank(), hvpipe.size()
    group = engine.add_group(range(size))
    out, array = empty(5), OnDevice(np.ones(5, np.float32))
    if rank > 0:
        engine.receive_on_device(array, rank - 1, 0, "a message").wait()
    wait = sum_over(engine, group, array, out)
    if rank < size - 1:
        time.sleep(0.02)  # the sum gets the device first, if it may
        engine.send(array, rank + 1, 0, "a message").wait()
    wait()
    np.testing.assert_array_equal(out.values, np.full(5, size, np.float32))


def test_a_sum_that_a_rank_does_not_enter_names_the_rank(libraries: Libraries) -> None:
    needs_others()
    engine = open_impatient(libraries, "NCCL", 4.0)
    ranks = tuple(range(hvpipe.size()))
    group, late = engine.add_group(ranks), ranks[-1]
    array, out = OnDevice(np.ones(10, np.float32)), empty(10)
    if hvpipe.rank() != late:
        wait = sum_over(engine, group, array, out, "gradients of dense/kernel")
        with pytest.raises((DeadlineError, PeerError)) as caught:
            wait()
        if hvpipe.rank() == 0:  # its deadline comes first
            says = f"in gradients of dense/kernel for rank {late} to have its part of the sum"
            assert says in str(caught.value)
    engine.stop()


@pytest.mark.parametrize(("count", "dtype"), [(11, "float32"), (5, "float64")])
def test_sums_of_different_arrays_are_a_mismatch(libraries: Libraries, count: int, dtype: str) -> None:
    needs_others()
    engine = open_impatient(libraries, "NCCL", 4.0)
    group = engine.add_group(range(hvpipe.size()))
    other = hvpipe.rank() == 1
    array = OnDevice(np.ones(count if other else 10, dtype if other else "float32"))
    request = engine.post_group_reduce(group, len(array), array.values.dtype.name, "a group's sum")
    engine.send_posted(request.number, array)
    says = f"10 numbers of float32 on rank 0, {count} numbers of {dtype} on rank 1"
    with pytest.raises((MismatchError, DeadlineError, PeerError)) as caught:
        request.wait()
    assert says in str(caught.value) or hvpipe.rank() > 0
    engine.stop()


def test_a_sum_of_another_size_is_refused(engine: EngineClient) -> None:
    group = engine.add_group(range(hvpipe.size()))
    request = engine.post_group_reduce(group, 11, "float32", "a group's sum")
    array = OnDevice(np.ones(10, np.float32))
    with pytest.raises(HvpipeError, match="of 44 bytes, and an array of 40"):
        engine.send_posted(request.number, array)
    with pytest.raises(HvpipeError, match="Unknown group"):
        engine.post_group_reduce(99, 11, "float32", "a group's sum")
    engine.agree("end of a case")


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_behind(libraries: Libraries, way: str) -> None:
    needs_others()
    device = ctypes.CDLL(libraries.device)
    held = device.things_held()
    engine = open_engine(libraries, way)
    engine.use_device()
    test_all_send_to_all_in_any_order(engine, "sends")
    test_groups_that_overlap_sum_between_messages(engine)
    sum_over(engine, engine.add_group(range(hvpipe.size())), OnDevice(np.ones(9, np.float32)), None)()
    engine.agree("end of a case")
    engine.stop()
    engine.native = None
    assert device.things_held() == held


def test_a_message_of_another_size_is_a_mismatch(libraries: Libraries) -> None:
    needs_others()
    engine = open_impatient(libraries, "NCCL", 4.0)
    request = None
    if hvpipe.rank() == 0:
        request = engine.send(OnDevice(np.ones(10, np.float32)), 1, 0, "a message")
    elif hvpipe.rank() == 1:
        request = engine.receive_on_device(empty(11), 0, 0, "a message")
        with pytest.raises(MismatchError, match="rank 0 sends 40 bytes, rank 1 expects 44"):
            request.wait()
    if hvpipe.rank() == 0:
        with pytest.raises((DeadlineError, PeerError)):
            request.wait()
    engine.stop()


def test_a_message_that_no_rank_receives_is_an_error(libraries: Libraries) -> None:
    needs_others()
    engine = open_impatient(libraries, "NCCL", 4.0)
    if hvpipe.rank() == 0:
        request = engine.send(OnDevice(np.ones(10, np.float32)), 1, 0, "activations")
        with pytest.raises(DeadlineError, match="in activations for rank 1 to receive it into device"):
            request.wait()
    engine.stop()


@pytest.mark.parametrize(("how", "says"), [("async", "remote process exited"), ("hang", "NCCL to start it")])
def test_a_failure_in_transit_ends_the_engine(
    libraries: Libraries, monkeypatch: Any, how: str, says: str
) -> None:
    needs_others()
    engine = open_impatient(libraries, "NCCL", 4.0)
    rank, size = hvpipe.rank(), hvpipe.size()
    monkeypatch.setenv("FAKE_NCCL", how)
    received = engine.receive_on_device(empty(10), (rank - 1) % size, 0, "a message")

    def send_and_wait() -> None:
        # `send` itself raises if the engine has failed by now.
        engine.send(OnDevice(np.ones(10, np.float32)), (rank + 1) % size, 0, "a message").wait()

    told = []
    for wait in (send_and_wait, received.wait):
        with pytest.raises((PeerError, DeadlineError)) as caught:
            wait()
        told.append(str(caught.value))
    assert told[0] == told[1]
    # On some ranks the error is about the rank whose NCCL failed.
    assert any(says in text for text in hvpipe.allgather_object(told[0]))
    engine.stop()


def test_ranks_leave_in_any_order(libraries: Libraries) -> None:
    """Ranks that sent to each other in a ring close their communicators in different orders."""
    needs_others()
    device = ctypes.CDLL(libraries.device)
    held = device.things_held()
    engine = open_engine(libraries, "NCCL")
    engine.use_device()
    test_arrays_go_around_the_ring(engine, "float32")
    engine.stop()  # frees nothing if a rank waits in vain
    engine.native = None
    assert device.things_held() == held


def test_messages_need_use_device_first(libraries: Libraries) -> None:
    needs_others()
    engine = open_engine(libraries, "NCCL")
    for call in (
        lambda: engine.send(empty(3), 1 - min(hvpipe.rank(), 1), 0, "a message"),
        lambda: engine.receive_on_device(empty(3), 1 - min(hvpipe.rank(), 1), 0, "a message"),
    ):
        with pytest.raises(HvpipeError, match=r"Call use_device before using device arrays"):
            call()
    engine.stop()


def test_a_posted_message_ends_with_the_engine(libraries: Libraries) -> None:
    """A waiting request and one posted later both end with an error. Their arrays will not arrive."""
    needs_others()
    other = 1 - min(hvpipe.rank(), 1)
    for end, says in (
        (lambda engine: engine.native.fail("a reason"), "a reason"),
        (EngineClient.stop, "shut down"),
    ):
        engine = open_engine(libraries, "NCCL")
        engine.use_device()
        engine.agree("both are here")
        group = engine.add_group(range(hvpipe.size()))
        requests = [
            engine.post_send(other, 0, "a message"),
            engine.post_group_reduce(group, 10, "float32", "a group's sum"),
        ]
        engine.agree("all have posted")
        end(engine)
        for request in requests:
            with pytest.raises(HvpipeError, match=says):
                request.wait()
        with pytest.raises(HvpipeError, match=says):
            engine.post_send(other, 0, "a message")
        engine.stop()


def test_messages_of_similar_size_reuse_memory(libraries: Libraries) -> None:
    needs_others()
    device = ctypes.CDLL(libraries.device)
    engine = open_engine(libraries, "host")
    engine.use_device()
    rank, size = hvpipe.rank(), hvpipe.size()
    made = device.host_memory_allocations()
    for count in range(4000, 2000, -100):
        received = engine.receive_on_device(empty(count), (rank - 1) % size, 0, "a message")
        sent = engine.send(OnDevice(np.zeros(count, np.float32)), (rank + 1) % size, 0, "a message")
        received.wait()
        sent.wait()
    assert device.host_memory_allocations() - made <= 4
    engine.agree("end of a case")
    engine.stop()


def test_a_message_that_does_not_fit_is_an_error_with_its_bytes(
    libraries: Libraries, monkeypatch: Any
) -> None:
    needs_others()
    engine = open_engine(libraries, "host")
    engine.use_device()
    monkeypatch.setenv("FAKE_DEVICE_FULL", "1")
    with pytest.raises(
        HvpipeError,
        match=r"no free block of 42 MB for a message or a sum of some ranks: .* more micro-batches",
    ):
        engine.post_receive(39_900_000, (hvpipe.rank() + 1) % hvpipe.size(), 0, "a message")
    engine.agree("end of a case")
    engine.stop()
