"""What ranks tell `hvpipe run` in the folder of their job: that they have joined, ended, or lost others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvpipe.atomic_file import atomic_file

_LOSS = "lost.json"


def tell_joined(folder: Path | None, ended: bool = False) -> None:
    """Tell `hvpipe run` that a rank has joined the others, or has ended properly."""
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / ("ended" if ended else "joined")).touch()


def none_ended(folder: Path) -> bool:
    """Tell whether ranks of this host have joined, and none of them has ended properly."""
    return (folder / "joined").exists() and not (folder / "ended").exists()


@dataclass(frozen=True)
class Loss:
    """The ranks that a job has lost, and the step that it was in: 0 before the first one."""

    ranks: tuple[int, ...]
    step: int


def tell_loss(folder: Path, ranks: Sequence[int], step: int) -> None:
    """Tell `hvpipe run`, in the job folder, that the job should start again without some of its ranks."""
    with contextlib.suppress(OSError), atomic_file(folder / _LOSS) as file:
        file.write(json.dumps({"ranks": list(ranks), "step": step}).encode())


def read_loss(folder: Path) -> Loss | None:
    """Return what `tell_loss` has told in this job folder; None if it has not."""
    path = folder / _LOSS
    if not path.exists():
        return None
    told = json.loads(path.read_text())
    return Loss(tuple(told["ranks"]), told["step"])
