"""Files that are written whole or not at all, and paths that are no plain files."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvpipe.atomic_file import atomic_file


def test_an_error_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError

    with pytest.raises(RuntimeError), atomic_file(path) as file:
        file.writelines(chunks())
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_keeps_its_permissions_and_a_link_its_target(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "link"
    path.touch(0o640)
    link.symlink_to("a")
    with atomic_file(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_pipe_is_written_and_stays(tmp_path: Path) -> None:
    """root can replace any name: a plan for /dev/null must not make a plain file of it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(path.read_bytes()), daemon=True)
    reader.start()
    with atomic_file(path) as file:
        file.write(b"text")
    reader.join(10)
    assert received == [b"text"]
    assert path.is_fifo()


def test_two_writers_of_a_file(tmp_path: Path) -> None:
    """Regression: threads, and containers that share a folder, wrote to one partial file."""
    path = tmp_path / "a"
    with atomic_file(path) as one, atomic_file(path) as other:
        one.write(b"a long text")
        other.write(b"short")
    assert path.read_bytes() == b"a long text"
    assert os.listdir(tmp_path) == ["a"]


def test_a_long_name(tmp_path: Path) -> None:
    """Regression: the name of the partial file was too long."""
    path = tmp_path / ("x" * 255)
    with atomic_file(path) as file:
        file.write(b"text")
    assert os.listdir(tmp_path) == [path.name]


def test_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), atomic_file(tmp_path):
        pass
