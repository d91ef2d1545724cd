"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hvpipe.own_folder import refuse_stranger

_LONGEST = 255
"""The most bytes of a file's name."""
_MOST_LINKS = 40  # as in Linux


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], *, sync: bool = False) -> Iterator[BinaryIO]:
    """Open a file for writing. It gets its name when the block ends, and an error leaves what was there.

    A symbolic link stays, and its target is replaced; a file keeps its permissions. A device or a pipe, such
    as /dev/null, is written directly. In a folder where others can write, those of strangers are refused.

    Args:
        path: The file. Its folder exists.
        sync: Whether the file and its name are on the disk afterwards.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If no file can have this name.
    """
    target = target_of(path)
    if target.exists() and not target.is_file():
        with open(target, "wb") as file:
            yield file
        return
    # Threads, and containers whose processes have the same numbers, may write the same file.
    number = f".{int.from_bytes(os.urandom(4), sys.byteorder)}.partial"
    fits = len(os.fsencode(target.name)) + len(number) < _LONGEST
    partial = target.with_name(f".{target.name}{number}" if fits else number)
    with open(partial, "xb") as file:  # follows no link
        try:
            yield file
            file.flush()
            _keep_permissions(target, file.fileno())
            if sync:
                os.fsync(file.fileno())
            file.close()
            os.replace(partial, target)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    if sync:
        sync_folder(target.parent)


def target_of(path: str | os.PathLike[str]) -> Path:
    """Return the file that `atomic_file` would replace or write: what symbolic links lead to.

    Raises:
        PermissionError: A link, pipe or device may have been laid there by another user. `strerror` names it.
        OSError: The links are a circle.
        ValueError: If no file can have this name.
    """
    target = Path(path)
    for _ in range(_MOST_LINKS):
        if not os.path.lexists(target):
            return target
        found = target.lstat()
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            refuse_stranger(target)
        if not stat.S_ISLNK(found.st_mode):
            return target
        following = target.parent / os.readlink(target)
        if target.exists() and not os.path.lexists(following):  # /dev/stdout
            return target
        target = following
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))


def _keep_permissions(target: Path, partial: int) -> None:
    """Give the new file the permissions of the one that it replaces, if that is of the same user."""
    with contextlib.suppress(FileNotFoundError):
        before = target.stat()
        if before.st_uid == os.fstat(partial).st_uid:
            os.fchmod(partial, before.st_mode & 0o777)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, if its file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
