"""The pictures in docs/model-parallel.md are those that its script makes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "model-parallel" / "schedules.py"))


@pytest.mark.parametrize("name", SCRIPT["SCHEDULES"])
def test_a_picture_is_up_to_date(name: str) -> None:
    assert SCRIPT["text"](name) in (DOCS / "model-parallel.md").read_text()
