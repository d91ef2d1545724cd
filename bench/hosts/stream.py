"""A plain TCP stream between processes on several hosts: bytes to one neighbour, as many from another.

``python stream.py`` prints its port and reads "host port" of the process that it sends to. For each further
line, a number of bytes, it sends as many, receives as many, and prints the seconds until these had come. It
imports nothing of ours, because ssh hands on no PYTHONPATH.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

COMMAND = (sys.executable, __file__)
_BLOCK_BYTES = 1 << 18
_CONNECT_S = 30.0
_LIMIT_S = 600.0  # without any byte; computing may come between two exchanges


class Stream:
    """A running process of this file. Its methods raise RuntimeError if it has ended."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.process = process
        self.port = int(self._line())

    def send_to(self, host: str, port: int) -> None:
        self._tell(f"{host} {port}")

    def begin(self, size_bytes: int) -> None:
        """Send so many bytes, and receive as many."""
        self._tell(str(size_bytes))

    def wait(self) -> float:
        """Wait until all bytes are sent and have arrived; return the seconds from `begin` to arrival."""
        return float(self._line())

    def _tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _line(self) -> str:
        line = self.process.stdout.readline().strip()
        if not line:
            raise RuntimeError(
                f"The stream should run until closed. Received: status {self.process.wait()}, output above"
            )
        return str(line)


@contextmanager
def open_stream(command: Sequence[str] = COMMAND) -> Iterator[Stream]:
    """Start this file by a command, on this or another host. It ends with the block."""
    from bench.launch.processes import started

    with started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Stream(process)


def _send(connection: socket.socket, size: int) -> None:
    block = memoryview(bytes(_BLOCK_BYTES))
    while size > 0:
        size -= connection.send(block[:size])


def _receive(connection: socket.socket, size: int) -> None:
    block = memoryview(bytearray(_BLOCK_BYTES))
    while size > 0:
        arrived = connection.recv_into(block, min(size, _BLOCK_BYTES))
        if not arrived:
            raise ConnectionError(f"The previous host should send all bytes. Received: {size} too few")
        size -= arrived


def _serve() -> None:
    with socket.create_server(("", 0)) as listener:
        listener.settimeout(_CONNECT_S)
        print(listener.getsockname()[1], flush=True)
        after = sys.stdin.readline()
        if not after:
            return
        host, port = after.split()
        with (
            socket.create_connection((host, int(port)), timeout=_CONNECT_S) as there,
            listener.accept()[0] as here,
        ):
            there.settimeout(_LIMIT_S)
            here.settimeout(_LIMIT_S)
            for line in sys.stdin:
                begun_s, size = time.monotonic(), int(line)
                sender = threading.Thread(target=_send, args=(there, size))
                sender.start()
                _receive(here, size)
                received_s = time.monotonic() - begun_s
                sender.join()
                print(received_s, flush=True)


if __name__ == "__main__":
    _serve()
