"""A release is of one piece: one version everywhere, all files, and a valid citation."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import hvpipe

ROOT = Path(__file__).parent.parent
VERSION = re.search(r'(?m)^version = "(.+)"$', (ROOT / "pyproject.toml").read_text())[1]
# What a release cannot do without: its build, its licence, its policy, and the pages that it links to.
WANTED = (
    *(
        "CHANGELOG.md",
        "CITATION.cff",
        "CMakeLists.txt",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "README.md",
    ),
    *("SECURITY.md", "constraints.txt", "pyproject.toml", "csrc/engine/engine.cc", "csrc/gpu/kernels.ptx"),
    *("csrc/gpu/kernels.cc.in", "docs/index.md", "examples/train.py", "hvpipe/py.typed", "tests/conftest.py"),
)


def heading() -> re.Match[str]:
    """Return the newest version of the changelog, and its date or "unreleased"."""
    found = re.search(r"(?m)^## (\S+) \((\d{4}-\d\d-\d\d|unreleased)\)$", (ROOT / "CHANGELOG.md").read_text())
    assert found is not None, "wanted: ## VERSION (YYYY-MM-DD) or ## VERSION (unreleased) in CHANGELOG.md"
    return found


@pytest.fixture
def citation() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with mkdocs, which needs Python 3.11")
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_one_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:rc\d+)?", VERSION)
    assert hvpipe.__version__ == VERSION
    assert heading()[1] == VERSION
    assert re.search(r"(?m)^version: (.+)$", (ROOT / "CITATION.cff").read_text())[1] == VERSION


@pytest.mark.parametrize("file", WANTED)
def test_a_release_has(file: str) -> None:
    assert (ROOT / file).is_file()


def test_the_sdist_has_them_too(tmp_path: Path) -> None:
    """scikit-build-core leaves out what .gitignore names. `make release-test` compares all files.

    It walks through all files of a folder, also those of venvs, so it gets a copy of git's files.
    """
    pytest.importorskip("scikit_build_core")
    if not (ROOT / ".git").exists():
        pytest.skip("no clone of the repository, whose files git lists")
    listed = "git ls-files -z --cached --others --exclude-standard"
    copy = f"{listed} | tar -c --null --ignore-failed-read -T - | tar -x -C"
    source = tmp_path / "source"
    source.mkdir()
    subprocess.run(f"{copy} '{source}'", shell=True, cwd=ROOT, check=True, timeout=120, capture_output=True)
    program = f"import scikit_build_core.build as b; b.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, timeout=120, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert sdist.name == f"hvpipe-{VERSION}.tar.gz"
    listed = subprocess.run(
        ["tar", "-tzf", sdist], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    files = {line.partition("/")[2] for line in listed.splitlines()}
    assert set(WANTED) <= files
    junk = re.compile(r"(^|/)(__pycache__|\.venv[^/]*|build|dist|runs|\.git)/|\.(so|o|pyc)$")
    assert [file for file in files if junk.search(file)] == []


def test_the_citation_has_the_fields_of_cff_1_2(citation: dict[str, Any]) -> None:
    """The schema of CFF 1.2.0 requires these four, and restricts the values of the others."""
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["cff-version"], citation["type"], citation["license"]) == (
        "1.2.0",
        "software",
        "Apache-2.0",
    )
    known = {
        "cff-version",
        "message",
        "type",
        "title",
        "abstract",
        "version",
        "license",
        "authors",
        "keywords",
    }
    assert citation.keys() <= known | {"references", "date-released", "repository-code", "doi"}
    for author in citation["authors"]:
        assert author.keys() == {"name"} or author.keys() == {"given-names", "family-names"}
    released = heading()[2]
    assert citation.get("date-released", "unreleased") == (
        "unreleased" if released == "unreleased" else date.fromisoformat(released)
    )


def test_the_studies_that_it_follows_are_cited(citation: dict[str, Any]) -> None:
    known = {
        "type",
        "title",
        "notes",
        "authors",
        "collection-title",
        "conference",
        "year",
        "start",
        "end",
        "doi",
    }
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year"} <= reference.keys() <= known
        assert reference["type"] == "conference-paper"
        assert set(reference["conference"]) == {"name"}
        assert all(set(author) == {"given-names", "family-names"} for author in reference["authors"])
        assert re.fullmatch(r"10\.\d{4,9}/\S+", reference.get("doi", "10.1234/none"))
    titles = [reference["title"].partition(":")[0] for reference in citation["references"]]
    assert titles == ["Pipe-SGD", "PipeDream"]
    pages = "".join((ROOT / page).read_text() for page in ("docs/data-parallel.md", "docs/planning.md"))
    assert all(title in pages for title in titles)
