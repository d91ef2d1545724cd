"""Whom ranks let in: callers that say nothing, say anything, or do not know the job's key."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from hvpipe.errors import InitError
from hvpipe.world.tcp_setup import _CALL, Setup, job_key, listen
from rank_threads import LIMIT_S

KEY = b"k" * 32
HERE = "127.0.0.1"


def setups(
    listeners: list[socket.socket], keys: list[bytes], addresses: list[tuple[str, int]] | None = None
) -> list[Setup]:
    places = addresses or [listener.getsockname() for listener in listeners]
    return [
        Setup(listener, rank, places, keys[rank], bytes([rank]) * 8, "here")
        for rank, listener in enumerate(listeners)
    ]


@contextmanager
def listening(count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(listen(HERE)) for _ in range(count)]


def outcomes(made: list[Setup], limit_s: float = LIMIT_S) -> list[Any]:
    """Run all ranks; return the processes that each has found, or its error."""

    def run(one: Setup) -> Any:
        try:
            numbers, processes = one.run(limit_s)
        except InitError as error:
            return str(error)
        for number in numbers:
            if number >= 0:
                socket.socket(fileno=number).close()
        return processes

    with ThreadPoolExecutor(len(made)) as threads:
        return list(threads.map(run, made))


@contextmanager
def calls(address: tuple[str, int], texts: list[bytes]) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection(address)) for _ in texts]
        for one, text in zip(made, texts, strict=True):
            one.sendall(text)
        yield made


def test_silent_callers_hold_nobody_up() -> None:
    """More of them than may be connected. One after another they would take longer than the time limit."""
    with listening(3) as listeners, calls(listeners[0].getsockname(), [b""] * 80):
        found = outcomes(setups(listeners, [KEY] * 3))
        assert found == [[bytes([rank]) * 8 for rank in range(3)]] * 3


def test_the_error_names_who_called_and_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvpipe.world.tcp_setup._PATIENCE_S", 0.2)
    texts = [b"", b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(100), _CALL.pack(b"hvpipe2\0", 1, 2, bytes(32))]
    with listening(1) as (listener,), calls(listener.getsockname(), texts):
        one = Setup(listener, 0, [listener.getsockname(), (HERE, 9)], KEY, bytes(8), "here")
        with pytest.raises(InitError, match=r"Rank 1 should reach rank 0 on here") as error:
            one.run(0.8)
    told = str(error.value)
    assert "no call within 0 s" in told
    assert "a call from 127.0.0.1 said nothing, 2 times" in told
    assert "a call from 127.0.0.1 spoke another program's language" in told
    assert "a call from 127.0.0.1 as rank 1 stopped in the middle" in told


def test_ranks_with_another_key_do_not_connect() -> None:
    with listening(2) as listeners:
        first, second = outcomes(setups(listeners, [KEY, b"l" * 32]), 1.0)
    assert "should reach rank 0" in second
    assert "an answer without a proof that it knows the job's key" in second
    assert "HVPIPE_SECRET must be the same on all ranks" in second
    assert "as rank 1 ended the connection" in first


def test_a_listener_proves_itself_before_a_caller_does() -> None:
    """A stranger's address in the place of rank 0's: the caller gives away nothing but a random number."""
    with listening(2) as (stranger, listener), ThreadPoolExecutor(1) as threads:
        stranger.setblocking(True)
        addresses = [stranger.getsockname(), listener.getsockname()]
        ends = threads.submit(Setup(listener, 1, addresses, KEY, bytes(8), "here").run, LIMIT_S)
        answers, _ = stranger.accept()
        with answers:
            said = answers.recv(1000)
            assert len(said) == _CALL.size
            answers.sendall(bytes(64))
            assert answers.recv(1000) == b""
        with pytest.raises(InitError, match="an answer without a proof"):
            ends.result()


def relay(stranger: socket.socket, target: tuple[str, int], ended: threading.Event) -> None:
    """Carry bytes between whoever calls the stranger and the target."""
    stranger.setblocking(True)
    caller, _ = stranger.accept()
    with caller, socket.create_connection(target) as listener:
        pairs = ((caller, listener), (listener, caller))
        for source in (caller, listener):
            source.settimeout(0.05)
        while not ended.is_set():
            for source, sink in pairs:
                try:
                    data = source.recv(1000)
                    if not data:
                        return
                    sink.sendall(data)
                except TimeoutError:
                    continue
                except OSError:
                    return


def test_a_stranger_between_two_ranks_is_noticed() -> None:
    """It knows no key, and passes their proofs on: but its address is another one."""
    ended = threading.Event()
    with listening(3) as (first, second, stranger), ThreadPoolExecutor(1) as threads:
        threads.submit(relay, stranger, first.getsockname(), ended)
        places = [first.getsockname(), second.getsockname()]
        ranks = [
            Setup(first, 0, places, KEY, bytes(8), "here"),
            Setup(second, 1, [stranger.getsockname(), places[1]], KEY, bytes(8), "here"),
        ]
        found = outcomes(ranks, 1.0)
        ended.set()
    assert "an answer without a proof" in found[1]
    assert "Rank 1 should reach rank 0" in found[0]


def test_proofs_of_another_connection_prove_nothing() -> None:
    """All that a rank has said to one listener is said again to it: its random number is a new one."""
    said: list[bytes] = []

    def recorded(send: Callable[..., None]) -> Callable[..., None]:
        def record(self: Setup, call: Any, message: bytes) -> None:
            if call.calls:
                said.append(message)
            send(self, call, message)

        return record

    with pytest.MonkeyPatch.context() as patch, listening(2) as listeners:
        patch.setattr(Setup, "_send", recorded(Setup._send))
        outcomes(setups(listeners, [KEY, KEY]))
    assert len(said) == 2
    with listening(1) as (listener,):
        places = [listener.getsockname(), (HERE, 9)]
        with calls(places[0], [said[0]]) as (one,):
            ends = ThreadPoolExecutor(1).submit(Setup(listener, 0, places, KEY, bytes(8), "here").run, 1.0)
            assert len(one.recv(1000)) == 64
            one.sendall(said[1])
            assert one.recv(1000) == b""  # no welcome
            with pytest.raises(InitError, match="as rank 1 did not know the job's key"):
                ends.result()


@pytest.mark.parametrize("seed", range(3))
def test_any_bytes_of_strangers_change_nothing(seed: int) -> None:
    chance = random.Random(seed)
    texts = []
    for _ in range(40):
        call = bytearray(_CALL.pack(b"hvpipe2\0", chance.choice((1, 2, 0, 7)), 3, chance.randbytes(32)))
        for _ in range(chance.randrange(3)):
            call[chance.randrange(len(call))] = chance.randrange(256)
        tail = chance.randbytes(chance.randrange(200))
        texts.append(bytes(call[: chance.randrange(len(call) + 1)] if chance.random() < 0.5 else call) + tail)
    with listening(3) as listeners, calls(listeners[chance.randrange(2)].getsockname(), texts):
        assert outcomes(setups(listeners, [KEY] * 3)) == [[bytes([rank]) * 8 for rank in range(3)]] * 3


def test_a_rank_that_was_pushed_out_calls_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one stranger may be connected, and they keep coming."""
    monkeypatch.setattr("hvpipe.world.tcp_setup._MOST_STRANGERS", -1)
    ended = threading.Event()

    def flood(address: tuple[str, int]) -> None:
        while not ended.wait(0.02):
            try:
                socket.create_connection(address, timeout=1).close()
            except OSError:
                return

    with listening(2) as listeners, ThreadPoolExecutor(1) as threads:
        threads.submit(flood, listeners[0].getsockname())
        found = outcomes(setups(listeners, [KEY] * 2))
        ended.set()
    assert found == [[bytes(8), b"\1" * 8]] * 2


def test_ports() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(listen(HERE))
        port = first.getsockname()[1]
        with pytest.raises(InitError, match=rf"a free port for each rank.*HVPIPE_PORTS={port}-{port} at 127"):
            listen(HERE, range(port, port + 1))
        found = []
        for _ in range(2):
            one = stack.enter_context(listen(HERE, range(42_610, 42_700)))
            found.append(one.getsockname()[1])
        assert len(set(found)) == 2
        assert all(42_610 <= each < 42_700 for each in found)


def test_keys() -> None:
    assert len({job_key(secret, token) for secret in (b"", b"a") for token in ("", "b")}) == 4
