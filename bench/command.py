"""What the benchmarks' commands share: options for hosts and sizes, and errors in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from hvpipe.errors import HvpipeError


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add on which hosts to measure: those of rank_benchmark.hosts_of."""
    parser.add_argument("--cluster", help="a virtual cluster: 2x1.5gbit, slow-cpu, or a TOML file")
    parser.add_argument("--hosts", metavar="LIST", help="real hosts, as in a:2,b:2")


def add_sizes(parser: argparse.ArgumentParser, smallest: str, largest: str) -> None:
    """Add on how many ranks to measure an all-reduce, and of which buffers: arguments of metrics.sizes."""
    parser.add_argument("--ranks", type=_several, help="ranks (default: 2, on a cluster every slot)")
    parser.add_argument("--min", default=smallest, help="smallest buffer (default: %(default)s)")
    parser.add_argument("--max", default=largest, help="largest buffer (default: %(default)s)")


def _several(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"should be 2 or more. Received: {text!r}")
    return int(text)


def status_of(program: str, act: Callable[[], int], failed: int = 1) -> int:
    """Return the exit code that `act` returns; `failed` after a line that says why, and 130 at Ctrl-C."""
    try:
        return act()
    except (HvpipeError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return failed
    except KeyboardInterrupt:
        return 130
