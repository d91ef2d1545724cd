"""The software that an evaluation measures: this checkout, the Python that trains and its packages."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

_ROOT = Path(__file__).parents[2]
# The files that affect figures: no documentation, tests or results.
_MEASURED = ("hvpipe", "csrc", "bench", ":(exclude)bench/results", ":(exclude)*.md")
_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "hvpipe", "mpi4py")
_PROBE = """
import json, sys
from importlib import metadata

found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def describe_software(python: str) -> dict[str, str]:
    """Return versions by name, with the `python` and the `commit`, without those that cannot be found out."""
    commit = _commit(_ROOT)
    return {"python": python, **({"commit": commit} if commit else {}), **_versions(python)}


def _versions(python: str) -> dict[str, str]:
    try:
        said = subprocess.run(
            [python, "-c", _PROBE, *_PACKAGES], check=True, timeout=60, capture_output=True, text=True
        )
        found: dict[str, str] = json.loads(said.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return found


def _commit(checkout: Path) -> str:
    """Return the last commit of the measured files, a digest of changes and new files; "" without git."""
    try:
        last = _git(checkout, "log", "-1", "--format=%h")
        changes = _git(checkout, "diff", "HEAD").encode()
        for name in _git(checkout, "ls-files", "--others", "--exclude-standard", "-z").split("\0")[:-1]:
            changes += name.encode() + (checkout / name).read_bytes()
    except (OSError, subprocess.SubprocessError):
        return ""
    digest = hashlib.blake2b(changes, digest_size=4).hexdigest()
    return f"{last} with changes {digest}" if changes else last


def _git(checkout: Path, *words: str) -> str:
    command = ["git", "-C", str(checkout), *words, "--", *_MEASURED]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, errors="replace")
    return done.stdout.strip()
