"""`hvpipe tune`: start ranks that measure which all-reduce is the fastest by size."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from hvpipe.commands.launch_options import (
    add_launch_options,
    launch_spec,
    output_path,
    start,
    timeout_setting,
)
from hvpipe.errors import LaunchError

_TIMEOUT_S = 300


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe tune`."""
    add_launch_options(parser, timeout_s=_TIMEOUT_S)
    parser.add_argument(
        *("-o", "--output"),
        default="all-reduce.json",
        metavar="FILE.json",
        help="the file to write, which jobs name in HVPIPE_ALL_REDUCE (default: all-reduce.json)",
    )


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Check the options and start the ranks. Returns mpirun's exit code; raises HvpipeError."""
    path = output_path("--output", options.output)
    if not path.endswith(".json"):  # by which HVPIPE_ALL_REDUCE tells it from an algorithm
        raise LaunchError(f"--output should end in .json. Received: --output {options.output!r}")
    spec = launch_spec(options, (sys.executable, "-u", "-m", "hvpipe.commands.tune_ranks", path), environ)
    if spec.ranks < 2:
        raise LaunchError(f"tune needs at least 2 ranks. Received: {spec.ranks}")
    # Only what crosses the network has a choice of algorithms.
    settings = {"HVPIPE_SHARED_MEMORY": "0", "HVPIPE_ALL_REDUCE": "", **timeout_setting(options)}
    return start(spec, settings, environ, dry_run=options.dry_run)
