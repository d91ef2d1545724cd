"""`hvpipe profile`: start ranks that measure a model's layers, their devices and their links."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

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

# The other ranks wait while the slowest one measures.
_TIMEOUT_S = 3600


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe profile`."""
    add_launch_options(parser, timeout_s=_TIMEOUT_S)
    parser.add_argument("--microbatch", type=int, metavar="N", help="samples per micro-batch")
    parser.add_argument(
        "--input-shape",
        action="append",
        default=[],
        metavar="[NAME=]A,B,C",
        help="axes of one sample of an input with open axes; once per such input",
    )
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help="the optimizer whose slots count as memory (default: the compiled model's, else adam)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="runs of each layer; the median counts (default: 5)",
    )
    parser.add_argument(
        "-o", "--output", default="profile.json", metavar="FILE", help="default: profile.json"
    )
    parser.add_argument("--cluster", default="cluster.json", metavar="FILE", help="default: cluster.json")
    parser.add_argument(
        "target",
        metavar="FILE.py:FUNCTION",
        help="or MODULE:FUNCTION: a function without arguments that returns the model, or the model and a "
        'micro-batch. The file is imported: put training code under `if __name__ == "__main__":`',
    )


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Check the options and start the ranks. Returns mpirun's exit code; raises HvpipeError.

    Without -np and hosts one rank measures, without mpirun.
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
    if task.is_file and not os.path.isfile(task.place):
        raise LaunchError(f"{task.place} should be a file. Received: {task.target!r}")
    one = os.path.realpath(task.profile_path)
    if one == os.path.realpath(task.cluster_path) and one != os.devnull:
        raise LaunchError(
            "--output and --cluster should be two files. "
            f"Received: --output {options.output} --cluster {options.cluster}"
        )
    command = (sys.executable, "-u", "-m", "hvpipe.keras.profiling.ranks", task.to_text())
    default = {} if "HVPIPE_TIMEOUT" in environ else {"HVPIPE_TIMEOUT": str(_TIMEOUT_S)}
    settings = {**default, **timeout_setting(options)}
    if options.ranks is None and options.hosts is None and options.hostfile is None:
        return start_alone(command, settings, environ, dry_run=options.dry_run)
    return start(launch_spec(options, command, environ), settings, environ, dry_run=options.dry_run)
