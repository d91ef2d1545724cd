"""Small checkpoints of two ranks without MPI, and a process that dies at the n-th file operation."""

from __future__ import annotations

import builtins
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvpipe.checkpoints.manifest import Manifest, Position
from hvpipe.checkpoints.usable import newest_usable
from hvpipe.checkpoints.writer import Snapshot, Writer, WriterOptions

RANKS = 2


class Alone:
    """One rank that resumes."""

    rank, size = 0, 1

    def broadcast(self, value: str | None) -> str | None:
        return value

    def gather(self, value: str | None) -> list[str | None]:
        return [value]


def values(step: int, rank: int) -> dict[str, Any]:
    """Return what a rank writes at a step."""
    return {
        "weights/0": np.full((3, 4), step + rank / 10, np.float32),
        "own/count": np.array([step, rank], np.int64),
    }


def snapshot(step: int, rank: int, run: str = "0000aa") -> Snapshot:
    manifest = Manifest(run, "data_parallel", Position(step, 0, step), {"variables": []}, ())
    return Snapshot(values(step, rank), manifest, samples=8 * step, epoch_samples=8 * step)


def write(folder: Path, step: int, run: str = "0000aa", keep: int = 3) -> list[str | None]:
    """Write a checkpoint as all ranks; return why each failed."""
    writers = [Writer(WriterOptions(folder, rank, RANKS, keep, timeout_s=20.0)) for rank in range(RANKS)]
    for rank in reversed(range(RANKS)):
        writers[rank].start(snapshot(step, rank, run))
    return [writer.wait() for writer in writers]


def newest_step(folder: Path) -> int | None:
    """Return the step of the checkpoint that a job would resume from."""
    found = newest_usable(folder, Alone())
    return None if found is None else found[1].position.step


class Died(BaseException):
    """The process is gone: nothing of it runs any more."""


class _DyingFile:
    """A file whose writes count as operations."""

    def __init__(self, file: Any, operation: Any) -> None:
        self._file, self._operation = file, operation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> Any:
        self._operation()
        return self._file.write(data)


@contextlib.contextmanager
def dying_at(count: int, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process die at its `count`-th file operation (from 1): that one and later ones do nothing."""
    done, lock = 0, threading.Lock()

    def operation() -> None:
        nonlocal done
        with lock:
            done += 1
            if done >= count:
                raise Died

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            operation()
            return function(*arguments, **named)

        return call

    def opened(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if not {"w", "x"} & set(mode):
            return real_open(file, mode, *arguments, **named)
        operation()
        return _DyingFile(real_open(file, mode, *arguments, **named), operation)

    real_open = builtins.open
    with patch.context() as now:
        now.setattr(builtins, "open", opened)
        for name in ("fsync", "replace", "mkdir", "unlink", "rmdir"):
            now.setattr(os, name, counted(getattr(os, name)))
        yield
