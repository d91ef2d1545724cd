"""Ranks over TCP, each on a thread. tests/test_mpi.py runs the cases of mpi/ over TCP, too."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stores import open_store

from hvpipe.engine.engine import EngineClient
from hvpipe.environment.discover import Launch
from hvpipe.environment.settings import Settings
from hvpipe.errors import DeadlineError, HvpipeError, InitError, PeerError
from hvpipe.world import tcp
from hvpipe.world.rendezvous import Rendezvous
from hvpipe.world.shared_memory import shared_file
from hvpipe.world.tcp import TcpWorld, connect_mesh, own_address
from rank_threads import LIMIT_S, Together


@pytest.fixture
def store() -> Iterator[tuple[str, int]]:
    """Return the host and the port of a store."""
    with open_store() as place:
        yield place


def join(together: Together, rank: int, size: int, timeout_s: float = LIMIT_S) -> TcpWorld:
    """Return the world of one rank. All ranks call it, each on a thread of its own."""
    mesh = connect_mesh(rank, "127.0.0.1", lambda mine: together.exchange(rank, mine), LIMIT_S)
    return TcpWorld(mesh, Launch("horovodrun", rank, size, rank, size), "here", timeout_s)


def on_ranks(size: int, act: Callable[[TcpWorld], Any], timeout_s: float = LIMIT_S) -> list[Any]:
    """Run `act` with the world of each rank, on a thread for each. Return what they return, by rank."""
    together = Together(size)

    def run(rank: int) -> Any:
        world = join(together, rank, size, timeout_s)
        try:
            return act(world)
        finally:
            world.close()

    with ThreadPoolExecutor(size) as threads:
        return [each.result(timeout=60) for each in [threads.submit(run, rank) for rank in range(size)]]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_objects_travel(size: int) -> None:
    large = b"x" * 3_000_000  # more than the kernel holds

    def act(world: TcpWorld) -> None:
        everyone = world.allgather_object({"rank": world.rank, "large": large})
        assert everyone == [{"rank": rank, "large": large} for rank in range(size)]
        assert abs(world.clock_offset_s()) < 1.0

    on_ranks(size, act)


def test_a_rank_that_takes_no_part_is_waited_for_until_the_deadline() -> None:
    def act(world: TcpWorld) -> str:
        if world.rank == 1:
            time.sleep(1.0)  # keeps its connection meanwhile
            return ""
        with pytest.raises(DeadlineError) as error:
            world.allgather_object(None)
        return str(error.value)

    assert "Waited for the object of rank 1" in on_ranks(2, act, timeout_s=0.3)[0]


def test_a_rank_that_has_ended_is_named() -> None:
    def act(world: TcpWorld) -> str:
        if world.rank == 1:
            return ""
        with pytest.raises(PeerError) as error:
            world.allgather_object(None)
        return str(error.value)

    assert "Lost connection to rank 1" in on_ranks(2, act)[0]


def test_a_child_of_fork_holds_no_connection_open() -> None:
    """Otherwise nobody would notice that its parent has ended."""
    together = Together(2)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda rank: join(together, rank, 2), range(2))
    tells, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            second.leave_to_parent()
            with pytest.raises(HvpipeError, match="a call of send in a forked child"):
                second.allgather_object(None)
            os.write(told, b"ready")
            time.sleep(60)  # until the parent ends it
        finally:
            os._exit(0)
    try:
        assert os.read(tells, 5) == b"ready"
        second._mesh = None  # closes its sockets as the end of a process does
        began_s = time.monotonic()
        with pytest.raises(PeerError, match="Lost connection to rank 1"):
            first.allgather_object(None)
        assert time.monotonic() - began_s < LIMIT_S / 2
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(tells)
        os.close(told)
        first.close()


def test_strangers_are_not_let_in() -> None:
    """One says nothing, another one says what a rank of another job would."""
    together, calls = Together(2), []

    def exchange(rank: int, mine: Any) -> list[Any]:
        found = together.exchange(rank, mine)
        if rank == 1:
            time.sleep(0.3)  # so that the strangers come first
            return found
        for text in (b"", b"hvpipe1\0" + bytes(300)):
            calls.append(socket.create_connection((found[0][0], found[0][1]), timeout=5))
            calls[-1].sendall(text)
        return found

    with ThreadPoolExecutor(2) as threads:
        meshes = list(
            threads.map(
                lambda rank: connect_mesh(rank, "127.0.0.1", lambda m: exchange(rank, m), 15.0), (0, 1)
            )
        )
        threads.submit(meshes[0].send, b"text", [1], 5.0)
        assert meshes[1].receive(0, 5.0) == b"text"
        list(threads.map(lambda mesh: mesh.close(), meshes))
    for call in calls:
        call.close()


def test_a_rank_that_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    nobody = ["127.0.0.1", port, "token", ""]
    with pytest.raises(InitError, match=rf"reach rank 0 at 127.0.0.1, port {port}.*Connection refused"):
        connect_mesh(1, "127.0.0.1", lambda mine: [nobody, mine], 5.0)
    with pytest.raises(InitError, match=r"Rank 1 should reach rank 0 .*Received: no call within 1 s"):
        connect_mesh(0, "127.0.0.1", lambda mine: [mine, nobody], 1.0)


def test_addresses() -> None:
    assert own_address("localhost", "lo") == "127.0.0.1"
    with pytest.raises(InitError, match="The network interface nothing7 should have an address"):
        own_address("localhost", "nothing7")
    with pytest.raises(InitError, match=r"The host name no\.such\.host\.invalid should have an address"):
        own_address("no.such.host.invalid")
    with pytest.raises(InitError, match=r"should be able to listen at its address. Received: 192.0.2.1"):
        connect_mesh(0, "192.0.2.1", lambda mine: [mine], 1.0)  # of nobody: RFC 5737
    with pytest.raises(InitError, match=r"should be an IPv4 or IPv6 number. Received: localhost"):
        connect_mesh(0, "localhost", lambda mine: [mine], 1.0)


def test_the_store_of_horovodrun(store: tuple[str, int]) -> None:
    first, second = (Rendezvous(*store, scope, 0.3) for scope in ("a", "b"))
    first.put("key", [1, "two"])
    assert first.get("key", "Rank 0") == [1, "two"]
    with pytest.raises(InitError, match=r"Rank 0 should call hvpipe.init\(\) within 0.3 s"):
        second.get("key", "Rank 0")


def test_a_store_that_is_gone() -> None:
    with pytest.raises(InitError, match=r"should answer at 127.0.0.1, port 9: .*ConnectionRefusedError"):
        Rendezvous("127.0.0.1", 9, "a", 1.0).put("key", 1)


def test_ranks_join_by_the_store(store: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, because a process may call init() again."""
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", store[0])
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(store[1]))
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    monkeypatch.setattr(tcp, "_number", iter([0, 0, 0, 1, 1, 1]))

    def join(rank: int) -> list[Any]:
        world = tcp.open_world(Launch("horovodrun", rank, 3, rank, 3), Settings(timeout_s=LIMIT_S))
        everyone = world.allgather_object(rank)
        world.close()
        return everyone

    with ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            assert list(threads.map(join, range(3))) == [[0, 1, 2]] * 3
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(InitError, match="does not run under horovodrun's elastic mode"):
        join(0)
    with pytest.raises(InitError, match="horovodrun should set HOROVOD_RANK and HOROVOD_SIZE"):
        tcp.open_world(Launch("horovodrun", None, None, None, None), Settings())
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "nine")
    with pytest.raises(InitError, match=r"should say where its ranks meet, .* Received: '127.0.0.1', 'nine'"):
        join(0)


