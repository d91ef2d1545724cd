"""Compile the C++ sources of tests/support/native with the compiler that built hvpipe."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hvpipe.comm.native import native_directory

NATIVE = Path(__file__).parent / "native"
CSRC = Path(__file__).parents[2] / "csrc"


def compiler() -> str:
    """Return the MPI compiler beside this Python or on PATH. Skip the test if there is none."""
    beside = Path(sys.executable).with_name("mpicxx")
    found = str(beside) if beside.exists() else shutil.which("mpicxx")
    if found is None:
        pytest.skip("no mpicxx beside this Python nor on PATH")
    return found


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hvpipe-native-")


def build(source: str, *flags: str) -> Path:
    """Compile `source` once per set of flags. Return a library, or a program for *_driver.cc."""
    return _build(source, flags)


@functools.cache
def _build(source: str, flags: tuple[str, ...]) -> Path:
    target = Path(_folder().name) / f"{Path(source).stem}-{len(list(Path(_folder().name).iterdir()))}.so"
    engine = native_directory()
    kind = [] if source.endswith("_driver.cc") else ["-shared", "-fPIC"]
    command = [
        *(compiler(), "-std=c++17", "-Wall", "-Wextra", "-Werror", *kind, "-I", str(CSRC), *flags),
        *(str(NATIVE / source), "-o", str(target), "-L", str(engine), "-lhvpipe_core"),
        *("-Wl,-rpath," + str(engine), "-pthread"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return target
