"""Sends the status of ranks to rank 0's host in UDP datagrams. Nothing waits for them; some may get lost."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import itertools
import json
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hvpipe.comm.this_host import interface_addresses
from hvpipe.monitor.status_files import RankStatus, received_now

_MOST_BYTES = 4096
_MOST_AT_ONCE = 10_000


@dataclass(frozen=True)
class ReceiverAddress:
    """The addresses (with netmasks) and port where rank 0 listens, and the token that proves this job's."""

    addresses: tuple[tuple[str, str], ...]
    port: int
    token: str


class StatusReceiver:
    """Receives on rank 0. Owns sockets until `close`; raises OSError if it gets none.

    It listens on no address that the internet can reach.

    Args:
        ports: The ports to choose from; None: the kernel chooses.
    """

    def __init__(self, ports: range | None = None) -> None:
        inside = [pair for pair in interface_addresses() if not ipaddress.ip_address(pair[0]).is_global]
        self._sockets: list[socket.socket] = []
        self._ranks: dict[int, RankStatus] = {}
        heard, choice = [], list(ports or (0,))
        for address, netmask in inside:
            one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            if not any(_binds(one, address, port) for port in choice):  # they are taken there
                one.close()
                continue
            one.setblocking(False)
            choice = [one.getsockname()[1]]
            self._sockets.append(one)
            heard.append((address, netmask))
        if not heard:
            raise OSError("no address inside a private network to listen on, or no free port there")
        port = choice[0]
        self.address = ReceiverAddress(tuple(heard), port, secrets.token_hex(16))

    def collect(self) -> list[RankStatus]:
        """Read what has arrived; return the newest status of every rank so far."""
        token = self.address.token.encode()
        newest: dict[int, RankStatus] = {}
        for data in itertools.islice(self._arrived(), _MOST_AT_ONCE):
            proof, _, body = data.partition(b" ")
            if not hmac.compare_digest(proof, _proof(token, body)):
                continue
            with contextlib.suppress(ValueError):
                if (one := RankStatus.from_json(json.loads(body))) is not None:
                    newest[one.rank] = received_now(one)
        self._ranks.update(newest)
        return list(self._ranks.values())

    def _arrived(self) -> Iterator[bytes]:
        for one in self._sockets:
            with contextlib.suppress(OSError):  # nothing more
                while True:
                    yield one.recv(_MOST_BYTES)

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def _proof(token: bytes, body: bytes) -> bytes:
    """Return what shows that a datagram is one of this job's: the token itself is never sent in one."""
    return hmac.digest(token, body, "sha256").hex().encode()


def _binds(one: socket.socket, address: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        one.bind((address, port))
        return True
    return False


class StatusSender:
    """Sends from a rank on another host. Owns a socket until `close`; raises OSError if it gets none."""

    def __init__(self, receiver: ReceiverAddress) -> None:
        self._token = receiver.token.encode()
        near = near_addresses(receiver.addresses, interface_addresses())
        self._targets = [(address, receiver.port) for address in near]
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def send(self, mine: RankStatus) -> None:
        """Send the status of this rank; a failure is ignored."""
        body = json.dumps(mine.to_json()).encode()
        data = _proof(self._token, body) + b" " + body
        for target in self._targets:
            with contextlib.suppress(OSError):  # no route or no room: the next status replaces this one
                self._socket.sendto(data, target)

    def close(self) -> None:
        self._socket.close()


def near_addresses(theirs: Sequence[tuple[str, str]], ours: Sequence[tuple[str, str]]) -> list[str]:
    """Return the addresses of a host in networks that this host shares; all addresses if it shares none.

    Args:
        theirs: Each address of the other host with its netmask.
        ours: Each address of this host with its netmask.
    """
    networks = {ipaddress.ip_interface(f"{address}/{mask}").network for address, mask in ours}
    near = [
        address for address, mask in theirs if ipaddress.ip_interface(f"{address}/{mask}").network in networks
    ]
    return near or [address for address, _ in theirs]
