"""What the build recorded, and which library versions work with which build."""

from __future__ import annotations

import sys

import pytest

from hvpipe.environment.native import BuildInfo, check_mpi, mpi_fits, read_build_info, tensorflow_fits
from hvpipe.errors import BuildMismatchError


def test_the_build_is_read_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    info = type("Info", (), {"TENSORFLOW_VERSION": None, "MPI_LIBRARY": "MPICH Version:      4.2.3"})
    monkeypatch.setitem(sys.modules, "hvpipe._build_info", info)
    assert read_build_info() == BuildInfo(None, "MPICH Version: 4.2.3", None)
    check_mpi("MPICH Version: 4.3.0")
    with pytest.raises(BuildMismatchError, match=r"built with MPICH Version: 4\.2\.3, but Open MPI"):
        check_mpi("Open MPI v5.0.11")


def test_without_a_build_there_is_no_information(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hvpipe._build_info", None)
    assert read_build_info() is None


@pytest.mark.parametrize(
    ("built", "running", "fits"),
    [
        ("Open MPI v5.0.11", "Open MPI v5.1.0", True),
        ("Open MPI v5.0.11", "Open MPI v4.1.6", False),
        ("Open MPI v5.0.11", "MPICH Version: 5.0.0", False),
    ],
)
def test_an_mpi_of_the_same_major_version_fits(built: str, running: str, fits: bool) -> None:
    assert mpi_fits(built, running) is fits


@pytest.mark.parametrize(
    ("built", "running", "fits"),
    [("2.21.0", "2.21.1", True), ("2.21.0", "2.20.0", False), ("2.21.0", "3.21.0", False)],
)
def test_a_tensorflow_of_the_same_minor_version_fits(built: str, running: str, fits: bool) -> None:
    assert tensorflow_fits(built, running) is fits
