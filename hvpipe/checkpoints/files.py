"""Files with checksums: written whole or not at all, on the disk when the call returns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from hvpipe.atomic_file import atomic_file
from hvpipe.errors import HvpipeError
from hvpipe.own_folder import open_plain

_CHUNK_BYTES = 1 << 20


class UnreadableError(HvpipeError):
    """A file may be unchanged, but this rank cannot read it now, or this hvpipe cannot."""


class Sink(Protocol):
    """What bytes are written to."""

    def write(self, data: bytes | bytearray | memoryview) -> int: ...

    def flush(self) -> None: ...


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written: its name, its size and the SHA-256 of its bytes."""

    name: str
    size_bytes: int
    sha256: str


class _Hashing:
    """A file that is only appended to, and hashes what it is given."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.sha256()
        self.size_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self._file.write(data)
        self.hash.update(data)
        size_bytes = memoryview(data).nbytes
        self.size_bytes += size_bytes
        return size_bytes

    def flush(self) -> None:
        self._file.flush()


def write_file(path: Path, write: Callable[[Sink], object]) -> FileRecord:
    """Write a file, replacing one of that name. An interruption leaves the old one, or none.

    Args:
        path: The file. Its folder exists.
        write: Writes the contents to what it is given.

    Returns:
        The record to check the file by later.
    """
    with atomic_file(path, sync=True) as file:
        hashing = _Hashing(file)
        write(hashing)
    return FileRecord(path.name, hashing.size_bytes, hashing.hash.hexdigest())


def damage(folder: Path, record: FileRecord) -> str | None:
    """Return what is wrong with a file that was written before; None if it is unchanged.

    Raises:
        UnreadableError: The disk or the network failed.
    """
    path = folder / record.name
    try:
        cause = _wrong_size(path, record)
        if cause is not None:
            return cause
        found = hashlib.sha256()
        with open_plain(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                found.update(chunk)
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from error
    return None if found.hexdigest() == record.sha256 else f"{path} has another SHA-256 than when written"


def check_seen(folder: Path, *records: FileRecord) -> None:
    """Raise HvpipeError unless this rank sees files that ranks have written, in their full size."""
    for record in records:
        cause = _wrong_size(folder / record.name, record)
        if cause is not None:
            raise HvpipeError(
                "Every rank should see all files of a checkpoint, in a folder that the hosts share. "
                f"Received: {cause}"
            )


def _wrong_size(path: Path, record: FileRecord) -> str | None:
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing"
    if size_bytes == record.size_bytes:
        return None
    return f"{path} has {size_bytes} bytes instead of {record.size_bytes}"
