"""Old module names: each one imports its new module, or raises an error that names the replacement."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from hvpipe.moved import MOVED, moved_names

ROOT = Path(__file__).parents[1]
# Modules that import without MPI and TensorFlow.
LIGHT = sorted(old for old in MOVED if not MOVED[old].startswith("hvpipe.keras."))


def path_of(module: str) -> Path:
    return ROOT.joinpath(*module.split("."))


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_is_gone_and_its_new_module_exists(old: str) -> None:
    assert not path_of(old).with_suffix(".py").exists()
    assert not (path_of(old) / "__init__.py").exists()
    assert path_of(MOVED[old]).with_suffix(".py").exists()


@pytest.mark.parametrize("old", LIGHT)
def test_an_old_name_imports_the_new_module(old: str) -> None:
    sys.modules.pop(old, None)
    package, _, name = old.rpartition(".")
    if hasattr(importlib.import_module(package), name):
        with pytest.raises(ImportError, match=f"Write `from {MOVED[old]} import ...`. Received: .* {old}"):
            importlib.import_module(old)
        return
    try:
        says = f"{old} has moved. Write `from {MOVED[old]} import"
        with pytest.warns(DeprecationWarning, match=says) as found:
            assert importlib.import_module(old) is sys.modules[MOVED[old]]
    finally:
        vars(sys.modules[package]).pop(name, None)
        sys.modules.pop(old, None)
    assert len(found) == 1


def test_the_warning_points_at_the_import(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(
        "\nimport hvpipe.topology\n\nprint(hvpipe.topology.Cluster.__module__)\n"
    )
    command = [sys.executable, "-W", "always", str(tmp_path / "old.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert done.stdout == "hvpipe.specs.cluster\n"
    assert "old.py:2: DeprecationWarning: hvpipe.topology has moved" in done.stderr


def test_a_name_that_never_was_stays_unknown() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'hvpipe\.topologie'"):
        importlib.import_module("hvpipe.topologie")


def test_a_function_of_the_same_name_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = importlib.import_module("hvpipe.plan")
    monkeypatch.setattr(plan, "shortage", len, raising=False)
    with pytest.raises(ImportError, match="is a function now"):
        importlib.import_module("hvpipe.plan.shortage")
    assert plan.shortage is len


def test_names_of_a_module_that_became_a_package() -> None:
    find = moved_names("hvpipe.errors", {"PurePath": "pathlib"})
    with pytest.warns(
        DeprecationWarning, match=r"errors\.PurePath has moved. Write `from pathlib import PurePath`"
    ):
        assert find("PurePath").__name__ == "PurePath"
    with pytest.raises(AttributeError, match=r"module 'hvpipe\.errors' has no attribute 'Path'"):
        find("Path")
