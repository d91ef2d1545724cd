"""The world of ranks over TCP. `horovodrun --gloo` starts them, or MPI (see hvpipe.world.ethernet)."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hvpipe.environment.discover import Launch, horovodrun
from hvpipe.environment.native import LeftToParent, check_mpi, import_native
from hvpipe.environment.settings import Settings
from hvpipe.errors import HvpipeError, InitError
from hvpipe.world.clock_offset import clock_offset_s
from hvpipe.world.objects import packed, unpacked
from hvpipe.world.secret import job_secret
from hvpipe.world.shared_memory import shared_file
from hvpipe.world.tcp_setup import Setup, job_key, listen
from hvpipe.world.world import RunningRanks

if TYPE_CHECKING:
    from hvpipe.world.mpi import MpiWorld

_SEGMENT_BYTES = 240 << 10  # a message of the ring: in cache while it is added
_SIOCGIFADDR = 0x8915  # of Linux: asks for the IPv4 address of an interface

_number = itertools.count()
"""Counts the worlds of this process, so that a second one does not find the addresses of the first."""


class TcpWorld:
    """Ranks that are connected with each other. `open_world` makes it.

    Args:
        mesh: The connections, `hvpipe._engine.SocketMesh`.
        launch: This rank and its numbers.
        host: The name of this host.
        timeout_s: Longest wait for another rank, in seconds.
        joined_by: The ranks of MPI that these are; None: there are none.
        trusted: Whether each rank has proved that it knows what no stranger can.
    """

    def __init__(
        self,
        mesh: Any,
        launch: Launch,
        host: str,
        timeout_s: float,
        joined_by: MpiWorld | None = None,
        trusted: bool = True,
    ) -> None:
        assert launch.rank is not None
        assert launch.size is not None
        self._mesh = mesh
        self._timeout_s = timeout_s
        self.rank: int = launch.rank
        self.size: int = launch.size
        self.local_rank: int = launch.local_rank or 0
        self.local_size: int = launch.local_size or 1
        self.host = host
        self.network, self.messages = "TCP", ""
        self.trusted = trusted or self.size == 1
        self.library_version = "none" if joined_by is None else joined_by.library_version
        self._joined_by = joined_by
        self._place: int | str = host if joined_by is None else joined_by.first_on_host

    def make_engine(self, settings: Settings) -> Any:
        """Return the C++ engine between the ranks. Collective."""
        if self._joined_by is not None:
            check_mpi(self._joined_by.library_version)
        per_host = settings.ranks_per_host
        places = self.allgather_object(self.rank // per_host if per_host else self._place)
        hosts = [places.index(place) for place in places]
        return make_engine(self, self._mesh, hosts, settings)

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        self._send(value, [rank for rank in range(self.size) if rank != self.rank])
        return [value if rank == self.rank else self._receive(rank) for rank in range(self.size)]

    def clock_offset_s(self) -> float:
        """Return the seconds to add to this rank's `time.monotonic()` to get rank 0's."""
        return clock_offset_s(
            self.rank,
            self.size,
            lambda rank, value, _: self._send(value, [rank]),
            lambda rank, _: float(self._receive(rank)),
        )

    def abort(self, code: int = 1) -> None:
        """End all ranks now, with this exit code. Does not return.

        horovodrun ends the other ranks when one ends with an error.
        """
        if self._joined_by is not None:
            self._joined_by.abort(code)
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def leaves_unfinalised(self) -> bool:
        """Let this process end; return whether nothing else would wait for the others then."""
        if self._joined_by is not None:
            return self._joined_by.leaves_unfinalised()
        native = import_native()
        native.leave_to_parent(self._mesh)
        return True

    def close(self) -> None:
        """Close the connections, on every rank. The engine must have stopped."""
        global _opened
        self._mesh.close()
        if _opened is self:
            _opened = None

    def leave_to_parent(self) -> None:
        """In a child of os.fork(): close its copies, so that the others notice when its parent ends."""
        self._mesh.leave_to_parent()
        import_native().leave_to_parent(self._mesh)
        self._mesh = LeftToParent()

    def _send(self, value: Any, ranks: list[int]) -> None:
        self._send_bytes(packed(value), ranks)

    def _send_bytes(self, payload: bytes, ranks: list[int]) -> None:
        if ranks:
            self._mesh.send(payload, ranks, self._timeout_s)

    def _receive(self, rank: int) -> Any:
        return unpacked(self._mesh.receive(rank, self._timeout_s))


_opened: TcpWorld | None = None


def running_ranks() -> RunningRanks | None:
    """Return the ranks that this process has joined by TCP; None before and afterwards."""
    if _opened is None:
        return None
    return RunningRanks(_opened.rank, _opened.size, _opened.host, _opened.size == 1, _opened.abort)


def open_world(launch: Launch, settings: Settings) -> TcpWorld:
    """Join the ranks that `horovodrun --gloo` has started. Collective.

    Raises:
        InitError: If horovodrun does not say where its ranks are, or they cannot reach each other.
    """
    global _opened
    if launch.rank is None or launch.size is None:
        raise InitError(
            "horovodrun should set HOROVOD_RANK and HOROVOD_SIZE. "
            f"Received: rank={launch.rank}, size={launch.size}"
        )
    from hvpipe.world.rendezvous import Rendezvous

    told = horovodrun()
    if told.elastic:
        raise InitError(
            "hvpipe does not run under horovodrun's elastic mode: start with `hvpipe run --elastic`, or "
            "without --min-np, --max-np and --host-discovery-script. Received: HOROVOD_ELASTIC=1"
        )
    rank, size = launch.rank, launch.size
    place = Rendezvous(told.store_host, told.store_port, f"hvpipe-{next(_number)}", settings.timeout_s)
    with job_secret(place, launch, settings.secret) as secret:
        store = replace(place, secret=secret)

        def exchange(mine: Any) -> list[Any]:
            """Gather on rank 0, so that the store has few requests to answer."""
            store.put(str(rank), mine)
            if rank == 0:
                store.put("all", [store.get(str(other), f"Rank {other}") for other in range(size)])
            found: list[Any] = store.get("all", "Rank 0, after all others,")
            return found

        address = own_address(told.host, told.interface)
        mesh = connect_mesh(rank, address, exchange, settings.timeout_s, secret=secret, ports=settings.ports)
    _opened = TcpWorld(mesh, launch, told.host, settings.timeout_s, trusted=bool(secret))
    return _opened


def connect_mesh(
    rank: int,
    address: str,
    exchange: Callable[[Any], list[Any]],
    timeout_s: float,
    hosts: Sequence[str] | None = None,
    *,
    secret: bytes = b"",
    ports: range | None = None,
) -> Any:
    """Connect the ranks with each other. Collective.

    Args:
        rank: Of this process.
        address: Where this rank listens, as a number.
        exchange: Returns the values of all ranks, in rank order.
        timeout_s: Longest wait for another rank, in seconds.
        hosts: Where this rank reaches the others, by rank; None: where they listen.
        secret: What the ranks know, if others can see what they exchange.
        ports: Where to listen; None: the kernel chooses.

    Raises:
        InitError: If this rank cannot listen, or ranks cannot reach each other.
    """
    listener, mine = None, ["", 0, ""]
    failure = ""
    with contextlib.ExitStack() as stack:
        try:
            native = import_native()
            listener = stack.enter_context(listen(address, ports))
            mine = [*listener.getsockname()[:2], secrets.token_hex(32)]
        except HvpipeError as error:
            failure = str(error)
        everyone = _checked(exchange([*mine, failure]))  # also after a failure: the others wait for it
        failures = [each for *_, each in everyone if each]
        if failures or listener is None:
            raise InitError(failure or failures[0])
        addresses = [(host, port) for host, port, *_ in everyone]
        if hosts is not None:
            addresses = [(host, port) for host, (_, port) in zip(hosts, addresses, strict=True)]
        key = job_key(secret, everyone[0][2])
        name = socket.gethostname()
        setup = Setup(listener, rank, addresses, key, native.own_process(), name)
        sockets, processes = setup.run(timeout_s)
    try:
        return native.SocketMesh.over(rank=rank, sockets=sockets, processes=processes)
    except HvpipeError as error:
        raise InitError(str(error)) from error


def _checked(everyone: Any) -> list[tuple[str, int, str, str]]:
    """Return what ranks have said of themselves, if it has that form: anybody may write into a store."""
    kinds = [str, int, str, str]
    if isinstance(everyone, list) and all(
        isinstance(one, list) and [type(each) for each in one] == kinds for one in everyone
    ):
        return [tuple(one) for one in everyone]
    raise InitError(
        "Each rank should tell its address, port and token, in the same version of hvpipe. "
        f"Received: {str(everyone)[:200]}"
    )


def make_engine(world: Any, mesh: Any, hosts: list[int], settings: Settings) -> Any:
    """Return the C++ engine over these connections. Collective.

    Args:
        world: Gathers objects of the ranks.
        mesh: The connections.
        hosts: The number of its host, by rank.
        settings: The settings of this rank.
    """
    with shared_file(world, settings, hosts) as path:
        return import_native().Engine.create_over_sockets(
            mesh,
            hosts=hosts,
            shared_file=path,
            **settings.engine_options(_SEGMENT_BYTES),
        )


def own_address(host: str, interface: str = "") -> str:
    """Return the address at which other ranks reach this host, as a number.

    Args:
        host: The name of this host.
        interface: The network interface to use; "": the one that belongs to the name.

    Raises:
        InitError: If this host has no such address.
    """
    try:
        if interface:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
                request = struct.pack("256s", interface.encode()[:15])
                return socket.inet_ntoa(fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)[20:24])
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        wanted = f"The network interface {interface}" if interface else f"The host name {host}"
        raise InitError(f"{wanted} should have an address for TCP. Received: {error}") from error
