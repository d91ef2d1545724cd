"""Connects every two ranks by TCP: the higher rank calls, and both prove that they know the job's key.

    caller                          listener
    rank, size, nonce          ->
                               <-   nonce, proof             the listener knows the key
    process, proof             ->                            the caller knows it
                               <-   process, proof           both are connected

A proof is an HMAC-SHA256 with the key over who proves what, the address that was called, and all bytes so
far. So nothing that one connection has carried proves anything in another one. Nobody waits for one caller:
all sockets are polled together.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import secrets
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvpipe.errors import InitError

_MAGIC = b"hvpipe2\0"
_CALL = struct.Struct("<8sII32s")
_NONCE_BYTES = _PROOF_BYTES = 32
_PATIENCE_S = 5.0
"""A caller that says nothing for longer is no rank."""
_MOST_STRANGERS = 64
"""The most callers beyond the number of ranks that may be connected before they have proved anything."""
_AGAIN_S = 0.2
_ADVICE = (
    "TCP must be open between all hosts of the job, at all ports or those of HVPIPE_PORTS; with several "
    "networks, choose one by `hvpipe run --net`, by HVPIPE_NET under mpirun, or by "
    "`horovodrun --network-interfaces`."
)


def listen(host: str, ports: range | None = None) -> socket.socket:
    """Return a socket that listens at an address of this host.

    Args:
        host: The address, as a number.
        ports: The ports to choose from; None: the kernel chooses.

    Raises:
        InitError: If it cannot listen there, or no port is free.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError as error:
        raise InitError(f"An address should be an IPv4 or IPv6 number. Received: {host}") from error
    why: OSError | None = None
    # Ranks that start together begin at different ports.
    shift = os.getpid() % len(ports) if ports else 0
    for port in (0,) if ports is None else (*ports[shift:], *ports[:shift]):
        made = socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6)
        try:
            if ports is not None:  # connections of an earlier job do not hold its port
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host, port))
            made.listen(socket.SOMAXCONN)
            made.setblocking(False)
            return made
        except OSError as error:
            made.close()
            why = error
    if ports is None:
        raise InitError(
            f"A rank should be able to listen at its address. Received: {host}: {_reason(why)}"
        ) from why
    raise InitError(
        "HVPIPE_PORTS should have a free port for each rank of a host. "
        f"Received: HVPIPE_PORTS={ports[0]}-{ports[-1]} at {host}, the last of them: {_reason(why)}"
    ) from why


@dataclass(eq=False)
class _Call:
    """A connection on its way: made by this rank to `peer`, or accepted from somebody at `address`."""

    socket: socket.socket
    address: tuple[str, int]  # that was called
    peer: int  # -1: it has not said
    calls: bool
    deadline_s: float
    awaits: int = 0  # bytes of the next message; 0: the connection itself
    said: bytes = b""  # all bytes so far, in order
    got: bytearray = field(default_factory=bytearray)  # of the next message


