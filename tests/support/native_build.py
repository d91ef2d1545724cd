"""Compile the C++ sources of tests/support/native with the compiler that built hvpipe."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hvpipe.environment.native import native_directory

NATIVE = Path(__file__).parent / "native"
CSRC = Path(__file__).parents[2] / "csrc"
BUILT = Path(__file__).parents[2] / "build/tests-native"


def compiler() -> str:
    """Return the MPI compiler beside this Python or on PATH. Skip the test if there is none."""
    beside = Path(sys.executable).with_name("mpicxx")
    found = str(beside) if beside.exists() else shutil.which("mpicxx")
    if found is None:
        pytest.skip("no mpicxx beside this Python nor on PATH")
    return found


def build(source: str, *flags: str) -> Path:
    """Compile `source` once per set of flags. Return a library, or a program for *_driver.cc.

    Results stay in build/tests-native, under the hash of all that they are made from, for other workers, jobs
    and runs.
    """
    return _build(source, flags)


@functools.cache
def _build(source: str, flags: tuple[str, ...]) -> Path:
    engine = native_directory()
    kind = [] if source.endswith("_driver.cc") else ["-shared", "-fPIC"]
    command = [
        # Not the C++ bindings of Open MPI 4 and MPICH: their headers have warnings.
        *(compiler(), "-std=c++17", "-DOMPI_SKIP_MPICXX", "-DMPICH_SKIP_MPICXX"),
        *("-Wall", "-Wextra", "-Werror", *kind, "-I", str(CSRC), *flags),
        *(str(NATIVE / source), "-L", str(engine), "-lhvpipe_core"),
        *("-Wl,-rpath," + str(engine), "-pthread"),
    ]
    target = BUILT / f"{Path(source).stem}-{_hash_of(command)}.so"
    if target.exists():
        return target
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        made = Path(folder) / target.name
        done = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        os.replace(made, target)  # another worker may have made the same
    return target


def _hash_of(command: list[str]) -> str:
    """Hash a command, and the files that it may read: the engine, its sources, and those of the tests."""
    engine = native_directory()
    files = [*engine.glob("libhvpipe_core*"), *CSRC.rglob("*"), *NATIVE.iterdir()]
    found = hashlib.sha256("\0".join([*command, os.environ.get("CPATH", "")]).encode())
    found.update(os.fsencode(Path(compiler()).resolve()))
    for path in sorted(path for path in files if path.is_file()):
        found.update(os.fsencode(path) + path.read_bytes())
    return found.hexdigest()[:16]


def real_nccl() -> Path | None:
    """Return NVIDIA's NCCL if `make cuda` has fetched it; None otherwise. Its header is in ../include."""
    found = sorted(CSRC.with_name("build").glob("nccl-*/nvidia/nccl/lib/libnccl.so.2"))
    return found[-1] if found else None
