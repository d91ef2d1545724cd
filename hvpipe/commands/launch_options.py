"""The options that say how ranks are started, of the commands that start some, and what they lead to."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvpipe.commands import doctor, launch
from hvpipe.commands.supervise import supervise
from hvpipe.errors import LaunchError
from hvpipe.monitor import core_binding as placement

# What says that a batch system has chosen the hosts.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE", "FLUX_JOB_ID")


def add_launch_options(parser: argparse.ArgumentParser, *, timeout_s: int) -> None:
    """Add them to a command whose longest wait for another rank is `timeout_s` unless said otherwise."""
    parser.add_argument(
        "-np", "-n", dest="ranks", type=int, metavar="N", help="ranks (default: all slots of the hosts)"
    )
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        *("-H", "--hosts", "--host"),
        metavar="A:2,B:2",
        help="hosts and how many ranks each takes (default: here)",
    )
    hosts.add_argument("--hostfile", metavar="FILE", help="the same from a file, a host a line: A slots=2")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help=f"longest wait for another rank (default: {timeout_s})"
    )
    parser.add_argument(
        "--bind", choices=launch.BINDINGS, default="none", help="bind ranks to cores (default: none)"
    )
    parser.add_argument("--net", metavar="NET", help="interface or CIDR that carries the data between hosts")
    parser.add_argument(
        "--rsh-agent", metavar="SCRIPT", help="program that reaches other hosts (default: ssh)"
    )
    parser.add_argument("--mpirun", metavar="PATH", help="the mpirun to use (default: the one that fits)")
    parser.add_argument(
        "--launcher-args", default="", metavar="ARGS", help="more arguments for mpirun, one string"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the mpirun command, run nothing")


def launch_spec(
    options: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str]
) -> launch.LaunchSpec:
    """Check what was asked for, and look up what was left open; `command` is what each rank runs."""
    hosts = _hosts(options)
    if options.ranks is None and not hosts:
        raise LaunchError(
            f"The number of ranks is wanted: hvpipe {options.command} -np 2 ... Received: no -np, no --hosts"
        )
    return launch.LaunchSpec(
        mpirun=_mpirun(options, environ),
        ranks=options.ranks if options.ranks is not None else sum(host.slots for host in hosts),
        command=tuple(command),
        hosts=hosts,
        cores=placement.affordable_cores(),
        as_root=os.geteuid() == 0,
        allocated=any(name in environ for name in _ALLOCATIONS),
        bind=options.bind,
        rsh_agent=_absolute_program(options.rsh_agent),
        network=options.net,
        launcher_args=tuple(shlex.split(options.launcher_args)),
    )


def timeout_setting(options: argparse.Namespace) -> dict[str, str]:
    """HVPIPE_TIMEOUT, where it was asked for."""
    if options.timeout is None:
        return {}
    if not (math.isfinite(options.timeout) and options.timeout > 0):
        raise LaunchError(f"--timeout should be a positive number of seconds. Received: {options.timeout}")
    return {"HVPIPE_TIMEOUT": f"{options.timeout:g}"}


def output_path(option: str, value: str) -> str:
    """A file to write, absolute: ranks may run elsewhere. LaunchError where it cannot be made."""
    target = Path(value).absolute()
    if not target.parent.is_dir() or target.is_dir():
        raise LaunchError(f"{option} should be a file in a folder that exists. Received: {option} {value!r}")
    if target.exists() and not target.is_file():
        return str(target)  # a device or a pipe
    try:
        # Files are written beside their place first, so that is what must be possible.
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise LaunchError(
            f"{option} should be a file in a folder that can be written to. "
            f"Received: {option} {value!r}: {error.strerror}"
        ) from error
    return str(target)


def start(
    spec: launch.LaunchSpec, settings: Mapping[str, str], environ: Mapping[str, str], *, dry_run: bool
) -> int:
    """Run the ranks with these settings in their environment; returns mpirun's exit code."""
    settings = {**settings, **launch.thread_settings(spec, environ)}
    exported = launch.exported_names({**environ, **settings})
    command = launch.mpirun_command(replace(spec, export=exported))
    return start_alone(command, settings, environ, dry_run=dry_run)


def start_alone(
    command: Sequence[str], settings: Mapping[str, str], environ: Mapping[str, str], *, dry_run: bool
) -> int:
    """Run a command as it is with these settings in its environment; returns its exit code."""
    if dry_run:
        print(shlex.join(["env", *(f"{name}={value}" for name, value in settings.items()), *command]))
        return 0
    return supervise(command, {**environ, **settings})


def _hosts(options: argparse.Namespace) -> tuple[launch.HostSlots, ...]:
    """Those that were named; none where ranks run here or where a batch system says."""
    if options.hosts is not None:
        return launch.parse_hosts(options.hosts)
    if options.hostfile is None:
        return ()
    try:
        text = Path(options.hostfile).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            "--hostfile should be a text file that can be read. "
            f"Received: --hostfile {options.hostfile!r}: {error}"
        ) from error
    return launch.parse_hostfile(text, options.hostfile)


def _mpirun(options: argparse.Namespace, environ: Mapping[str, str]) -> launch.Mpirun:
    if options.mpirun is not None:
        return launch.identify(options.mpirun)
    build = doctor.read_build()
    built_with = build.mpi if build is not None else None
    mpirun = launch.find_mpirun(launch.script_folders(), environ.get("PATH"), built_with)
    if built_with is not None and not launch.belongs(mpirun, built_with):
        print(
            f"hvpipe {options.command}: warning: hvpipe was built with {built_with}, but the only mpirun "
            f"found is {mpirun.name} ({mpirun.path}); see `hvpipe doctor`",
            file=sys.stderr,
        )
    return mpirun


def _absolute_program(name: str | None) -> str | None:
    """mpirun's daemons start elsewhere: a relative path would mean something else there."""
    if name is None:
        return None
    words = shlex.split(name)
    found = shutil.which(words[0]) if words else None
    if found is None:
        raise LaunchError(f"--rsh-agent should be a program that can be run. Received: --rsh-agent {name!r}")
    return shlex.join([str(Path(found).absolute()), *words[1:]])
