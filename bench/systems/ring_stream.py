"""Plain TCP around a ring of hosts, in processes of its own.

It shows what a step's bytes cost the hosts' cores, whoever sends them.

``python ring_stream.py`` prints its port and reads "host port" of the next host. For each further line, a
number of bytes, it sends as many to that host, receives as many from the previous one, and prints "done".
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

from bench.metrics import ring_factor
from bench.rounds.job import RankJob

_BLOCK_BYTES = 1 << 18
_CONNECT_S = 30.0


class RingStream:
    """The TCP stream of this rank's host. The first rank of each host has one; the others do nothing.

    All ranks create it together, and it ends with its `with` block. `wait` raises RuntimeError if its process
    ended early.
    """

    def __init__(self, job: RankJob, gradient_bytes: int) -> None:
        """`gradient_bytes` are those of an all-reduce that the stream stands in for."""
        self._process: subprocess.Popen[str] | None = None
        if job.local_rank_and_size[0] == 0:
            self._process = _start()
            (job.directory / f"stream-{job.rank}").write_text(f"{socket.gethostname()} {self._line()}")
        job.meet("streams")
        firsts = sorted(job.directory.glob("stream-*"), key=lambda path: int(path.name.split("-")[1]))
        self.bytes_each_way = round(ring_factor(len(firsts)) * gradient_bytes)
        if self._process is not None:
            here = firsts.index(job.directory / f"stream-{job.rank}")
            self._tell(firsts[(here + 1) % len(firsts)].read_text())

    @property
    def pid(self) -> int | None:
        """The stream's process, if this rank has one."""
        return None if self._process is None else self._process.pid

    def __enter__(self) -> RingStream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate(timeout=_CONNECT_S)

    def begin(self) -> None:
        """Send one step's bytes both ways."""
        if self._process is not None:
            self._tell(str(self.bytes_each_way))

    def wait(self) -> None:
        """Wait until the bytes of the last `begin` are sent and as many have arrived."""
        if self._process is not None:
            self._line()

    def _tell(self, line: str) -> None:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(
                f"The stream should run until closed. Received: status {self._process.wait()}, output above"
            )
        return line


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.systems.ring_stream"]
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


def _serve() -> None:
    with socket.create_server(("", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        after = sys.stdin.readline()
        if not after:
            return
        host, port = after.split()
        with (
            socket.create_connection((host, int(port)), timeout=_CONNECT_S) as there,
            listener.accept()[0] as here,
        ):
            there.settimeout(None)
            for line in sys.stdin:
                size = int(line)
                sender = threading.Thread(target=_send, args=(there, size))
                sender.start()
                _receive(here, size)
                sender.join()
                print("done", flush=True)


if __name__ == "__main__":
    _serve()
