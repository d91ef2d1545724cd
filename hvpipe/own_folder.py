"""Folders and files in places where other users can write: which of them hvpipe makes, opens and obeys."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_CHUNK_BYTES = 1 << 20
# What a shell makes of `<(command)`: the user hands over a pipe that is open already.
_GIVEN = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")


def why_not_own(folder: Path, user: int | None = None) -> str | None:
    """Return why a folder is not this user's alone, with its owner; None if it is, or if nothing is there.

    Args:
        folder: The folder. A symbolic link is none, whatever it leads to.
        user: Who owns the files that this process makes there (`user_on`), on a file system that may say
            otherwise. Then others may write to the folder. None: this user, and nobody else may write.
    """
    try:
        found = folder.lstat()
    except OSError as error:
        return None if isinstance(error, FileNotFoundError) else f"{folder}: {error.strerror}"
    wanted = os.geteuid() if user is None else user
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is {_kind(found.st_mode)} of {user_name(found.st_uid)}, not a folder"
    if found.st_uid != wanted:
        return f"{folder} belongs to {user_name(found.st_uid)}, not to {user_name(wanted)}"
    if user is None and found.st_mode & _OTHERS_WRITE:
        return f"others can write to {folder} of {user_name(found.st_uid)}: {stat.filemode(found.st_mode)}"
    return None


def is_own(folder: Path, user: int | None = None) -> bool:
    """Tell whether a folder is there and is this user's alone, as `why_not_own` sees it."""
    return os.path.lexists(folder) and why_not_own(folder, user) is None


def make_own(folder: Path, user: int | None = None) -> None:
    """Make a folder for this user alone. One that is there already must be like that.

    Raises:
        PermissionError: It is another user's, or a link. `strerror` names it and its owner.
        OSError: It cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_own(folder, user)


def check_own(folder: Path, user: int | None = None) -> None:
    """Raise PermissionError, as `make_own` does, if a folder is there and is not this user's."""
    if (why := why_not_own(folder, user)) is not None:
        raise PermissionError(errno.EACCES, why)


def user_on(folder: Path) -> int:
    """Return who owns what this process makes in a folder: a file server may give it to another user.

    Raises:
        OSError: It cannot make files there.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid


def user_name(user: int) -> str:
    """Return the name and the number of a user."""
    try:
        return f"{pwd.getpwuid(user).pw_name} (user {user})"
    except KeyError:
        return f"user {user}"


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a plain file for reading, at once: a pipe without a writer would not open, a device would not end.

    Raises:
        OSError: It cannot be read, or is no plain file.
    """
    given = os.fspath(path).startswith(_GIVEN)
    if not given:  # first, because opening a device may do something
        _check_plain(os.stat(path), path)
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if given else os.O_NONBLOCK))
    try:
        if not given:
            _check_plain(os.fstat(number), path)
            os.set_blocking(number, True)
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_plain(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Read a plain file, as `open_plain` opens it.

    Raises:
        OSError: It cannot be read, is no plain file, or has more bytes.
    """
    with open_plain(path) as file:
        return read_at_most(file, most_bytes, path)


def read_at_most(file: BinaryIO, most_bytes: int, path: str | os.PathLike[str]) -> bytes:
    """Read an open file to its end. Raises OSError if it has more bytes; `path` names it."""
    chunks, left = [], most_bytes
    while chunk := file.read(_CHUNK_BYTES):
        left -= len(chunk)
        if left < 0:
            raise OSError(errno.EFBIG, f"more than {most_bytes:,} bytes", os.fspath(path))
        chunks.append(chunk)
    return b"".join(chunks)


def read_own(path: Path, most_bytes: int, users: Collection[int] = ()) -> bytes | None:
    """Return what this user, or one of the others, has written; None if nothing like that is there.

    Links, pipes and other users' files do not count.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(number, "rb") as file:
            found = os.fstat(number)
            if stat.S_ISREG(found.st_mode) and found.st_uid in (os.geteuid(), *users):
                return read_at_most(file, most_bytes, path)
    except OSError:
        pass
    return None


def refuse_stranger(path: Path) -> None:
    """Refuse to follow or write a link, pipe or device that a stranger may have put in the place of a file.

    In a folder where others can write, it must be of this user or root.

    Raises:
        PermissionError: It is not. `strerror` names it and its owner.
    """
    trusted, found, folder = (os.geteuid(), 0), path.lstat(), os.stat(path.parent)
    others_write = folder.st_uid not in trusted or folder.st_mode & _OTHERS_WRITE
    if others_write and found.st_uid not in trusted:
        what = f"{_kind(found.st_mode)} of {user_name(found.st_uid)}"
        raise PermissionError(errno.EACCES, f"{path} is {what}, in a folder where others can write")


def _check_plain(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"{_kind(found.st_mode)} instead of a plain file", os.fspath(path))


def _kind(mode: int) -> str:
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    kinds |= {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder"}
    return kinds.get(stat.S_IFMT(mode), "a device")
