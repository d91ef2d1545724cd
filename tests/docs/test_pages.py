"""What the pages state about the repository is true: folders, files, settings and links."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "bench" / "README.md",
    ROOT / "tests" / "BEHAVIOURS.md",
    ROOT / "tests" / "data" / "profiles" / "README.md",
]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
LINE = 120
# Files that a build adds to the package, and a marker for type checkers.
NOT_IN_THE_PAGES = {"_build_info.py", "py.typed"}


def rows(page: str) -> list[list[str]]:
    """Return the cells of every row of every table on a page."""
    lines = (ROOT / page).read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]


def folders_and_top_files() -> Iterator[str]:
    """Yield each folder of hvpipe, csrc and bench with source files, and each file at the top of hvpipe."""
    for top in ("hvpipe", "csrc", "bench"):
        for folder in sorted(path for path in (ROOT / top).rglob("*") if path.is_dir()):
            ours = [path for path in folder.iterdir() if path.suffix in (".py", ".cc", ".cu", ".toml")]
            if ours and "__pycache__" not in folder.parts:
                yield f"{folder.relative_to(ROOT).as_posix()}/"
    for path in sorted((ROOT / "hvpipe").iterdir()):
        if path.is_file() and path.suffix != ".so" and path.name not in NOT_IN_THE_PAGES:
            yield f"hvpipe/{path.name}"


def test_architecture_lists_every_folder_and_top_file() -> None:
    told = [
        row[0].strip("`") for row in rows("docs/architecture.md") if len(row) == 2 and row[0].startswith("`")
    ]
    assert sorted(set(told)) == sorted(told), "a folder stands there twice"
    missing = sorted(set(folders_and_top_files()) - set(told))
    gone = [name for name in told if not (ROOT / name).exists()]
    assert not missing, f"wanted: a line for each in the table Folders. Received: none for {missing}"
    assert not gone, f"the table Folders names what is not there: {gone}"


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_path_in_backticks_exists(page: str) -> None:
    paths = re.findall(
        r"`((?:hvpipe|csrc|bench|tests|docs|examples|faces)/[\w./-]*)`", (ROOT / page).read_text()
    )
    gone = [path for path in paths if not (ROOT / path).exists() and not (ROOT / "csrc" / path).exists()]
    assert not gone, f"{page} names what is not there: {gone}"


def test_every_setting_has_a_row_with_its_meaning() -> None:
    read = set(re.findall(r'"(HVPIPE_\w+)"', (ROOT / "hvpipe" / "environment" / "settings.py").read_text()))
    told = {row[0]: row[2] for row in rows("docs/data-parallel.md") if row[0].startswith("HVPIPE_")}
    assert set(told) == read - {"HVPIPE_DEVICE_LIBRARY"}  # for tests alone
    assert all(told.values())


def test_starting_jobs_has_every_option_of_run() -> None:
    shown = subprocess.run([sys.executable, "-m", "hvpipe", "run", "--help"], capture_output=True, check=True)
    usage = re.sub(r"\s+", " ", shown.stdout.decode().partition("flags of horovodrun:")[0])
    options = set(re.findall(r" (--?[a-z][\w-]+)", usage.partition(" options: ")[2]))
    told = set(re.findall(r"`(-[\w-]+)`", (ROOT / "docs/starting-jobs.md").read_text()))
    assert options - told <= {
        "-h",
        "-n",
        "-H",
        "--host",
        "-hostfile",
        "--help",
        "--module",
    }  # other spellings


def test_images_exclude_what_git_ignores() -> None:
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line]
    left_out = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    assert set(ignored) <= left_out


def links(page: Path) -> Iterator[str]:
    """Return the targets of links and pictures into the repository, except in code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    targets = re.findall(r"\]\(([^)\s]+)[^)]*\)", text)
    targets += re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE)
    targets += re.findall(r"<(?:img|source)[^>]* src(?:set)?=\"([^\"]+)\"", text)
    yield from (target for target in targets if "://" not in target and not target.startswith("mailto:"))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_have_a_target(page: Path) -> None:
    dead = [target for target in links(page) if not is_there(page, *target.partition("#")[::2])]
    assert not dead, f"{page.relative_to(ROOT)} has broken links: {dead}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_lines_are_short(page: Path) -> None:
    """Tables, code blocks and lines that a single link makes long may be longer."""
    text = re.sub(
        r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.M | re.S
    )
    long = [
        f"{page.relative_to(ROOT)}:{number}: {len(line)} characters"
        for number, line in enumerate(text.splitlines(), 1)
        if len(re.sub(r"\]\([^)]*\)", "]", line)) > LINE and not line.startswith("|")
    ]
    assert not long, f"wanted: {LINE} characters at most. Received:\n" + "\n".join(long)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_row_of_a_table_is_one_line(page: Path) -> None:
    wrapped = [
        line for line in page.read_text().splitlines() if "|---|" in line and re.search(r"[^|-]", line)
    ]
    assert not wrapped, f"{page.relative_to(ROOT)} has a table in a paragraph: {wrapped}"


def test_readme_fits_one_screen_and_a_half() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def is_there(page: Path, file: str, heading: str) -> bool:
    """Return whether a link on a page leads to an existing file and, if it names one, an existing heading."""
    target = page.parent / file if file else page
    if not heading:
        return target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if target.is_file() else []
    return heading in {re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-") for words in headings}
