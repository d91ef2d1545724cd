"""The pictures in the docs are up to date with the scripts that draw them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TIMELINE = runpy.run_path(str(DOCS / "readme" / "timeline.py"))
SCRIPT = runpy.run_path(str(DOCS / "model-parallel" / "schedules.py"))


@pytest.mark.parametrize("name", SCRIPT["SCHEDULES"])
def test_a_picture_is_up_to_date(name: str) -> None:
    assert SCRIPT["text"](name) in (DOCS / "model-parallel.md").read_text()


def test_the_timeline_is_up_to_date() -> None:
    assert TIMELINE["svg"]() == (DOCS / "readme" / "timeline.svg").read_text()
