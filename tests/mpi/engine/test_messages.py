"""Messages between two ranks, and all-reduces over groups of ranks, on any number of ranks."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest

import hvpipe
from hvpipe.engine.engine import EngineClient
from hvpipe.errors import HvpipeError
from hvpipe.session import current


@pytest.fixture
def engine() -> EngineClient:
    """Return the engine. Skip the case if there is no other rank."""
    if hvpipe.size() == 1:
        pytest.skip("one rank has nobody to send to")
    return current().engine


@pytest.mark.parametrize("count", [0, 1, 60_000, 60_001, 1_000_003])
def test_a_message_arrives_as_it_was_sent(engine: EngineClient, count: int) -> None:
    rank, size = hvpipe.rank(), hvpipe.size()
    sent = np.random.default_rng(rank).integers(0, 255, count, np.uint8)
    request = engine.receive(count, (rank - 1) % size, 5, "the test's message")
    done = engine.send(sent, (rank + 1) % size, 5, "the test's message")
    request.wait()
    done.wait()
    expected = np.random.default_rng((rank - 1) % size).integers(0, 255, count, np.uint8)
    np.testing.assert_array_equal(request.arrived(), expected)
    assert request.done


def test_many_messages_at_once_are_not_mixed_up(engine: EngineClient) -> None:
    """Every rank sends ten messages to every other before any is expected. Receives reverse the tags."""
    rank, size = hvpipe.rank(), hvpipe.size()
    peers = [peer for peer in range(size) if peer != rank]
    sends = [
        engine.send(np.full(70_000, 1000 * rank + 10 * peer + tag, np.int32), peer, tag, f"message {tag}")
        for tag in range(10)
        for peer in peers
    ]
    receives = {
        (peer, tag): engine.receive(280_000, peer, tag, f"message {tag}")
        for tag in reversed(range(10))
        for peer in peers
    }
    for (peer, tag), request in receives.items():
        request.wait()
        assert set(request.arrived().view(np.int32)) == {1000 * peer + 10 * rank + tag}
    for request in sends:
        request.wait()


def test_a_thread_that_holds_the_interpreter_does_not_stop_communication(engine: EngineClient) -> None:
    """Regression: a blocking call waited for the interpreter's lock, and nothing moved on its rank."""
    hold_s, times = 3, {}
    sent = np.arange(1_000_000, dtype=np.uint8)

    def hold() -> None:
        time.sleep(0.2)
        ctypes.PyDLL(None).sleep(hold_s)  # PyDLL keeps the lock
        times["released"] = time.monotonic()

    if hvpipe.rank() == 0:
        request = engine.receive(sent.nbytes, 1, 5, "a message in many pieces")
        holder = threading.Thread(target=hold)
        holder.start()
        engine.agree("after the message")
        holder.join()
        np.testing.assert_array_equal(request.arrived(), sent)
    else:
        if hvpipe.rank() == 1:
            time.sleep(0.6)
            engine.send(sent, 0, 5, "a message in many pieces").wait()
        times["sent"] = time.monotonic()
        engine.agree("after the message")
    released_s, sent_s, *_ = engine.agree("the times", next(iter(times.values())))
    assert sent_s < released_s - 0.5


def test_messages_of_one_tag_keep_their_order(engine: EngineClient) -> None:
    """Each message has more segments than may be in flight at once."""
    rank, size = hvpipe.rank(), hvpipe.size()
    count = 5_000_000
    receives = [engine.receive(count, (rank - 1) % size, 0, f"message {i}") for i in range(6)]
    sends = [engine.send(np.full(count, i, np.uint8), (rank + 1) % size, 0, "message") for i in range(6)]
    for request in [*sends, *receives]:
        request.wait()
    for i, request in enumerate(receives):
        np.testing.assert_array_equal(request.arrived(), np.full(count, i, np.uint8))


def test_received_data_outlives_its_request(engine: EngineClient) -> None:
    rank, size = hvpipe.rank(), hvpipe.size()
    request = engine.receive(100, (rank - 1) % size, 1, "message")
    engine.send(np.arange(100, dtype=np.uint8), (rank + 1) % size, 1, "message").wait()
    request.wait()
    arrived = request.arrived()
    del request
    np.testing.assert_array_equal(arrived, np.arange(100))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_group_sums_among_its_members(engine: EngineClient, dtype: str) -> None:
    """All but the last rank are in one group. All ranks together then run a collective of their own."""
    rank, size = hvpipe.rank(), hvpipe.size()
    members = list(range(size - 1)) if size > 2 else [0, 1]
    mine = np.full(150_001, rank + 1, dtype)
    if rank in members:
        group = engine.add_group(members)
        first = engine.group_allreduce(group, mine, "a group's sum")
        other = np.full(3, 10.0, dtype)
        second = engine.group_allreduce(group, other, "a group's second sum")
        second.wait()
        first.wait()
        np.testing.assert_array_equal(mine, sum(member + 1 for member in members))
        np.testing.assert_array_equal(other, 10.0 * len(members))
    assert hvpipe.allreduce(np.ones(3, np.float32), op="sum")[0] == size


@pytest.mark.parametrize(("peer", "tag", "says"), [(-1, 0, "peer"), (99, 0, "peer"), (None, -1, "tag")])
def test_wrong_peers_and_tags_are_refused(
    engine: EngineClient, peer: int | None, tag: int, says: str
) -> None:
    to = (hvpipe.rank() + 1) % hvpipe.size() if peer is None else peer
    with pytest.raises(HvpipeError, match=says):
        engine.send(np.zeros(3), to, tag, "message")


def test_a_group_without_this_rank_is_refused(engine: EngineClient) -> None:
    with pytest.raises(HvpipeError, match="ascending"):
        engine.add_group([(hvpipe.rank() + 1) % hvpipe.size(), 99])


def test_messages_that_are_not_expected_yet_block_no_others(engine: EngineClient) -> None:
    rank, size = hvpipe.rank(), hvpipe.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    early = [engine.send(np.full(300_000, i, np.uint8), right, 100 + i, "early") for i in range(20)]
    request = engine.receive(8, left, 7, "late but first")
    engine.send(np.arange(8, dtype=np.uint8), right, 7, "late but first").wait()
    request.wait()
    for i in reversed(range(20)):
        expected = engine.receive(300_000, left, 100 + i, "early")
        expected.wait()
        assert set(expected.arrived()) == {i}
    for sent in early:
        sent.wait()
