"""`.ci/unless_passed.py` leaves a step of `make test` out only if nothing that it depends on has changed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

FAILS = [sys.executable, "-c", "raise SystemExit(3)"]
PASSES = [sys.executable, "-c", ""]
SKIPS = [sys.executable, "-c", "raise SystemExit(77)"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / ".ci"))
    return importlib.import_module("unless_passed")


@pytest.fixture
def once(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the script, for a small repository with one step and no notes."""
    for file in ("code/a.cc", "code/deep/b.h", "code/left_out/c.h", "listed/d.py", "one.txt"):
        (tmp_path / "root" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / file).write_text(file)
    inputs = script.Inputs(("code", "one.txt"), without=("code/left_out",), names=("listed",))
    monkeypatch.setattr(script, "ROOT", tmp_path / "root")
    monkeypatch.setattr(script, "NOTES", tmp_path / "notes")
    monkeypatch.setattr(script, "STEPS", {"step": inputs})
    monkeypatch.delenv("AGAIN", raising=False)
    return script


def runs(once: Any, monkeypatch: pytest.MonkeyPatch, command: list[str] = PASSES) -> bool:
    """Return whether the step's command is run."""
    called: list[list[str]] = []
    run = once.subprocess.run
    monkeypatch.setattr(
        once.subprocess, "run", lambda words, **options: called.append(words) or run(words, **options)
    )
    monkeypatch.setattr(sys, "argv", ["unless_passed.py", "step", *command])
    once.main()
    monkeypatch.setattr(once.subprocess, "run", run)
    return command in called


def test_a_step_that_has_passed_is_not_run(once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [runs(once, monkeypatch) for _ in range(3)] == [True, False, False]
    monkeypatch.setenv("AGAIN", "1")
    assert runs(once, monkeypatch)


@pytest.mark.parametrize("command", [FAILS, SKIPS])
def test_a_failure_and_a_skip_are_no_pass(
    once: Any, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    assert [runs(once, monkeypatch, command) for _ in range(2)] == [True, True]
    assert once.main() == (3 if command is FAILS else 0)


@pytest.mark.parametrize("file", ["code/a.cc", "code/deep/b.h", "code/new.h", "one.txt", "listed/new.py"])
def test_what_has_changed_runs(once: Any, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    runs(once, monkeypatch)
    before = (once.ROOT / file).read_text() if (once.ROOT / file).exists() else None
    (once.ROOT / file).write_text("new")
    assert runs(once, monkeypatch)
    if before is None:
        (once.ROOT / file).unlink()
    else:
        (once.ROOT / file).write_text(before)
    assert not runs(once, monkeypatch)  # a note for each state


def test_what_does_not_matter_does_not_run(once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(once, monkeypatch)
    for file in ("code/left_out/c.h", "listed/d.py", "code/__pycache__/a.pyc", "code/made.so"):
        (once.ROOT / file).parent.mkdir(exist_ok=True)
        (once.ROOT / file).write_text("new")
    assert not runs(once, monkeypatch)


@pytest.mark.parametrize("variable", ["CXX", "CXXFLAGS", "PATH"])
def test_another_compiler_or_program_runs(once: Any, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    runs(once, monkeypatch)
    monkeypatch.setenv(variable, "/nowhere")
    assert runs(once, monkeypatch)


def test_a_name_without_a_file(once: Any) -> None:
    with pytest.raises(FileNotFoundError, match="Received: gone"):
        once.hash_of(once.Inputs(("gone",)), [])


def test_every_step_names_what_is_there(script: Any) -> None:
    for inputs in script.STEPS.values():
        assert len(script.hash_of(inputs, [])) == 32


def test_old_notes_are_forgotten(once: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "KEPT", 2)
    for state in "abc":
        (once.ROOT / "one.txt").write_text(state)
        assert runs(once, monkeypatch)
    assert len(list(once.NOTES.iterdir())) == 2
