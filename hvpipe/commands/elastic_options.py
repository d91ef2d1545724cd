"""The options of `hvpipe run` for jobs that go on without ranks that are lost."""

from __future__ import annotations

import argparse

from hvpipe.environment.settings import LR_SCALINGS
from hvpipe.errors import LaunchError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to `hvpipe run`."""
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="go on without ranks that are lost (Open MPI 5 with ULFM)",
    )
    parser.add_argument(
        "--min-np",
        type=int,
        metavar="K",
        help="with --elastic: end the job with exit code 69 if fewer ranks are left (default: 1)",
    )
    parser.add_argument(
        "--lr-scaling",
        choices=LR_SCALINGS,
        help="with --elastic: scale the learning rate with the number of ranks (default: none)",
    )


def settings(options: argparse.Namespace) -> dict[str, str]:
    """Return the HVPIPE_* variables that pass these options on to the ranks."""
    if not options.elastic:
        if options.min_np is not None or options.lr_scaling is not None:
            raise LaunchError(
                "--min-np and --lr-scaling need --elastic. "
                f"Received: --min-np {options.min_np}, --lr-scaling {options.lr_scaling}"
            )
        return {}
    least = 1 if options.min_np is None else options.min_np
    if least < 1 or (options.ranks is not None and least > options.ranks):
        raise LaunchError(f"--min-np should be 1 to the number of ranks. Received: --min-np {least}")
    found = {"HVPIPE_ELASTIC": "1", "HVPIPE_MIN_NP": str(least)}
    if options.lr_scaling is not None:
        found["HVPIPE_LR_SCALING"] = options.lr_scaling
    return found
