"""The versions that pyproject.toml allows are those that every page names and that `make matrix` tries."""

from __future__ import annotations

import re
from pathlib import Path

from hvpipe.world.versions import NEWEST_KERAS, OLDEST_KERAS

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
MATRIX = (ROOT / ".ci" / "matrix.sh").read_text()
CONSTRAINTS = {path.name: path.read_text() for path in ROOT.glob("constraints*.txt")}
PAGES = {path: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}


def found(pattern: str, text: str) -> set[str]:
    return set(re.findall(pattern, text))


def the_one(pattern: str, text: str) -> str:
    (one,) = found(pattern, text)
    return str(one)


def minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def between(first: str, last: str) -> list[tuple[int, ...]]:
    return [(minor(first)[0], number) for number in range(minor(first)[1], minor(last)[1] + 1)]


def rows() -> list[list[str]]:
    return [row.split("-") for row in the_one(r"ROWS=\((.*)\)", MATRIX).split()]


def test_pages_name_the_range_of_tensorflow() -> None:
    lowest = the_one(r'"tensorflow>=([\d.]+),<2\.22"', PYPROJECT)
    pins = {the_one(r"(?m)^tensorflow==(\S+)", text) for text in CONSTRAINTS.values()}
    assert min(pins, key=minor) == lowest
    newest = ".".join(max(pins, key=minor).split(".")[:2])
    for path, text in PAGES.items():
        assert found(r"tensorflow(?:\[and-cuda\])?(>=[^\"]*)\"", text) <= {f">={lowest},<2.22"}, path
        assert found(r"2\.\d+\.\d+ to 2\.\d+", text) <= {f"{lowest} to {newest}"}, path
    assert sorted({minor(tensorflow) for _, tensorflow in rows()}) == between(lowest, newest)


def test_pages_name_the_range_of_keras() -> None:
    oldest = OLDEST_KERAS.removesuffix(".0")
    assert the_one(r'"keras>=([^,]*),<4"', PYPROJECT) == oldest
    for name, text in CONSTRAINTS.items():
        assert the_one(r"(?m)^keras==([\d.]+); python_version >= ", text) == NEWEST_KERAS, name
    for path, text in PAGES.items():
        assert found(r"\"keras>=([^\"]*)\"", text) <= {oldest}, path


def test_pages_name_the_range_of_python() -> None:
    oldest = the_one(r'requires-python = ">=(.*)"', PYPROJECT)
    newest = the_one(r"(?m)^# Python: 3\.10 to (3\.\d+)", CONSTRAINTS["constraints.txt"])
    for path, text in PAGES.items():
        assert found(r"Python (3\.\d+ to 3\.\d+)", text) <= {f"{oldest} to {newest}"}, path
    assert sorted({minor(python) for python, _ in rows()}) == between(oldest, newest)


def test_the_table_of_what_ran_has_the_rows_of_the_matrix() -> None:
    table = re.findall(
        r"(?m)^\| (3\.\d+)\.\d+ \| (2\.\S+) \| ", (ROOT / "docs" / "installing.md").read_text()
    )
    assert [list(row) for row in table] == rows()
