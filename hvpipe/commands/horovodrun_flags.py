"""The flags of `horovodrun` that `hvpipe run` takes too, so that a job's command line moves unchanged."""

from __future__ import annotations

import argparse
import math
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hvpipe.environment.horovod_variables import hvpipe_variables
from hvpipe.errors import LaunchError

# They tune what hvpipe does not have: negotiation between ranks, an autotuner, Gloo. By number of values.
WITHOUT_EFFECT = {
    **dict.fromkeys(("--cycle-time-ms", "--cache-capacity", "--num-nccl-streams", "--thread-affinity"), 1),
    "--gloo-timeout-seconds": 1,
    **dict.fromkeys(("--autotune-log-file", "--autotune-warmup-samples"), 1),
    **dict.fromkeys(("--autotune-steps-per-sample", "--autotune-bayes-opt-max-samples"), 1),
    **dict.fromkeys(("--autotune-gaussian-process-noise",), 1),
    **dict.fromkeys(("--disable-cache", "--autotune", "--no-autotune"), 0),
    **dict.fromkeys(("--hierarchical-allreduce", "--no-hierarchical-allreduce"), 0),
    **dict.fromkeys(("--hierarchical-allgather", "--no-hierarchical-allgather"), 0),
    **dict.fromkeys(("--timeline-mark-cycles", "--no-timeline-mark-cycles", "--tcp"), 0),
    **dict.fromkeys(("--stall-check", "--torus-allreduce", "--no-torus-allreduce"), 0),
    **dict.fromkeys(("--log-with-timestamp", "--log-without-timestamp", "--no-log-hide-timestamp"), 0),
    **dict.fromkeys(("--prefix-output-with-timestamp",), 0),
    **dict.fromkeys(("--mpi-threads-disable", "--no-mpi-threads-disable", "--log-hide-timestamp"), 0),
}
_SHUTDOWN = "--stall-check-shutdown-time-seconds"
_WARNING = "--stall-check-warning-time-seconds"


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
        "--fusion-threshold-mb",
        type=float,
        metavar="MB",
        help="size of a gradient bucket, in MiB; 0: a bucket for each gradient",
    )
    group.add_argument(
        _SHUTDOWN,
        type=float,
        metavar="S",
        help="the same as --timeout, from the warning time (60) on; smaller values have no effect",
    )
    group.add_argument(_WARNING, type=float, metavar="S", help="the same as --stall-warn")
    group.add_argument("--no-stall-check", action="store_true", help="the same as --stall-warn 0")
    group.add_argument(
        "--log-level",
        choices=("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"),
        help="least severe messages to print",
    )
    group.add_argument(
        "--output-filename",
        metavar="DIR",
        help="also write what each rank prints to DIR/rank.N/stdout and DIR/rank.N/stderr",
    )
    group.add_argument("--verbose", action="store_true", help="print the mpirun command before it starts")
    group.add_argument("--min-num-proc", dest="min_np", type=int, metavar="K", help="the same as --min-np")
    group.add_argument(
        "-cb", "--check-build", nargs=0, action=_CheckBuild, help="run `hvpipe doctor` and exit"
    )
    group.add_argument("--mpi", action="store_true", help="accepted: `hvpipe run` always uses MPI")
    group.add_argument("--gloo", action="store_true", help="refused: `hvpipe run` always uses MPI")
    group.add_argument("--config-file", metavar="FILE", help="refused: give what it sets as flags")
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
        LaunchError: For --gloo and --config-file, and for a number that Horovod refuses, too.
    """
    if options.gloo:
        raise LaunchError("hvpipe run joins its ranks with MPI: omit --gloo. Received: --gloo")
    if options.config_file is not None:
        raise LaunchError(
            "hvpipe run reads no configuration file: omit --config-file, and give what it sets as flags, "
            f"such as --fusion-threshold-mb. Received: --config-file {options.config_file!r}"
        )
    # As in horovodrun, flags become variables. hvpipe.environment.horovod_variables says what these mean.
    horovod: dict[str, str] = {}
    threshold_mb = _nonnegative("--fusion-threshold-mb", options.fusion_threshold_mb)
    if threshold_mb is not None:
        horovod["HOROVOD_FUSION_THRESHOLD"] = str(threshold_mb * 2**20)
    if options.log_level is not None:
        horovod["HOROVOD_LOG_LEVEL"] = options.log_level
    shutdown_s = _nonnegative(_SHUTDOWN, options.stall_check_shutdown_time_seconds)
    if shutdown_s is not None:
        horovod["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(shutdown_s)
    if options.no_stall_check:
        horovod["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    warning_s = _nonnegative(_WARNING, options.stall_check_warning_time_seconds)
    if warning_s is not None:
        horovod["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(warning_s)
    found = hvpipe_variables(horovod)
    unused = [
        *without_effect(vars(options)),
        *([_SHUTDOWN] if shutdown_s and "HVPIPE_TIMEOUT" not in found else []),
    ]
    if unused:
        print(f"hvpipe run: these flags have no effect here: {', '.join(unused)}", file=sys.stderr)
    return found


def without_effect(given: Mapping[str, Any]) -> Sequence[str]:
    """Return the flags among the parsed options that change nothing here."""
    return [flag for flag in WITHOUT_EFFECT if given.get(flag.strip("-").replace("-", "_"))]


def _nonnegative(flag: str, value: float | None) -> float | None:
    """Return the value. Raises LaunchError if it is one that horovodrun refuses, too."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise LaunchError(f"{flag} should be 0 or a positive number. Received: {value}")
    return value
