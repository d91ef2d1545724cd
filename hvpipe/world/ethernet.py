"""Ranks that MPI joins: whether TCP connections of hvpipe's own carry their data, and at which addresses.

On Ethernet they are faster than MPI, if each host has one rank. MPI stays where it may have a faster network.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvpipe.environment.discover import Launch, TcpInterfaces, message_layer_asked, tcp_interfaces
from hvpipe.environment.settings import Backend, Settings
from hvpipe.environment.this_host import Interface, fast_network, interfaces
from hvpipe.errors import InitError
from hvpipe.log import logger
from hvpipe.proc import boot_id
from hvpipe.world.mpi import MpiWorld, message_layer

if TYPE_CHECKING:
    from hvpipe.world.tcp import TcpWorld

_MOST_RANKS = 128  # each has a connection to every other one
_CONNECT_S = 15.0  # all ranks are there already
_ALL_ADDRESSES = "0.0.0.0"


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and what it is told.

    Args:
        first_rank_on_host: The same for all ranks of its host.
        loopback: The same for all processes that reach each other at 127.0.0.1.
        addresses: All of the host.
        interfaces: Those at which others may reach it.
        fast_network: The name of a card with which MPI is faster than TCP, or "" without such a card.
        backend: The setting.
        elastic: Whether the job goes on without lost ranks.
    """

    first_rank_on_host: int
    loopback: tuple[str, ...]
    addresses: frozenset[str]
    interfaces: tuple[Interface, ...]
    fast_network: str = ""
    backend: Backend | None = None
    elastic: bool = False


def over_tcp(ranks: MpiWorld, launch: Launch, settings: Settings) -> MpiWorld | TcpWorld:
    """Return the world that carries the data of these ranks: over TCP, or this one. Collective.

    Raises:
        InitError: If TCP was asked for and cannot be used.
    """
    if ranks.size == 1:
        return ranks
    places: list[Place] = ranks.allgather_object(_own_place(ranks, settings))
    asked = places[0].backend == "tcp"
    why = why_mpi(places)
    if why:
        ranks.network = f"MPI, because {why}"
        if ranks.rank == 0 and (card := idle_card(places, message_layer())):
            logger.warning(
                "hvpipe: Open MPI does not use %s: it chose ob1, which sends by TCP. For InfiniBand it needs "
                "a UCX that was built with --enable-mt. If the card is for Ethernet, set HVPIPE_BACKEND=tcp.",
                card,
            )
        return ranks
    if asked and places[0].elastic:
        raise InitError(
            "--elastic needs ranks whose data MPI carries: leave HVPIPE_BACKEND unset. "
            "Received: HVPIPE_BACKEND='tcp'"
        )
    from hvpipe.world.tcp import TcpWorld

    mesh, failure = _connect(ranks, places, settings)
    # The last one is of a rank that called, and knows why it failed, if there is such a one.
    failures = [each for each in ranks.allgather_object(failure) if each]
    if not failures:
        joined = Launch(launch.launcher, ranks.rank, ranks.size, ranks.local_rank, ranks.local_size)
        world = TcpWorld(mesh, joined, ranks.host, settings.timeout_s, joined_by=ranks)
        ranks.close()
        return world
    if mesh is not None:
        mesh.close()
    if asked:
        raise InitError(failures[-1])
    if ranks.rank == 0:
        logger.warning(
            "hvpipe: MPI carries the data between hosts. TCP connections between all ranks would be faster. "
            "HVPIPE_BACKEND=mpi avoids this warning, and the wait for them. Received: %s",
            failures[-1],
        )
    return ranks


def why_mpi(places: Sequence[Place]) -> str:
    """Return why MPI carries the data of these ranks; "": TCP does."""
    if places[0].backend is not None:
        return "the backend is mpi" if places[0].backend == "mpi" else ""
    hosts = {place.first_rank_on_host for place in places}
    if len(hosts) == 1:
        return "all ranks are on one host"
    if len(hosts) < len(places):
        return "a host has several ranks"
    if places[0].elastic:
        return "the job is elastic"
    if len(places) > _MOST_RANKS:
        return f"there are more than {_MOST_RANKS} ranks"
    for rank, place in enumerate(places):
        if place.fast_network:
            return f"rank {rank} has a faster network, {place.fast_network}"
    shared = set.intersection(
        *({(e.network, e.speed_mbit) for e in p.interfaces if e.physical} for p in places)
    )
    speeds = [speed for _, speed in shared]
    return "all hosts share several networks of one speed" if speeds.count(max(speeds, default=0)) > 1 else ""


def idle_card(places: Sequence[Place], layer: str) -> str:
    """Return the card between hosts that MPI should use and does not, or ""."""
    one_host = len({place.first_rank_on_host for place in places}) == 1
    # Elastic jobs cannot use TCP instead.
    wanted = places[0].backend == "mpi" or places[0].elastic or message_layer_asked()
    if one_host or layer != "ob1" or wanted:
        return ""
    return next((place.fast_network for place in places if place.fast_network), "")


def address_of(theirs: Place, mine: Place) -> str:
    """Return the address at which I reach them, or "" if they have none for me.

    An address in a network that both are in comes first, then that of a card, then the fastest one. Addresses
    that this host has as well, such as those of bridges for containers, lead nowhere.
    """
    if theirs.loopback == mine.loopback:
        return "127.0.0.1"
    networks = {each.network for each in mine.interfaces}
    found = [each for each in theirs.interfaces if each.ip not in mine.addresses]
    best = max(
        found, key=lambda each: (each.network in networks, each.physical, each.speed_mbit), default=None
    )
    return "" if best is None else best.ip


def usable(found: Sequence[Interface], asked: TcpInterfaces) -> tuple[Interface, ...]:
    """Return the interfaces at which another host of the job may reach this one."""
    return tuple(
        each
        for each in found
        if each.up
        and asked.allow(each.name, each.ip)
        and not each.between_two
        and not ipaddress.ip_address(each.ip).is_link_local
    )


def _own_place(ranks: MpiWorld, settings: Settings) -> Place:
    found = interfaces()
    addresses = frozenset(each.ip for each in found)
    return Place(
        ranks.first_on_host,
        _loopback(addresses, ranks.rank),
        addresses,
        usable(found, tcp_interfaces(settings.net)),
        fast_network(),
        settings.backend,
        settings.elastic,
    )


def _loopback(addresses: Iterable[str], rank: int) -> tuple[str, ...]:
    """Return the same for all processes of one network namespace. Copies of a machine differ in addresses."""
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        namespace = 0
    boot = boot_id()
    return (boot, str(namespace), *sorted(addresses)) if boot and namespace else (f"rank {rank}",)


def _connect(ranks: MpiWorld, places: Sequence[Place], settings: Settings) -> tuple[Any, str]:
    """Return the connections, or None and why there are none. All ranks must take part."""
    from hvpipe.world.tcp import connect_mesh

    hosts = [address_of(place, places[ranks.rank]) for place in places]
    called = hosts[: ranks.rank]
    missing = f"rank {ranks.rank} knows no address of rank {called.index('')}" if "" in called else ""
    failures = [each for each in ranks.allgather_object(missing) if each]
    if failures:
        return None, failures[0]
    limit_s = min(settings.timeout_s / 2, _CONNECT_S)  # all wait for the others afterwards
    try:
        gather = ranks.allgather_object  # by MPI, so nobody else sees it
        return connect_mesh(ranks.rank, _ALL_ADDRESSES, gather, limit_s, hosts, ports=settings.ports), ""
    except InitError as error:
        return None, str(error)
