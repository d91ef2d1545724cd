"""The options of commands that start ranks, and the start itself."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hvpipe.atomic_file import target_of
from hvpipe.commands import launch, mpirun
from hvpipe.commands.hosts import HostSlots, parse_hostfile, parse_hosts
from hvpipe.commands.supervise import JOB_FOLDER, supervise
from hvpipe.config_file import MOST_BYTES
from hvpipe.environment.native import read_build_info
from hvpipe.environment.settings import port_range
from hvpipe.errors import HvpipeError, LaunchError
from hvpipe.monitor import core_binding
from hvpipe.own_folder import read_plain

Supervise = Callable[[Sequence[str], Mapping[str, str]], int]
"""Runs a command with an environment; returns its exit code."""

# Variables of batch systems that have chosen the hosts.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE", "FLUX_JOB_ID")


def add_launch_options(parser: argparse.ArgumentParser, *, timeout_s: int) -> None:
    """Add the options to a command; `timeout_s` is its default for the longest wait for another rank."""
    parser.add_argument(
        "-np",
        "-n",
        dest="ranks",
        type=int,
        metavar="N",
        help="number of ranks (default: all slots of the hosts)",
    )
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        *("-H", "--hosts", "--host"),
        metavar="A:2,B:2",
        help="hosts and how many ranks each takes (default: this host)",
    )
    hosts.add_argument(
        *("-hostfile", "--hostfile"),
        metavar="FILE",
        help="the same from a file, one host per line: A slots=2",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help=f"longest wait for another rank, in seconds (default: {timeout_s})",
    )
    parser.add_argument(
        "--bind", choices=launch.BINDINGS, default="none", help="bind ranks to cores (default: none)"
    )
    parser.add_argument("--net", metavar="NET", help="interface or CIDR that carries the data between hosts")
    parser.add_argument(
        "--ports", metavar="A-B", help="ports at which MPI and hvpipe listen, as 40000-40100 (default: any)"
    )
    parser.add_argument(
        "--rsh-agent", metavar="SCRIPT", help="program that reaches other hosts (default: ssh)"
    )
    parser.add_argument(
        "--mpirun", metavar="PATH", help="the mpirun to use (default: the one of hvpipe's MPI)"
    )
    parser.add_argument(
        "--launcher-args", default="", metavar="ARGS", help="more arguments for mpirun, in one string"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the mpirun command and run nothing")


def given(options: argparse.Namespace) -> list[str]:
    """Return those of `add_launch_options` that the user gave, as "--net"."""
    parser = argparse.ArgumentParser(add_help=False)
    add_launch_options(parser, timeout_s=0)
    defaults = vars(parser.parse_args([]))
    names = [name for name, default in defaults.items() if getattr(options, name) != default]
    return ["-np" if name == "ranks" else f"--{name.replace('_', '-')}" for name in names]


def launch_spec(
    options: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str]
) -> launch.LaunchSpec:
    """Check the options and fill in the defaults; `command` is what each rank runs."""
    hosts = _hosts(options)
    ranks = options.ranks
    if ranks is None:
        tasks = environ.get("SLURM_NTASKS", "")
        ranks = sum(host.slots for host in hosts) or (int(tasks) if tasks.isdecimal() else 0)
        if ranks == 0:
            name = options.command + (" --all-hosts" if getattr(options, "all_hosts", False) else "")
            raise LaunchError(f"Give the number of ranks, hvpipe {name} -np 2 ..., or --hosts")
    return launch.LaunchSpec(
        mpirun=_mpirun(options, environ),
        ranks=ranks,
        command=tuple(command),
        hosts=hosts,
        cores=core_binding.affordable_cores(),
        as_root=os.geteuid() == 0,
        allocated=any(name in environ for name in _ALLOCATIONS),
        bind=options.bind,
        rsh_agent=_absolute_program(options.rsh_agent),
        network=options.net,
        ports=_ports(options.ports),
        launcher_args=tuple(_words("--launcher-args", options.launcher_args)),
        elastic=getattr(options, "elastic", False),
    )


def timeout_setting(options: argparse.Namespace) -> dict[str, str]:
    """Return HVPIPE_TIMEOUT if the user gave --timeout."""
    if options.timeout is None:
        return {}
    if not (math.isfinite(options.timeout) and options.timeout > 0):
        raise LaunchError(f"--timeout should be a positive number of seconds. Received: {options.timeout}")
    return {"HVPIPE_TIMEOUT": f"{options.timeout:g}"}


def output_path(option: str, value: str) -> str:
    """Return the absolute path of a file to write, since ranks may run elsewhere.

    Raises:
        LaunchError: If the file cannot be written.
    """
    target = Path(value).absolute()
    if not os.path.isdir(target.parent) or os.path.isdir(target):
        raise LaunchError(f"{option} should be a file in a folder that exists. Received: {option} {value!r}")
    try:
        final = target_of(target)
        if os.path.exists(target) and not target.is_file():
            return str(target)  # a device or a pipe
        # Files are first written beside their final place.
        with tempfile.NamedTemporaryFile(dir=final.parent, prefix="."), suppress(FileNotFoundError):
            os.stat(target)  # no file can have a name that is too long
    except OSError as error:
        raise LaunchError(
            f"{option} should be a file in a writable folder. Received: {option} {value!r}: {error.strerror}"
        ) from error
    return str(target)


def start(
    spec: launch.LaunchSpec,
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    dry_run: bool,
    supervised: Supervise = supervise,
) -> int:
    """Run the ranks with these settings in their environment; return mpirun's exit code.

    `supervised(command, environ)` runs mpirun.
    """
    settings = {
        **settings,
        **launch.thread_settings(spec, environ),
        **({"HVPIPE_PORTS": f"{spec.ports[0]}-{spec.ports[-1]}"} if spec.ports else {}),
        **launch.launcher_settings(spec, environ),
    }
    # `supervised` adds the job folder to mpirun's environment.
    exported = launch.exported_names({**environ, **settings, **({} if dry_run else {JOB_FOLDER: ""})})
    command = launch.mpirun_command(replace(spec, export=exported))
    return start_alone(command, settings, environ, dry_run=dry_run, supervised=supervised)


def start_alone(
    command: Sequence[str],
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    dry_run: bool,
    supervised: Supervise = supervise,
) -> int:
    """Run a command as it is, with these settings in its environment; return its exit code."""
    if dry_run:
        print(shlex.join(["env", *(f"{name}={value}" for name, value in settings.items()), *command]))
        return 0
    return supervised(command, {**environ, **settings})


def _hosts(options: argparse.Namespace) -> tuple[HostSlots, ...]:
    """Return the hosts that the user named; none if ranks run here or a batch system chooses the hosts."""
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if options.hostfile is None:
        return ()
    try:
        text = read_plain(options.hostfile, MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"--hostfile should be a readable text file. Received: --hostfile {options.hostfile!r}: {error}"
        ) from error
    return parse_hostfile(text, options.hostfile)


def _mpirun(options: argparse.Namespace, environ: Mapping[str, str]) -> mpirun.Mpirun:
    if options.mpirun is not None:
        return mpirun.identify(options.mpirun)
    build = read_build_info()
    built_with = build.mpi if build is not None else None
    found = mpirun.find_mpirun(mpirun.script_folders(), environ.get("PATH"), built_with)
    if built_with is not None and not mpirun.belongs(found, built_with):
        print(
            f"hvpipe {options.command}: warning: hvpipe was built with {built_with}, but the only mpirun "
            f"found is {found.name} ({found.path}); see `hvpipe doctor`",
            file=sys.stderr,
        )
    return found


def _ports(text: str | None) -> range | None:
    try:
        return None if text is None else port_range(text)
    except HvpipeError as error:
        raise LaunchError(
            f"--ports should be a range of ports from 1 to 65535, as 40000-40100. Received: --ports {text!r}"
        ) from error


def _words(option: str, text: str) -> list[str]:
    """Split an option's text as a shell does."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"{option} should have balanced quotes. Received: {text!r} ({error})") from None


def _absolute_program(name: str | None) -> str | None:
    """Make a program's path absolute: mpirun's daemons start in other folders."""
    if name is None:
        return None
    words = _words("--rsh-agent", name)
    found = shutil.which(words[0]) if words else None
    if found is None:
        raise LaunchError(f"--rsh-agent should be an executable program. Received: --rsh-agent {name!r}")
    return shlex.join([str(Path(found).absolute()), *words[1:]])
