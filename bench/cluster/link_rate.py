"""The rate of a link with both directions busy, by a TCP stream of our own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.errors import BenchError

if TYPE_CHECKING:
    from bench.hosts.real_hosts import Hosts

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

    def describe(self) -> str:
        return (
            f"{self.bits_per_s / 1e6:.1f} Mb/s each way with both ways busy "
            f"({self.forward_bits_per_s / 1e6:.1f} there, {self.backward_bits_per_s / 1e6:.1f} back)"
        )


def measure_two_way(cluster: Hosts, first: str, second: str, *, seconds: float = 4.0) -> TwoWayRate:
    """Stream both ways between two hosts for `seconds`, after one second that does not count."""
    program = [sys.executable, str(Path(__file__).with_name("two_way_stream.py"))]
    address = [second, str(_PORT), str(seconds)]
    with _serving(cluster, second, [*program, "server", *address]):
        output = _retry(cluster, first, [*program, "client", *address], seconds + 30)
    sent = json.loads(output)
    return TwoWayRate(sent["forward_bits_per_s"], sent["backward_bits_per_s"])


class _serving:
    """Runs a server process inside a host and ends it with the block."""

    def __init__(self, cluster: Hosts, host: str, command: list[str]) -> None:
        self._line = cluster.host_command(host, command)

    def __enter__(self) -> None:
        nothing = subprocess.DEVNULL  # ssh would change the settings of a terminal on its stdin
        self._process = subprocess.Popen(self._line, stdin=nothing, stdout=nothing, stderr=nothing)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)


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
