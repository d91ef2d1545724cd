"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_LONGEST = 255
"""The most bytes of a file's name."""


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], *, sync: bool = False) -> Iterator[BinaryIO]:
    """Open a file for writing. It gets its name when the block ends, and an error leaves what was there.

    A symbolic link stays, and its target is replaced; a file keeps its permissions. A device or a pipe, such
    as /dev/null, is written directly.

    Args:
        path: The file. Its folder exists.
        sync: Whether the file and its name are on the disk afterwards.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If no file can have this name.
    """
    target = Path(path)
    if target.exists() and not target.is_file():
        with open(target, "wb") as file:
            yield file
        return
    target = target.resolve()
    # Threads, and containers whose processes have the same numbers, may write the same file.
    number = f".{secrets.randbelow(10**9)}.partial"
    fits = len(os.fsencode(target.name)) + len(number) < _LONGEST
    partial = target.with_name(f".{target.name}{number}" if fits else number)
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            if target.exists():
                shutil.copymode(target, partial)
            if sync:
                os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    if sync:
        sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, if its file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
