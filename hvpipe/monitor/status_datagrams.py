"""Carries what a rank does now to rank 0's host, in datagrams: nobody waits for them, some may get lost."""

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
from hvpipe.monitor.status_files import RankNow, heard_now

_MOST_BYTES = 4096
_MOST_AT_ONCE = 10_000


@dataclass(frozen=True)
class Mailbox:
    """Where rank 0 listens, and the word that says that a datagram is for this job."""

    addresses: tuple[tuple[str, str], ...]
    port: int
    token: str


class Receiver:
    """Rank 0's end; owns a socket, which `close` gives back. Raises OSError without one."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(("", 0))
        self._ranks: dict[int, RankNow] = {}
        port = self._socket.getsockname()[1]
        self.mailbox = Mailbox(tuple(interface_addresses()), port, secrets.token_hex(16))

    def collect(self) -> list[RankNow]:
        """Take in what has come; the newest of every rank so far."""
        token = self.mailbox.token.encode()
        newest: dict[int, RankNow] = {}
        for _ in range(_MOST_AT_ONCE):
            try:
                data = self._socket.recv(_MOST_BYTES)
            except OSError:  # nothing more
                break
            word, _, body = data.partition(b" ")
            if not hmac.compare_digest(word, token):
                continue
            with contextlib.suppress(ValueError):
                if (one := RankNow.from_json(json.loads(body))) is not None:
                    newest[one.rank] = heard_now(one)
        self._ranks.update(newest)
        return list(self._ranks.values())

    def close(self) -> None:
        self._socket.close()


class Sender:
    """A rank's end on another host; owns a socket, which `close` gives back. Raises OSError without one."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._token = mailbox.token.encode()
        self._targets = [
            (address, mailbox.port) for address in near_addresses(mailbox.addresses, interface_addresses())
        ]
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def send(self, mine: RankNow) -> None:
        data = self._token + b" " + json.dumps(mine.to_json()).encode()
        for target in self._targets:
            with contextlib.suppress(OSError):  # no way there, or no room: the next one says it anew
                self._socket.sendto(data, target)

    def close(self) -> None:
        self._socket.close()


def near_addresses(theirs: Sequence[tuple[str, str]], ours: Sequence[tuple[str, str]]) -> list[str]:
    """Of a host's (address, netmask), those in a network that this host is in too; all, where none is."""
    networks = {ipaddress.ip_interface(f"{address}/{mask}").network for address, mask in ours}
    near = [
        address for address, mask in theirs if ipaddress.ip_interface(f"{address}/{mask}").network in networks
    ]
    return near or [address for address, _ in theirs]
