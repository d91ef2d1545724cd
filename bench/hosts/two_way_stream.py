"""A TCP stream both ways between two processes, which links.py runs on two hosts."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

_CHUNK_BYTES = 1 << 18
_WARM_UP_S = 1.0


def _send(connection: socket.socket, until: float) -> None:
    block = bytes(_CHUNK_BYTES)
    while time.monotonic() < until:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)


def _receive_bits_per_s(connection: socket.socket, seconds: float) -> float:
    """Return the rate of the data that arrives after the warm-up and before the end."""
    begin = time.monotonic() + _WARM_UP_S
    end, arrived, buffer = begin + seconds, 0, bytearray(_CHUNK_BYTES)
    while size := connection.recv_into(buffer):
        if begin <= time.monotonic() < end:
            arrived += size
    return arrived * 8 / seconds


def stream(connection: socket.socket, seconds: float) -> float:
    """Send and receive at once. Return the bits per second that arrived here."""
    sender = threading.Thread(target=_send, args=(connection, time.monotonic() + _WARM_UP_S + seconds + 0.5))
    sender.start()
    rate = _receive_bits_per_s(connection, seconds)
    sender.join()
    return rate


def serve(port: int, seconds: float) -> None:
    """Take one stream on a plain connection, then tell the client on a second one what arrived."""
    with socket.create_server(("", port)) as listener:
        with listener.accept()[0] as connection:
            rate = stream(connection, seconds)
        with listener.accept()[0] as connection:
            connection.sendall(json.dumps(rate).encode())


def measure(host: str, port: int, seconds: float) -> tuple[float, float]:
    """Stream with the server at `host`. Return the rates that arrived there and here."""
    with socket.create_connection((host, port), timeout=30) as connection:
        connection.settimeout(None)
        here = stream(connection, seconds)
    with socket.create_connection((host, port), timeout=30) as connection:
        there = json.loads(connection.makefile().read())
    return there, here


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(int(sys.argv[3]), float(sys.argv[4]))
    else:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))))
