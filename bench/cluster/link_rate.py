"""The rate of a link with both directions busy, by a TCP stream of our own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.errors import BenchError
from bench.hosts.hosts import Hosts

_PORT = 5201


@dataclass(frozen=True)
class TwoWayRate:
    """Bits per second received at each end while both send."""

    forward_bits_per_s: float
    backward_bits_per_s: float

    @property
    def bits_per_s(self) -> float:
        """The mean of the two directions: the most that a ring can reach, as it uses both alike."""
        return (self.forward_bits_per_s + self.backward_bits_per_s) / 2


def measure_two_way(cluster: Hosts, first: str, second: str, *, seconds: float = 4.0) -> TwoWayRate:
    """Stream both ways between two hosts for `seconds`, after one second that does not count."""
    program = [sys.executable, str(Path(__file__).with_name("two_way_stream.py"))]
    address = [second, str(_PORT), str(seconds)]
    with _serving(cluster, second, [*program, "server", *address]):
        output = _retry(cluster, first, [*program, "client", *address], seconds + 30)
    sent = json.loads(output)
    return TwoWayRate(sent["forward_bits_per_s"], sent["backward_bits_per_s"])


@contextmanager
def _serving(cluster: Hosts, host: str, command: list[str]) -> Iterator[None]:
    """Run a server process inside a host until the block ends."""
    nothing = subprocess.DEVNULL  # ssh would change the settings of a terminal on its stdin
    line = cluster.host_command(host, command)
    with subprocess.Popen(line, stdin=nothing, stdout=nothing, stderr=nothing) as process:
        try:
            yield
        finally:
            process.terminate()


def _retry(cluster: Hosts, host: str, command: list[str], timeout_s: float) -> str:
    """Run the client again until the server listens."""
    deadline = time.monotonic() + 15.0  # over ssh, Python takes seconds to start
    while True:
        try:
            result = cluster.execute(host, command, timeout_s=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"`{' '.join(command)}` in {host} did not end within {timeout_s:g} s") from error
        if result.returncode == 0:
            return result.stdout
        if time.monotonic() > deadline:
            raise BenchError(f"`{' '.join(command)}` in {host} failed: {result.stderr or result.stdout}")
        time.sleep(0.1)
