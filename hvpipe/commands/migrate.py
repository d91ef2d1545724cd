"""`hvpipe migrate`: move Horovod scripts to hvpipe, as a diff to read or to apply."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvpipe.atomic_file import atomic_file
from hvpipe.commands.migrate_hints import find_hints
from hvpipe.commands.migrate_imports import Note, move_imports
from hvpipe.commands.migrate_source import PythonSource
from hvpipe.commands.terminal import has_colours
from hvpipe.config_file import MOST_BYTES
from hvpipe.errors import HvpipeError
from hvpipe.own_folder import read_plain

_COLOURS = {b"---": "1", b"+++": "1", b"@@ ": "36"}  # the first three characters of a line
_SIGNS = {b"-": "31", b"+": "32"}


@dataclass(frozen=True)
class Migration:
    """A file before and after.

    Args:
        name: The file, as the user named it.
        before: Its bytes.
        after: Its bytes with the imports moved.
        encoding: Its encoding.
        lines: The numbers of the lines that change.
        notes: What could not be moved, and hints, by line.
    """

    name: str
    before: bytes
    after: bytes
    encoding: str
    lines: tuple[int, ...]
    notes: tuple[Note, ...]

    @property
    def complete(self) -> bool:
        """Whether everything could be moved."""
        return all(note.kind != "not moved" for note in self.notes)

    def diff(self) -> bytes:
        """Return the change as `git apply` and `patch -p1` read it; empty if nothing changes."""
        name = self.name.lstrip("/")
        end = b"\t" if " " in name else b""
        old, new = (os.fsencode(f"{side}/{name}") + end for side in "ab")
        lines = difflib.diff_bytes(
            difflib.unified_diff, _lines(self.before), _lines(self.after), old, new, lineterm=b"\n"
        )
        return b"".join(
            line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe migrate`."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="a Python file")
    parser.add_argument("--write", action="store_true", help="change the files (default: print a diff)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the diff and the notes, or write the files.

    Args:
        options: The parsed options.
        environ: The environment, for colours.

    Returns:
        0, or 1 if something could not be moved.

    Raises:
        HvpipeError: If a file cannot be read, parsed or written. Then no file has changed, except by a failed
            write of a later one.
    """
    migrations = [migrate(name, _read(name)) for name in dict.fromkeys(options.files)]
    if options.write:
        for one in migrations:
            _write(one)
    if options.json:
        print(json.dumps(to_json(migrations, written=options.write), indent=1))
    else:
        _print(migrations, options.write, has_colours(environ))
    return 0 if all(one.complete for one in migrations) else 1


def migrate(name: str, raw: bytes) -> Migration:
    """Move a file from Horovod to hvpipe.

    Args:
        name: The file, for messages.
        raw: Its bytes.

    Returns:
        The file before and after, and notes.

    Raises:
        HvpipeError: If this Python cannot parse it.
    """
    source = PythonSource.parse(raw, name)
    moved = move_imports(source)
    notes = sorted([*moved.notes, *find_hints(source.tree)], key=lambda note: note.line)
    return Migration(name, raw, moved.after, source.encoding, moved.lines, tuple(notes))


def to_json(migrations: Sequence[Migration], written: bool) -> dict[str, Any]:
    """Return the changes as JSON.

    Args:
        migrations: The files.
        written: Whether the files have been changed.

    Returns:
        Whether all could be moved, and for each file its changed lines, diff and notes.
    """
    return {
        "complete": all(one.complete for one in migrations),
        "written": written,
        "files": [
            {
                "file": one.name,
                "lines": list(one.lines),
                "diff": one.diff().decode(one.encoding, errors="replace"),
                "notes": [{"line": note.line, "kind": note.kind, "text": note.text} for note in one.notes],
            }
            for one in migrations
        ],
    }


def _print(migrations: Sequence[Migration], written: bool, colours: bool) -> None:
    """Print diffs, or the names of written files, to stdout, and notes to stderr."""
    sys.stdout.flush()
    for one in migrations:
        if not written:
            sys.stdout.buffer.write(b"".join(_painted(one.diff())) if colours else one.diff())
        elif one.lines:
            print(f"{one.name}: changed lines: {', '.join(map(str, one.lines))}")
    sys.stdout.flush()
    for one in migrations:
        for note in one.notes:
            kind = note.kind
            if colours and sys.stderr.isatty():
                kind = f"\033[{31 if kind == 'not moved' else 36}m{kind}\033[0m"
            print(f"{one.name}:{note.line}: {kind}: {note.text}", file=sys.stderr)
        if not one.lines and one.complete:
            print(f"{one.name}: nothing to move", file=sys.stderr)


def _painted(diff: bytes) -> Iterator[bytes]:
    """Yield the lines of a diff in git's colours."""
    for line in _lines(diff):
        colour = _COLOURS.get(line[:3], _SIGNS.get(line[:1]))
        body = line.rstrip(b"\r\n")
        yield line if colour is None else f"\033[{colour}m".encode() + body + b"\033[0m" + line[len(body) :]


def _lines(raw: bytes) -> list[bytes]:
    """Split at line feeds alone, as git and patch do."""
    return re.findall(rb"[^\n]*\n|[^\n]+", raw)


def _read(name: str) -> bytes:
    try:
        return read_plain(name, MOST_BYTES)
    except OSError as error:
        raise HvpipeError(
            f"The files should be Python files. Received: {name}: {error.strerror or error}"
        ) from error


def _write(migration: Migration) -> None:
    """Replace the file by its new version, whole or not at all; it keeps its permissions."""
    if not migration.lines:
        return
    try:
        with atomic_file(migration.name) as file:
            file.write(migration.after)
    except OSError as error:
        raise HvpipeError(
            f"{migration.name} should be a file that can be written. Received: {error.strerror or error}"
        ) from error
