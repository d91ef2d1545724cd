"""The options of `hvpipe run` for the watchdog and the flight recorder."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from hvpipe.errors import LaunchError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--stall-warn",
        type=float,
        metavar="S",
        help="report a collective that waits for S seconds, and for whom; 0: never (default: 10)",
    )
    parser.add_argument(
        "--stall-abort",
        type=float,
        metavar="S",
        help="end the job with that report after S seconds (default: the value of --timeout)",
    )
    parser.add_argument(
        "--flight-recorder",
        metavar="DIR",
        help="keep the last events of ranks that end badly, for `hvpipe blackbox DIR`",
    )


def settings(options: argparse.Namespace) -> dict[str, str]:
    """Return the HVPIPE_* variables that pass the options on to the ranks. Raises LaunchError."""
    found: dict[str, str] = {}
    warn_s, abort_s = options.stall_warn, options.stall_abort
    if warn_s is not None:
        if not (math.isfinite(warn_s) and warn_s >= 0):
            raise LaunchError(f"--stall-warn should be a number of seconds, or 0. Received: {warn_s}")
        found["HVPIPE_STALL_WARN"] = f"{warn_s:g}"
    if abort_s is not None:
        if not (math.isfinite(abort_s) and abort_s > 0):
            raise LaunchError(f"--stall-abort should be a positive number of seconds. Received: {abort_s}")
        found["HVPIPE_STALL_ABORT"] = f"{abort_s:g}"
    if options.flight_recorder is not None:
        folder = Path(options.flight_recorder).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"--flight-recorder should be a folder that can be written. Received: {folder}: "
                f"{error.strerror}"
            ) from error
        found["HVPIPE_FLIGHT_RECORDER"] = str(folder)
    return found
