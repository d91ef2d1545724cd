"""What distinguishes one state of the software from another."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from bench.evaluation import software
from bench.evaluation.software import describe_software

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]


def git(checkout: Path, *words: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(checkout), *author, *words], check=True, capture_output=True)


def test_versions_are_those_of_the_training_python() -> None:
    found = describe_software(sys.executable)
    assert found["python"] == sys.executable.removeprefix(f"{ROOT}/")
    assert found["hvpipe"] == metadata.version("hvpipe")
    assert set(describe_software("/absent")) <= {"python", "commit"}


@pytest.mark.skipif(shutil.which("git") is None, reason="wants git")
def test_the_commit_covers_the_measured_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "ROOT", tmp_path)

    def commit() -> str | None:
        return describe_software("/absent").get("commit")

    assert commit() is None
    git(tmp_path, "init", "-q")
    for folder in ("hvpipe", "csrc", "bench", "docs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("1\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "one")
    first = commit()
    assert first
    for file in ("docs/file", "bench/README.md"):
        (tmp_path / file).write_text("2\n")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-a", "-m", "two")
    assert commit() == first
    for file in ("csrc/file", "bench/new"):
        (tmp_path / file).write_text("2\n")
        assert commit() == f"{first} with changes"
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-q", "-m", "three")
        assert commit() not in (None, first)
        first = commit()


def _imported(file: Path) -> set[str]:
    """Return the packages that a file imports, at any depth."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    from_some = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in (*plain, *from_some)}


def test_the_bench_extra_installs_what_the_benchmarks_import() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["bench"]]
    brought = {re.split(r"[^\w-]", each)[0] for each in wanted}
    names = {"sklearn": "scikit-learn", "tomllib": "tomli"}
    without = {"bench", "horovod", "hvpipe", "jax", "torch"} | sys.stdlib_module_names - {"tomllib"}
    imported = {name for file in (ROOT / "bench").rglob("*.py") for name in _imported(file)} - without
    assert {names.get(name, name) for name in imported} <= brought
