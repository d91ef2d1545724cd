"""How evenly systems use a link: how much of it they use on average, and in their busiest 100 ms.

    python -m bench.link_use --cluster 2x50mbit

Each system trains MobileNetV2 for some steps. Every 20 ms a process on the first host reads how many bytes
its network interface has sent. The timed steps count, to the end of the last average. The step itself is that
of a long training: without its first round and without the wait for the last average.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from statistics import fmean

from bench.cluster.network import INTERFACE
from bench.command import status_of
from bench.errors import BenchError
from bench.hosts.hosts import Hosts
from bench.hosts.rank_benchmark import hosts_of
from bench.metrics import format_time, table
from bench.rounds.record import UNTIL_BUILT, Case, Task
from bench.rounds.round import run_round
from bench.systems import SYSTEMS
from bench.systems.system import usual_python

_LOOK = """
import time
while True:
    for line in open("/proc/self/net/dev"):
        if line.strip().startswith("{interface}:"):
            print(time.monotonic(), line.split()[9], flush=True)
    time.sleep({every_s})
"""
_EVERY_S = 0.02  # between two looks, so that a window has five
_WINDOW_S = 0.1
_LIMIT_S = 900.0
_QUIET = 0.02  # of the link's rate: what is sent beside training
_STEPS = 64

Look = tuple[float, int]  # seconds, bytes sent until then


def row(system: str, cluster: str, hosts: Hosts, batch: int) -> list[str]:
    """Return the cells of a system: its step, and the shares of the link that it uses."""
    rate = hosts.spec.slowest_rate_bits_per_s
    if rate is None:
        raise BenchError(f"The cluster should have limited links. Received: --cluster {cluster}")
    threads = max(1, int(hosts.cores_of_rank()))
    task = Task("mobilenetv2", batch, threads=threads, warm_up=UNTIL_BUILT, steps=_STEPS)
    case = Case(system, cluster, hosts.spec.slots, task)
    look = [sys.executable, "-c", _LOOK.format(interface=INTERFACE, every_s=_EVERY_S)]
    command = hosts.plain_command(hosts.spec.hosts[0].name, look)
    with tempfile.TemporaryFile("w+") as file:
        with subprocess.Popen(command, stdout=file) as looking:
            try:
                found = run_round(case, 0, hosts, _LIMIT_S, python=usual_python())
            finally:
                looking.terminate()
        file.seek(0)
        pairs = [line.split() for line in file.read().splitlines()[:-1]]  # the last one may be cut
    if not found.ok:
        raise BenchError(f"A system should train. Received: {found.why}")
    took_s = found.wall_s * _STEPS
    looks = training([(float(at_s), int(sent)) for at_s, sent in pairs], took_s, rate / 8 * _QUIET)
    shares = [each * 8 / rate for each in rates(looks, _WINDOW_S)]
    used, mean, idle = max(shares), fmean(shares), fmean(share < _QUIET for share in shares)
    step_s = found.usual_s
    return [system, format_time(step_s), f"{mean:.0%}", f"{used:.0%}", f"{used / mean:.1f}", f"{idle:.0%}"]


def training(looks: Sequence[Look], took_s: float, quiet_bytes_per_s: float) -> list[Look]:
    """Return the looks of the last `took_s` seconds until something was last sent."""
    window = zip(looks, looks[round(_WINDOW_S / _EVERY_S) :], strict=False)
    least = quiet_bytes_per_s * _WINDOW_S
    last_s = max(
        (at_s for (_, before), (at_s, sent) in window if sent - before > least), default=looks[-1][0]
    )
    return [look for look in looks if last_s - took_s <= look[0] <= last_s]


def rates(looks: Sequence[Look], window_s: float) -> list[float]:
    """Return bytes per second in windows of this length, one after the other."""
    found, (from_s, before) = [], looks[0]
    for at_s, sent in looks:
        if at_s - from_s >= window_s:
            found.append((sent - before) / (at_s - from_s))
            from_s, before = at_s, sent
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.link_use", description="How evenly a link is used."
    )
    parser.add_argument("--cluster", default="2x50mbit", help="a virtual cluster (default: 2x50mbit)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="of a rank (default: 8)")
    parser.add_argument(
        "--systems", default="hvpipe-step,hvpipe-local,hvpipe-slow-link", metavar="NAMES", help="which"
    )
    return status_of("bench.link_use", partial(_measure, parser.parse_args(argv)))


def _measure(options: argparse.Namespace) -> int:
    systems = options.systems.split(",")
    if unknown := [name for name in systems if name not in SYSTEMS]:
        raise BenchError(f"--systems should be some of {', '.join(SYSTEMS)}. Received: {', '.join(unknown)}")
    with hosts_of(options.cluster, None) as hosts:
        rows = [row(system, options.cluster, hosts, options.batch) for system in systems]
    header = ["system", "step", "link used", "busiest 100 ms", "peak over mean", "of the time idle"]
    print(table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