Start = Callable[[int, float], Future[TcpWorld]]


class Attack:
    """Its pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def start(
    store: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> Callable[[int, float], Future[TcpWorld]]:
    """Start rank 0 of 2, which horovodrun has started beside so many ranks of its host."""
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", store[0])
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(store[1]))
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    monkeypatch.setattr(tcp, "_number", iter([0]))

    def begin(local_size: int, limit_s: float) -> Future[TcpWorld]:
        launch = Launch("horovodrun", 0, 2, 0, local_size)
        return ThreadPoolExecutor(1).submit(tcp.open_world, launch, Settings(timeout_s=limit_s))

    return begin


def join_as_stranger(store: tuple[str, int]) -> Any:
    """Do what rank 1 does, before it, with all that the store has."""
    place = Rendezvous(*store, "hvpipe-0", 2.0)

    def exchange(mine: Any) -> list[Any]:
        place.put("1", mine)
        found: list[Any] = place.get("all", "Rank 0")
        return found

    return connect_mesh(1, "127.0.0.1", exchange, 2.0)


def test_a_stranger_does_not_become_a_rank(store: tuple[str, int], start: Start) -> None:
    """Regression: it stored its address before rank 1 did, and called with the token that it found there."""
    rank_0 = start(2, 1.0)
    with pytest.raises((InitError, ValueError)):
        join_as_stranger(store)
    with pytest.raises(InitError, match=r"a value without the seal of this job's secret, at /hvpipe-0/1"):
        rank_0.result()


def test_no_pickle_of_ranks_that_prove_nothing_is_read(
    store: tuple[str, int], start: Start, tmp_path: Path
) -> None:
    """On several hosts without HVPIPE_SECRET a stranger can join, but it runs nothing."""
    rank_0 = start(1, 5.0)
    stranger = join_as_stranger(store)
    world = rank_0.result()
    assert not world.trusted
    path = tmp_path / "ran"
    gather = lambda value, what: world.allgather_object(value)  # noqa: E731
    engine = SimpleNamespace(world=world, allgather_object=gather)
    calls = (world.allgather_object, functools.partial(EngineClient.allgather_any_object, engine))
    for call in calls:
        stranger.send(pickle.dumps(Attack(path)), [0], 5.0)
        with pytest.raises(PeerError, match="Another rank should send what this version of hvpipe can read"):
            call([1])
    assert not path.exists()
    with ThreadPoolExecutor(1) as threads:
        ends = threads.submit(stranger.close)
        world.close()
        ends.result()


@pytest.mark.parametrize("hosts", [[0, 0, 2], [0, 1, 2]])
def test_ranks_of_a_host_share_a_file(hosts: list[int]) -> None:
    def act(world: TcpWorld) -> str:
        with shared_file(world, Settings(), hosts) as path:
            assert not path or Path(path).stat().st_size > 0
            return path

    paths = on_ranks(3, act)
    assert not any(Path(path).exists() for path in paths if path)
    if hosts == [0, 1, 2]:
        assert paths == [""] * 3
    else:
        assert paths[0] == paths[1] != paths[2]


def test_ranks_that_cannot_share_a_file_use_the_ring(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(size_bytes: int) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hvpipe.world.shared_memory._make_file", full)

    def act(world: TcpWorld) -> str:
        with shared_file(world, Settings(), [0, 0]) as path:
            return path

    assert on_ranks(2, act) == ["", ""]
    assert "all ranks use the ring instead of shared memory" in caplog.text
    assert "No space left on device" in caplog.text
