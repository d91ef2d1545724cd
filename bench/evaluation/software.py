"""The software that an evaluation measures: this checkout, the Python that trains and its packages."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from bench import ROOT

# The files that affect figures: no documentation, tests or results.
_MEASURED = ("hvpipe", "csrc", "bench", ":(exclude)bench/results", ":(exclude)*.md")
_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "hvpipe", "mpi4py")
_PROBE = """
import json, sys
from importlib import metadata

known = {each.name: each.version for each in metadata.distributions()}
print(json.dumps({name: known[name] for name in sys.argv[1:] if name in known}))
"""


def describe_software(python: str) -> dict[str, str]:
    """Return versions by name, with the `python` and the `commit`, without those that cannot be found out.

    A Python of this checkout is named from there, since results are published.
    """
    try:
        versions: dict[str, str] = json.loads(_said([python, "-c", _PROBE, *_PACKAGES]))
    except (OSError, ValueError, subprocess.SubprocessError):
        versions = {}
    commit = _commit(ROOT)
    shown = python.removeprefix(f"{ROOT}/")
    return {"python": shown, **({"commit": commit} if commit else {}), **versions}


def _commit(checkout: Path) -> str:
    """Return the last commit of the measured files, and whether they have changed since; "" without git."""
    git = ["git", "-C", str(checkout)]
    try:
        last = _said([*git, "log", "-1", "--format=%h", "--", *_MEASURED])
        changed = _said([*git, "status", "--porcelain", "--", *_MEASURED])
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{last} with changes" if changed else last


def _said(command: list[str]) -> str:
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True, errors="replace")
    return done.stdout.strip()
