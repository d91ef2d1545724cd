"""A hook of mkdocs: the site keeps the folders of the repository, so links work as in a checkout."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "bench/README.md")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by the pages at their paths in the repository, and what these link to."""
    pages = [*PAGES, *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]
    linked = sorted({target for page in pages for target in targets(page)} - set(pages))
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    return Files([*of_theme, *(_file(path, config) for path in (*pages, *linked))])


def targets(page: str) -> set[str]:
    """Return the files that a page links to, as paths from the repository's root."""
    source = ROOT / page
    found = [target for target in LINK.findall(source.read_text()) if "://" not in target]
    paths = [(source.parent / target).resolve() for target in found]
    return {path.relative_to(ROOT).as_posix() for path in paths if path.is_file()}


def _file(path: str, config: MkDocsConfig) -> File:
    return File(path, str(ROOT), config.site_dir, config.use_directory_urls)
