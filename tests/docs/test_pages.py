"""What in the pages must keep up: the tables of layers and settings, what an image leaves out, links."""

from __future__ import annotations

import re
import runpy
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]


def rows(page: str) -> list[list[str]]:
    """The cells of every row of every table of a page."""
    lines = (ROOT / page).read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]


def test_every_module_stands_in_its_layer_in_contributing() -> None:
    layers = runpy.run_path(str(ROOT / "tests" / "test_layers.py"))["LAYERS"]
    told = [re.findall(r"`(\w+)/?`", row[1]) for row in rows("CONTRIBUTING.md") if row[0].isdecimal()]
    unnamed = {"_build_info", "_engine", "__init__"}
    real = [[name for name in names if name not in unnamed] for names in layers]
    # One row may stand for two layers, which then follow each other.
    assert sorted(chain(*told)) == sorted(chain(*real))
    row_of = {name: number for number, names in enumerate(told) for name in names}
    assert all(len({row_of[name] for name in names}) == 1 for names in real)
    assert [row_of[names[0]] for names in real] == sorted(row_of[names[0]] for names in real)


def test_every_setting_has_its_row_and_its_meaning() -> None:
    read = set(re.findall(r'"(HVPIPE_\w+)"', (ROOT / "hvpipe" / "comm" / "discover.py").read_text()))
    told = {row[0]: row[2] for row in rows("docs/data-parallel.md") if row[0].startswith("HVPIPE_")}
    assert set(told) == read - {"HVPIPE_DEVICE_LIBRARY"}  # for tests alone
    assert all(told.values())


def test_what_git_leaves_out_images_leave_out() -> None:
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line]
    left_out = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    assert set(ignored) <= left_out


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "bench" / "README.md"]
    dead = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if not target.startswith("http") and not is_there(page, *target.partition("#")[::2])
    ]
    assert dead == []


def is_there(page: Path, file: str, heading: str) -> bool:
    """Whether a link on a page leads to a file and, if it names one, to a heading in it."""
    target = page.parent / file if file else page
    if not heading:
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if target.is_file() else []
    return heading in {re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-") for words in headings}
