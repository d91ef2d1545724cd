"""The flags of `horovodrun` that `hvpipe run` takes too, so that a job's command line moves unchanged."""

from __future__ import annotations

import argparse
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hvpipe.errors import LaunchError

# They tune what hvpipe does not have: negotiation between ranks, an autotuner, Gloo. By number of values.
WITHOUT_EFFECT = {
    **dict.fromkeys(("--cycle-time-ms", "--cache-capacity", "--num-nccl-streams", "--thread-affinity"), 1),
    **dict.fromkeys(("--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds"), 1),
    **dict.fromkeys(("--gloo-timeout-seconds", "--autotune-log-file"), 1),
    **dict.fromkeys(("--autotune-warmup-samples", "--autotune-steps-per-sample"), 1),
    **dict.fromkeys(("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"), 1),
    **dict.fromkeys(("--disable-cache", "--no-stall-check", "--autotune", "--no-autotune"), 0),
    **dict.fromkeys(("--hierarchical-allreduce", "--no-hierarchical-allreduce"), 0),
    **dict.fromkeys(("--hierarchical-allgather", "--no-hierarchical-allgather"), 0),
    **dict.fromkeys(("--timeline-mark-cycles", "--no-timeline-mark-cycles", "--tcp"), 0),
    **dict.fromkeys(("--mpi-threads-disable", "--no-mpi-threads-disable", "--log-hide-timestamp"), 0),
}
_LEVELS = {"TRACE": "debug", "FATAL": "error"}  # the others have the same names here


class _CheckBuild(argparse.Action):
    """Runs `hvpipe doctor` and exits with its code. An action, because it needs no script."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.exit(subprocess.call([sys.executable, "-m", "hvpipe", "doctor"]))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add horovodrun's flags that have other names than those of `hvpipe run`."""
    group = parser.add_argument_group(
        "flags of horovodrun", "They are accepted so that a job moves unchanged."
    )
    group.add_argument("--num-proc", dest="ranks", type=int, metavar="N", help="the same as -np")
    group.add_argument(
        *("--network-interfaces", "--network-interface"), dest="net", metavar="NET", help="the same as --net"
    )
    group.add_argument("--mpi-args", dest="launcher_args", metavar="ARGS", help="the same as --launcher-args")
    group.add_argument("--timeline-filename", dest="trace", metavar="FILE", help="the same as --trace")
    group.add_argument(
        "--start-timeout", dest="timeout", type=float, metavar="S", help="the same as --timeout"
    )
    group.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="port of ssh on the other hosts")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    group.add_argument(
        "--fusion-threshold-mb", type=float, metavar="MB", help="size of a gradient bucket, in MiB"
    )
    group.add_argument(
        "--log-level",
        choices=("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"),
        help="least severe messages to print",
    )
    group.add_argument("--verbose", action="store_true", help="print the mpirun command before it starts")
    group.add_argument("--check-build", nargs=0, action=_CheckBuild, help="run `hvpipe doctor` and exit")
    group.add_argument("--mpi", action="store_true", help="use MPI, as hvpipe always does")
    group.add_argument("--gloo", action="store_true", help="refused: hvpipe's ranks are joined by MPI")
    for flag, values in WITHOUT_EFFECT.items():
        kept: dict[str, Any] = {"nargs": values} if values else {"action": "store_true"}
        group.add_argument(flag, help=argparse.SUPPRESS, **kept)


def rsh_agent(options: argparse.Namespace) -> str | None:
    """Return the program that reaches other hosts: --rsh-agent, or ssh with horovodrun's port and key."""
    words = []
    if options.ssh_port is not None:
        words += ["-p", str(options.ssh_port)]
    if options.ssh_identity_file is not None:
        words += ["-i", options.ssh_identity_file]
    given: str | None = options.rsh_agent
    if given is not None and words:
        raise LaunchError(
            "--rsh-agent replaces ssh, so give the port and the key to that program. "
            f"Received: --rsh-agent {given!r} and {shlex.join(words)}"
        )
    return shlex.join(["ssh", *words]) if words else given


def settings(options: argparse.Namespace) -> dict[str, str]:
    """Return the HVPIPE_* variables for these flags. Name the flags without effect on stderr.

    Raises:
        LaunchError: For --gloo, and for a fusion threshold that is not positive.
    """
    if options.gloo:
        raise LaunchError("hvpipe run joins its ranks with MPI: omit --gloo. Received: --gloo")
    found: dict[str, str] = {}
    threshold_mb = options.fusion_threshold_mb
    if threshold_mb is not None:
        if not (math.isfinite(threshold_mb) and threshold_mb > 0):
            raise LaunchError(f"--fusion-threshold-mb should be a positive number. Received: {threshold_mb}")
        found["HVPIPE_BUCKET_BYTES"] = str(max(1, int(threshold_mb * 2**20)))
    if options.log_level is not None:
        found["HVPIPE_LOG_LEVEL"] = _LEVELS.get(options.log_level, options.log_level.lower())
    unused = without_effect(vars(options))
    if unused:
        print(f"hvpipe run: these flags have no effect here: {', '.join(unused)}", file=sys.stderr)
    return found


def without_effect(given: Mapping[str, Any]) -> Sequence[str]:
    """Return the flags among the parsed options that change nothing here."""
    return [flag for flag in WITHOUT_EFFECT if given.get(flag.strip("-").replace("-", "_"))]
