"""Sends the status of ranks to rank 0's host in UDP datagrams. Nothing waits for them; some may get lost."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from hvpipe.monitor.host_usage import interface_addresses
from hvpipe.monitor.status_files import RankStatus, received_now

_MOST_BYTES = 4096
_MOST_AT_ONCE = 10_000


@dataclass(frozen=True)
class ReceiverAddress:
    """The addresses (with netmasks) and port where rank 0 listens, and the token that marks this job."""

    addresses: tuple[tuple[str, str], ...]
    port: int
    token: str


class StatusReceiver:
    """Receives on rank 0. Owns a socket until `close`; raises OSError if it gets none."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(("", 0))
        self._ranks: dict[int, RankStatus] = {}
        port = self._socket.getsockname()[1]
        self.address = ReceiverAddress(tuple(interface_addresses()), port, secrets.token_hex(16))

    def collect(self) -> list[RankStatus]:
        """Read what has arrived; return the newest status of every rank so far."""
        token = self.address.token.encode()
        newest: dict[int, RankStatus] = {}
        for _ in range(_MOST_AT_ONCE):
            try:
                data = self._socket.recv(_MOST_BYTES)
            except OSError:  # nothing more
                break
            word, _, body = data.partition(b" ")
            if not hmac.compare_digest(word, token):
                continue
            with contextlib.suppress(ValueError):
                if (one := RankStatus.from_json(json.loads(body))) is not None:
                    newest[one.rank] = received_now(one)
        self._ranks.update(newest)
        return list(self._ranks.values())

    def close(self) -> None:
        self._socket.close()


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
        data = self._token + b" " + json.dumps(mine.to_json()).encode()
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