class Setup:
    """Makes this rank's connections. `run` does it, once.

    Args:
        listener: Where this rank listens; the caller closes it.
        rank: Of this process.
        addresses: Where this rank reaches each rank, by rank.
        key: What all ranks know and nobody else.
        process: What others are told of this process, once they have proved who they are.
        host: The name of this host, for errors.
    """

    def __init__(
        self,
        listener: socket.socket,
        rank: int,
        addresses: Sequence[tuple[str, int]],
        key: bytes,
        process: bytes,
        host: str,
    ) -> None:
        self._listener, self._rank, self._addresses = listener, rank, addresses
        self._size = len(addresses)
        self._key, self._process, self._who = key, process, f"Rank {rank} on {host}"
        self._selector = selectors.DefaultSelector()
        self._connected: dict[int, tuple[socket.socket, bytes]] = {}
        self._calls: list[_Call] = []
        self._again: list[tuple[float, int]] = []  # when to call which rank again
        self._refused: Counter[str] = Counter()  # calls that were no ranks', by what they did
        self._deadline_s = 0.0

    def run(self, limit_s: float) -> tuple[list[int], list[bytes]]:
        """Return the sockets, by rank (-1 for this one), and what each process has told.

        Raises:
            InitError: With the ranks and addresses, after at most `limit_s` seconds.
        """
        self._deadline_s = time.monotonic() + limit_s
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            # Each begins with another one, so that not all call rank 0 at once.
            for peer in reversed(range(self._rank)):
                self._call(peer)
            while len(self._connected) < self._size - 1:
                self._step(limit_s)
        except BaseException:
            for one, _ in self._connected.values():
                one.close()
            raise
        finally:
            for call in self._calls:
                call.socket.close()
            self._selector.close()
        own = (-1, self._process)
        found = [
            (self._connected[peer][0].detach(), self._connected[peer][1]) if peer != self._rank else own
            for peer in range(self._size)
        ]
        return [number for number, _ in found], [process for _, process in found]

    def _step(self, limit_s: float) -> None:
        now_s = time.monotonic()
        if now_s > self._deadline_s:
            self._fail_late(limit_s)
        for call in [each for each in self._calls if now_s > each.deadline_s]:
            self._end(call, "said nothing" if not call.said + call.got else "stopped in the middle")
        due = [peer for at_s, peer in self._again if now_s >= at_s]
        self._again = [(at_s, peer) for at_s, peer in self._again if now_s < at_s]
        for peer in due:
            self._call(peer)
        next_s = min([self._deadline_s, *(c.deadline_s for c in self._calls), *(at for at, _ in self._again)])
        for key, _ in self._selector.select(max(0.0, next_s - now_s) + 0.001):
            if key.data is None:
                self._accept()
            elif key.data in self._calls:
                self._advance(key.data)

    def _call(self, peer: int) -> None:
        host, port = self._addresses[peer]
        made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        made.setblocking(False)
        call = _Call(made, (host, port), peer, calls=True, deadline_s=self._deadline_s)
        self._calls.append(call)
        try:
            made.connect((host, port))
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail_to_reach(call, _reason(error))
        self._selector.register(made, selectors.EVENT_WRITE, call)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            raise InitError(
                f"{self._who} should be able to accept the calls of "
                f"{self._size - 1 - self._rank} ranks. Received: {_reason(error)}"
            ) from error
        accepted.setblocking(False)
        waiting = [each for each in self._calls if not each.calls]
        if len(waiting) >= self._size + _MOST_STRANGERS:
            self._end(waiting[0], "said nothing")
        patience_s = min(self._deadline_s, time.monotonic() + _PATIENCE_S)
        call = _Call(
            accepted, accepted.getsockname()[:2], -1, calls=False, deadline_s=patience_s, awaits=_CALL.size
        )
        self._calls.append(call)
        self._selector.register(accepted, selectors.EVENT_READ, call)

    def _advance(self, call: _Call) -> None:
        """Read what has come, but no byte of what follows the last message."""
        try:
            if call.awaits == 0:
                self._reached(call)
                return
            data = call.socket.recv(call.awaits - len(call.got))
        except BlockingIOError:
            return
        except OSError as error:
            self._end(call, _reason(error))
            return
        call.got += data
        if not data:
            self._end(call, "ended the connection")
        elif len(call.got) == call.awaits:
            message, call.got = bytes(call.got), bytearray()
            try:
                (self._answered if call.calls else self._called)(call, message)
            except OSError as error:
                self._end(call, _reason(error))

    def _reached(self, call: _Call) -> None:
        code = call.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail_to_reach(call, os.strerror(code))
        call.address = call.socket.getpeername()[:2]
        self._send(call, _CALL.pack(_MAGIC, self._rank, self._size, secrets.token_bytes(_NONCE_BYTES)))
        call.awaits = _NONCE_BYTES + _PROOF_BYTES
        self._selector.modify(call.socket, selectors.EVENT_READ, call)

    def _answered(self, call: _Call, message: bytes) -> None:
        """Go on with a call of this rank's: the listener's nonce has come, or its last message."""
        first = len(call.said) == _CALL.size
        if not self._is_proof(call, message, "answer" if first else "welcome"):
            self._fail_to_reach(
                call,
                "an answer without a proof that it knows the job's key. Under `horovodrun --gloo`, "
                "HVPIPE_SECRET must be the same on all ranks",
            )
        if first:
            self._send(call, self._proved(call, self._process, "caller"))
            call.awaits = len(self._process) + _PROOF_BYTES
        else:
            self._connect(call, message)

    def _called(self, call: _Call, message: bytes) -> None:
        """Go on with a call that was accepted."""
        if not call.said:
            magic, peer, size, _ = _CALL.unpack(message)
            if magic != _MAGIC or size != self._size or not self._rank < peer < size:
                self._end(call, "spoke another program's language")
                return
            call.peer, call.said = peer, message
            self._send(call, self._proved(call, secrets.token_bytes(_NONCE_BYTES), "answer"))
            call.awaits = len(self._process) + _PROOF_BYTES
        elif not self._is_proof(call, message, "caller"):
            self._end(call, "did not know the job's key")
        elif call.peer in self._connected:
            self._end(call, f"called as rank {call.peer}, which is connected")
        else:
            self._send(call, self._proved(call, self._process, "welcome"))
            self._connect(call, message)

    def _connect(self, call: _Call, message: bytes) -> None:
        self._selector.unregister(call.socket)
        self._calls.remove(call)
        self._connected[call.peer] = call.socket, message[:-_PROOF_BYTES]

    def _proved(self, call: _Call, content: bytes, role: str) -> bytes:
        return content + self._proof(call, content, role)

    def _is_proof(self, call: _Call, message: bytes, role: str) -> bool:
        """Tell whether a message ends with its proof, and keep it."""
        content, proof = message[:-_PROOF_BYTES], message[-_PROOF_BYTES:]
        valid = hmac.compare_digest(self._proof(call, content, role), proof)
        call.said += message
        return valid

    def _proof(self, call: _Call, content: bytes, role: str) -> bytes:
        listener = self._rank if not call.calls else call.peer
        place = f"hvpipe {role} of {listener} at {call.address[0].partition('%')[0]} {call.address[1]}\0"
        return hmac.digest(self._key, place.encode() + call.said + content, "sha256")

    def _send(self, call: _Call, message: bytes) -> None:
        if call.socket.send(message) < len(message):  # the kernel has room for so few bytes
            raise BrokenPipeError("the connection takes no data")
        call.said += message

    def _end(self, call: _Call, why: str) -> None:
        """Close a connection. A rank that was called is called again: it may have had too many callers."""
        where = "an unknown address"
        with contextlib.suppress(OSError):
            where = str(call.socket.getpeername()[0])
        self._selector.unregister(call.socket)
        self._calls.remove(call)
        call.socket.close()
        if call.calls:
            if time.monotonic() >= self._deadline_s:
                self._fail_to_reach(call, "no answer")
            self._again.append((time.monotonic() + _AGAIN_S, call.peer))
        else:
            told = f" as rank {call.peer}" if call.peer >= 0 else ""
            self._refused[f"a call from {where}{told} {why}"] += 1

    def _fail_to_reach(self, call: _Call, why: str) -> None:
        host, port = self._addresses[call.peer]
        raise InitError(
            f"{self._who} should reach rank {call.peer} at {host}, port {port}. {_ADVICE} "
            f"Received: {why}{self._strangers()}"
        )

    def _fail_late(self, limit_s: float) -> None:
        for call in self._calls:
            if call.calls:
                self._fail_to_reach(call, "no answer")
        for _, peer in self._again:
            self._fail_to_reach(_Call(self._listener, ("", 0), peer, True, 0.0), "the end of its connections")
        missing = [peer for peer in range(self._rank + 1, self._size) if peer not in self._connected]
        for call in list(self._calls):
            self._end(call, "said nothing" if not call.said else "stopped in the middle")
        raise InitError(
            f"Rank {missing[0]} should reach r{self._who[1:]}. {_ADVICE} "
            f"Received: no call within {int(limit_s)} s{self._strangers()}"
        )

    def _strangers(self) -> str:
        """Say who called and is no rank, for errors."""
        most = self._refused.most_common(3)
        told = [what if count == 1 else f"{what}, {count} times" for what, count in most]
        more = "; ..." if len(self._refused) > 3 else ""
        return f"; {'; '.join(told)}{more}" if told else ""


def _reason(error: OSError | None) -> str:
    return "" if error is None else error.strerror or str(error)


def job_key(secret: bytes, token: Any) -> bytes:
    """Return the key of one job's connections.

    Args:
        secret: What only the ranks know; b"": the token is all that they know.
        token: What rank 0 has drawn for this job.
    """
    return hmac.digest(b"hvpipe job\0" + secret, str(token).encode(), "sha256")
