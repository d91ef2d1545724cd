"""Plain TCP around a ring of hosts, in processes of its own.

It shows what a step's bytes cost the hosts' cores, whoever sends them.

``python -m bench.step.ring_stream BYTES`` prints its port and reads "host port" of the next host. For each
further line that it reads, it sends BYTES to that host, receives as many from the previous one, and prints
"done".
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

_BLOCK_BYTES = 1 << 18
_CONNECT_S = 30.0


class RingStream:
    """The TCP stream of this rank's host. The first rank of each host has one; the others do nothing.

    All ranks create and close it together. `wait` raises RuntimeError if its process ended early.
    """

    def __init__(self, world: MPI.Intracomm, bytes_each_way: int) -> None:
        hosts = world.allgather(socket.gethostname())
        firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
        self._process: subprocess.Popen[str] | None = None
        port = 0
        if world.rank in firsts:
            self._process = _start(bytes_each_way)
            port = int(self._line())
        ports = world.allgather(port)
        if self._process is not None:
            after = firsts[(firsts.index(world.rank) + 1) % len(firsts)]
            self._tell(f"{hosts[after]} {ports[after]}")

    def begin(self) -> None:
        """Send one step's bytes both ways."""
        if self._process is not None:
            self._tell("go")

    def wait(self) -> None:
        """Wait until the bytes of the last `begin` are sent and as many have arrived."""
        if self._process is not None:
            self._line()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate(timeout=_CONNECT_S)

    def _tell(self, line: str) -> None:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"The stream should run until closed. Received: status {self._process.wait()}, output above"
            )
        return line


def _start(bytes_each_way: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__)), str(bytes_each_way)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


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


def _serve(size: int) -> None:
    with socket.create_server(("", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        host, port = sys.stdin.readline().split()
        with (
            socket.create_connection((host, int(port)), timeout=_CONNECT_S) as there,
            listener.accept()[0] as here,
        ):
            there.settimeout(None)
            for _ in sys.stdin:
                sender = threading.Thread(target=_send, args=(there, size))
                sender.start()
                _receive(here, size)
                sender.join()
                print("done", flush=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
