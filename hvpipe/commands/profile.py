"""The body of `hvpipe profile`: starts ranks that measure a model, their devices and their links."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from hvpipe.commands.launch_options import (
    add_launch_options,
    launch_spec,
    output_path,
    start,
    start_alone,
    timeout_setting,
)
from hvpipe.errors import LaunchError
from hvpipe.specs.profile_request import ProfileTask, parse_input_shapes

# The slowest rank's measuring is what the others wait for.
_TIMEOUT_S = 3600


def add_profile_options(parser: argparse.ArgumentParser) -> None:
    add_launch_options(parser, timeout_s=_TIMEOUT_S)
    parser.add_argument("--microbatch", type=int, metavar="N", help="samples of a micro-batch")
    parser.add_argument(
        "--input-shape",
        action="append",
        default=[],
        metavar="[NAME=]A,B,C",
        help="axes of a sample, for an input that leaves some open; once for each such input",
    )
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="whose slots to count (default: that of a compiled model, else adam)",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="runs of each layer, of which the median counts"
    )
    parser.add_argument(
        "-o", "--output", default="profile.json", metavar="FILE", help="default: profile.json"
    )
    parser.add_argument("--cluster", default="cluster.json", metavar="FILE", help="default: cluster.json")
    parser.add_argument(
        "target",
        metavar="FILE.py:FUNCTION",
        help="or MODULE:FUNCTION: returns the model, or the model and a micro-batch; takes no arguments. "
        'The file is imported: what trains belongs under `if __name__ == "__main__":`',
    )


def profile(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Check what was asked for and start the ranks; returns mpirun's exit code.

    Without -np and hosts one rank measures, for which no mpirun is needed. Raises HvpipeError.
    """
    task = ProfileTask(
        target=options.target,
        profile_path=output_path("--output", options.output),
        cluster_path=output_path("--cluster", options.cluster),
        microbatch=options.microbatch,
        input_shapes=parse_input_shapes(options.input_shape),
        repeats=options.repeats,
        optimizer=options.optimizer,
    )
    if task.is_file and not Path(task.place).is_file():
        raise LaunchError(f"{task.place} should be a file. Received: {task.target!r}")
    command = (sys.executable, "-u", "-m", "hvpipe.keras.profiling.ranks", task.to_text())
    usual = {} if "HVPIPE_TIMEOUT" in environ else {"HVPIPE_TIMEOUT": str(_TIMEOUT_S)}
    settings = {**usual, **timeout_setting(options)}
    if options.ranks is None and options.hosts is None and options.hostfile is None:
        return start_alone(command, settings, environ, dry_run=options.dry_run)
    return start(launch_spec(options, command, environ), settings, environ, dry_run=options.dry_run)
