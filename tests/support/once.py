"""Make what several tests need once, though xdist's workers share the tests of a file."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def once_for_all_workers(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` has filled, in whichever worker came first. The others wait for it.

    If `make` raises, the next worker tries again.
    """
    base = factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / f"once-{name}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder
