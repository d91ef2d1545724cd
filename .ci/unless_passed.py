"""Run a step of `make test`, unless it has passed with the same inputs: unless_passed.py STEP COMMAND...

A pass is noted in the user's cache folder, so it holds for every checkout. The note is named after a hash of
all that the step depends on: files of this repository, the command, installed packages, compiler, MPI and
operating system. AGAIN=1 runs the step in any case (`make test-all`). A command that exits with 77 was
skipped: that is no failure, and no pass.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvpipe/passed"
KEPT = 30  # notes of each step
SKIPPED = 77
# Variables that change what the compiler makes, and programs without which tests are skipped.
VARIABLES = ("CXX", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")
PROGRAMS = ("git", "ip", "nvidia-smi", "setarch", "ssh", "tc", "unshare")


@dataclass(frozen=True)
class Inputs:
    """What a step depends on: files, and folders with all that is in them.

    `without` leaves out folders in these. Of what is in `names`, only the files' names count.
    """

    files: tuple[str, ...]
    without: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


BUILD = ("csrc", "CMakeLists.txt", "pyproject.toml", "constraints.txt", ".ci/setup.sh", ".ci/ccache.sh")
TESTS = ("tests/support", "tests/conftest.py")
STEPS = {
    "races": Inputs(("csrc", "tests/support/native", ".ci/sanitize.sh", ".ci/ccache.sh")),
    # Only hvpipe/world/ and csrc/ call MPI (tests/test_layers.py), and most of the rest starts ranks.
    "mpich": Inputs(
        (
            *BUILD,
            *TESTS,
            ".ci/mpich.sh",
            "hvpipe",
            "tests/mpi/engine",
            "tests/test_mpi.py",
            "examples/train.py",
        ),
        without=("hvpipe/keras",),
    ),
    # A wheel can lack files. Which packages they may import is tested in tests/test_layers.py.
    "wheel": Inputs((*BUILD, ".ci/wheel.sh", "examples/train.py"), names=("hvpipe",)),
    "bench": Inputs((*BUILD, *TESTS, "bench", "hvpipe", "tests/bench", "tests/data")),
}


def main() -> int:
    """Run the command line; return its exit code."""
    step, *command = sys.argv[1:]
    note = NOTES / f"{step}-{hash_of(STEPS[step], command)}"
    if note.exists() and not os.environ.get("AGAIN"):
        day = time.strftime("%F %R", time.localtime(note.stat().st_mtime))
        print(
            f"==> NOT RUN: {step}: it passed on {day}, and nothing that it depends on has changed (AGAIN=1)"
        )
        return 0
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        keep(note)
    return 0 if code == SKIPPED else code


def hash_of(inputs: Inputs, command: list[str]) -> str:
    """Return a hash of everything that decides whether the command passes."""
    found = hashlib.sha256()
    for fact in (*command, *machine()):
        found.update(fact.replace(str(ROOT), "").encode() + b"\0")
    left_out = set(below(inputs.without))
    for path in sorted(set(below(inputs.files)) - left_out):
        found.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    for path in sorted(below(inputs.names)):
        found.update(f"{path.relative_to(ROOT)}\0".encode())
    return found.hexdigest()[:32]


def machine() -> Iterator[str]:
    """Yield what this machine has: system, user, Python's packages, compiler, MPI and other programs."""
    yield from (platform.platform(), sys.version, str(os.geteuid()))
    yield from sorted(f"{one.name}=={one.version}" for one in importlib.metadata.distributions())
    yield from (f"{name}={os.environ.get(name, '')}" for name in VARIABLES)
    yield from (f"{name}: {shutil.which(name)}" for name in PROGRAMS)
    for program in (os.environ.get("CXX", "c++"), "mpirun"):
        try:
            asked = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        except OSError as error:
            yield str(error)
        else:
            yield asked.stdout + asked.stderr


def below(names: Iterable[str]) -> Iterator[Path]:
    """Yield the files with these names, and those in the folders with these names.

    Raises:
        FileNotFoundError: If there is neither a file nor a folder of a name.
    """
    for name in names:
        path = ROOT / name
        if path.is_file():
            yield path
        elif path.is_dir():
            yield from (each for each in path.rglob("*") if each.is_file() and not is_made(each))
        else:
            raise FileNotFoundError(
                f"unless_passed.py: each name in STEPS should be a file or a folder. Received: {name}"
            )


def is_made(path: Path) -> bool:
    """Return whether a build or Python has made this file."""
    return "__pycache__" in path.parts or path.suffix == ".so" or path.name == "_build_info.py"


def keep(note: Path) -> None:
    """Note a pass, and forget all but the newest notes of its step."""
    try:
        NOTES.mkdir(parents=True, exist_ok=True)
        note.touch()
        step = note.name.rpartition("-")[0]
        for old in sorted(NOTES.glob(f"{step}-*"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError as error:
        print(f"==> the pass of {note.name} was not noted: {error}")


if __name__ == "__main__":
    sys.exit(main())
