"""`hvpipe run`: start a Python script on several ranks."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType

from hvpipe.commands import (
    elastic_options,
    horovodrun_flags,
    join,
    launch_options,
    rank_output,
    restarts,
    watch_options,
)
from hvpipe.errors import LaunchError

# As in the names "python3" and "python3.11".
_VERSIONS = (str(sys.version_info.major), f"{sys.version_info.major}.{sys.version_info.minor}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe run`."""
    launch_options.add_launch_options(parser, timeout_s=300)
    parser.add_argument(
        "--trace", metavar="FILE", help="write a timeline of all ranks, for https://ui.perfetto.dev"
    )
    parser.add_argument("--utilization", metavar="FILE", help="write samples of CPU and GPU utilization")
    parser.add_argument("--utilization-hz", type=float, metavar="HZ", help="samples per second (default: 10)")
    parser.add_argument(
        "--verify",
        type=_every,
        metavar="N",
        help="compare weights over ranks after every N steps; also every=N",
    )
    parser.add_argument(
        "--nonfinite",
        choices=("raise", "skip", "ignore"),
        help="what to do with steps whose gradients are NaN or Inf (default: ignore)",
    )
    parser.add_argument(
        "--strict", action="store_true", help="end the job if a rank trains what no rank averages"
    )
    watch_options.add_options(parser)
    parser.add_argument("--no-summary", action="store_true", help="print no summary at the end")
    restarts.add_options(parser)
    elastic_options.add_options(parser)
    horovodrun_flags.add_options(parser)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="the Python script, or python and the script")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="arguments of the script")


def _every(text: str) -> int:
    """Read N or every=N."""
    return int(text.removeprefix("every="))


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Start the ranks and wait. Returns an exit code that `hvpipe --help` lists; raises LaunchError."""
    with _ending_at_signals():
        return _run(options, environ)


@contextlib.contextmanager
def _ending_at_signals() -> Iterator[None]:
    """Exit at SIGTERM and SIGHUP while no rank runs: before the start, and between two.

    As the first process of a container, whom Linux spares a signal without a handler, hvpipe would miss them.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    replaced = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


def _run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    options.rsh_agent = horovodrun_flags.rsh_agent(options)
    settings = _settings(options)
    command = _rank_command(options)
    if options.output_filename is not None:
        command = rank_output.recorded(command, options.output_filename, dry_run=options.dry_run)
    spec = launch_options.launch_spec(options, command, environ)
    if options.verbose and not options.dry_run:
        launch_options.start(spec, settings, environ, dry_run=True)
    supervised = restarts.Restarting(options, join.Places(spec.ranks, spec.hosts), spec.mpirun.family)
    before = _written(settings)
    while True:
        code = launch_options.start(spec, settings, environ, dry_run=options.dry_run, supervised=supervised)
        if not supervised.joined:
            if code != 0 and not options.dry_run:
                _tell_of_missing(settings, before)
            return code
        environ = {**environ, **supervised.allocation}
        try:
            spec = supervised.places.of(spec)
        except LaunchError as error:  # --bind core with more ranks than cores
            print(f"hvpipe run: the job goes back to its old ranks. {error}", file=sys.stderr, flush=True)
            supervised.places = join.Places(spec.ranks, spec.hosts)
        spec = replace(spec, command=rank_output.appending(spec.command))
        print(f"hvpipe run: the job goes on with {supervised.places}.", file=sys.stderr, flush=True)


def _written(settings: Mapping[str, str]) -> dict[str, int]:
    """Return when the trace and the utilization file were last written, by path; 0: never."""
    paths = [settings[name] for name in ("HVPIPE_TRACE", "HVPIPE_UTILIZATION") if name in settings]
    return {path: os.stat(path).st_mtime_ns if os.path.exists(path) else 0 for path in paths}


def _tell_of_missing(settings: Mapping[str, str], before: Mapping[str, int]) -> None:
    """Say which files a job that was interrupted, or failed, has not written."""
    for path, time_ns in _written(settings).items():
        if time_ns == before[path]:
            print(
                f"hvpipe run: {path} is not written: the ranks write it together at their end, and this job "
                "was interrupted or failed. Train fewer steps to see where their time goes.",
                file=sys.stderr,
                flush=True,
            )


def _rank_command(options: argparse.Namespace) -> tuple[str, ...]:
    """Return each rank's command. As with mpirun, `python train.py` is the same as `train.py`."""
    words = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    if options.module:
        return (sys.executable, "-u", "-m", options.script, *words)
    if not _is_python(options.script):
        words = [options.script, *words]
    # A word that begins with a dash is an option for Python itself.
    if not words or not (words[0].startswith("-") or os.path.isfile(words[0])):
        raise LaunchError(f"The script should be a file. Received: script={(words or [''])[0]!r}")
    return (sys.executable, "-u", *words)


def _is_python(word: str) -> bool:
    """Tell whether a word names this Python and no script; raise LaunchError if it names another Python."""
    path = Path(word)
    version = re.fullmatch(r"python((?:\d+(?:\.\d+)?)?)", path.name)
    if version is None or (path.name == word and os.path.isfile(path)):
        return False
    beside = path.name == word or path.parent.resolve() == Path(sys.executable).parent.resolve()
    if not beside or version[1] not in ("", *_VERSIONS):
        raise LaunchError(
            "The script should run on the Python that hvpipe is installed in: omit the Python, or use the "
            f"hvpipe of the other one. Received: {word}, and hvpipe in {sys.executable}"
        )
    return True


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """Return the HVPIPE_* variables that pass the options on to the ranks."""
    settings = {
        **horovodrun_flags.settings(options),
        **launch_options.timeout_setting(options),
        **watch_options.settings(options),
    }
    for variable, option, value in (
        ("HVPIPE_TRACE", "--trace", options.trace),
        ("HVPIPE_UTILIZATION", "--utilization", options.utilization),
    ):
        if value is not None:
            settings[variable] = launch_options.output_path(option, value)
    if options.utilization_hz is not None:
        hz = options.utilization_hz
        if not (math.isfinite(hz) and hz > 0):
            raise LaunchError(f"--utilization-hz should be a positive number. Received: {hz}")
        settings["HVPIPE_UTILIZATION_HZ"] = f"{hz:g}"
    if options.verify is not None:
        if options.verify < 1:
            raise LaunchError(f"--verify should be a positive number of steps. Received: {options.verify}")
        settings["HVPIPE_VERIFY"] = str(options.verify)
    if options.nonfinite is not None:
        settings["HVPIPE_NONFINITE"] = options.nonfinite
    if options.strict:
        settings["HVPIPE_STRICT"] = "1"
    settings |= elastic_options.settings(options)
    if not options.no_summary:
        settings["HVPIPE_SUMMARY"] = "1"
    return settings
