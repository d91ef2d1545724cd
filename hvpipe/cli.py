"""The command `hvpipe`: parses the command line and runs one of the commands in hvpipe/commands/."""

from __future__ import annotations

import argparse
import errno
import io
import os
import pwd
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from hvpipe import __version__
from hvpipe.commands import bench, blackbox, doctor, join, plan, profile, report, run, stop, top, tune
from hvpipe.errors import HvpipeError

_EXIT_CODES = """exit codes: 0 success; 1 doctor found a problem, or that hosts differ in what matters, top,
join or stop found no job, report, blackbox or plan cannot read a file, plan found no plan that fits or
refuses an option's value, or the output cannot be written; 2 other wrong usage, the run could not be
started, or profile found no model to measure; 75 the job ended with a complete checkpoint, start it again;
69 an elastic job has too few ranks left; otherwise run, profile and tune return mpirun's exit code, 128 + n
after signal n; bench returns 1 if rounds failed"""
_BENCH_COMMANDS = "run SUITE, step, tune, report DIR, advise DIR, readme DIR; each has --help"


class _Command(Protocol):
    """The functions of a command's module."""

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace, environ: Mapping[str, str]) -> int: ...


# Each command: its module, its line in the help, what its own help ends with.
_COMMANDS: dict[str, tuple[_Command, str, str | None]] = {
    "run": (run, "start a Python script on several ranks", _EXIT_CODES),
    "join": (join, "let a running job go on with more ranks, or on more hosts", None),
    "stop": (stop, "let the ranks on this host write a checkpoint and end, and with them the job", None),
    "top": (top, "watch all ranks of a running job", _EXIT_CODES),
    "doctor": (doctor, "show what was built and found, here or on all hosts of a job", _EXIT_CODES),
    "report": (report, "summarise a trace that `hvpipe run --trace` wrote", None),
    "blackbox": (blackbox, "say what ended a job, from its flight recorders", None),
    "profile": (profile, "measure a model's layers, the devices and the links", _EXIT_CODES),
    "tune": (tune, "measure which all-reduce is the fastest on a cluster", _EXIT_CODES),
    "plan": (plan, "cut a model into stages for a cluster", plan.EPILOG),
    "bench": (bench, "measure native TensorFlow, Horovod and hvpipe side by side", _BENCH_COMMANDS),
}
# For these an HvpipeError is exit code 2, for the others 1.
_ERROR_IS_2 = ("run", "profile", "tune", "bench", "doctor")
# A full disk, a quota, a limit of the file's size, or a device that fails.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: sys.argv), and return the exit code."""
    code = 0
    _open_closed_streams()
    os.environ.setdefault("HOME", _home())
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model's name may have letters that a terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            code = _run(arguments)
        except SystemExit:  # after --help, or a usage error
            _flush_output()
            raise
        _flush_output()
        return code
    except BrokenPipeError:  # as in `hvpipe doctor | head`: nobody reads on
        _discard_output()
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        if error.filename is not None:
            print(f"hvpipe: {error.strerror}: {error.filename}", file=sys.stderr)
            return code or 2
        _discard_output()
        print(f"hvpipe: Cannot write output: {error.strerror}", file=sys.stderr)
        return code or 1


def _run(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    module, _, _ = _COMMANDS[options.command]
    try:
        return module.run(options, os.environ)
    except HvpipeError as error:
        print(f"hvpipe {options.command}: {error}", file=sys.stderr)
        return 2 if options.command in _ERROR_IS_2 else 1


def _open_closed_streams() -> None:
    """Give /dev/null to streams that the caller has closed. Another file would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _home() -> str:
    """Return the user's home, which a service may not have set. Open MPI does not run without HOME."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/"


def _flush_output() -> None:
    sys.stdout.flush()


def _discard_output() -> None:
    """Discard what is still buffered: Python writes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; tests/test_cli.py freezes its flags."""
    parser = argparse.ArgumentParser(
        prog="hvpipe", description="Train Keras models across MPI ranks.", epilog=_EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"hvpipe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, summary, epilog) in _COMMANDS.items():
        as_written = argparse.RawDescriptionHelpFormatter if epilog is plan.EPILOG else argparse.HelpFormatter
        module.add_options(commands.add_parser(name, help=summary, epilog=epilog, formatter_class=as_written))
    return parser
