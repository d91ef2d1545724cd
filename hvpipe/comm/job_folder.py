"""Files and exit codes by which the ranks of a host and `hvpipe run` tell each other what happens."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvpipe.atomic_file import atomic_file

STOPPED = 75
"""What all ranks exit with after a checkpoint that they were asked for: EX_TEMPFAIL of sysexits.h."""

TOO_FEW = 69
"""What ranks exit with if fewer than --min-np are left: EX_UNAVAILABLE of sysexits.h."""

_STOP = "stop"
_CHECKPOINT = "checkpoint"


def ask_to_stop(folder: Path) -> None:
    """Ask the ranks to write a checkpoint and exit with STOPPED."""
    (folder / _STOP).touch()


def asked_to_stop(folder: Path) -> bool:
    """Tell whether `ask_to_stop` has asked this rank."""
    return (folder / _STOP).exists()


@contextlib.contextmanager
def listening(folder: Path, rank: int) -> Iterator[None]:
    """Let others know that this rank stops when asked."""
    sign = folder / f"listening-{rank}"
    with contextlib.suppress(OSError):
        sign.touch()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            sign.unlink()


def any_listens(folder: Path) -> bool:
    """Tell whether a rank of this host stops when asked."""
    return any(folder.glob("listening-*"))


def tell_checkpoint(folder: Path, place: Path) -> None:
    """Tell `hvpipe run` of a complete checkpoint."""
    with contextlib.suppress(OSError):
        (folder / _CHECKPOINT).write_text(str(place))


def last_checkpoint(folder: Path) -> str | None:
    """Return the last checkpoint that the job completed; None before the first."""
    path = folder / _CHECKPOINT
    return path.read_text() if path.exists() else None


def abort_sign(folder: Path) -> Path:
    """Return the file by which a rank says that it ends all ranks, because of an error."""
    return folder / "aborting"


def tell_error(folder: Path, rank: int, text: str) -> None:
    """Tell `hvpipe run` the error for which this rank ends all ranks."""
    with contextlib.suppress(OSError):
        (folder / f"error-{rank}").write_text(text, errors="backslashreplace")
        abort_sign(folder).touch()


def errors(folder: Path) -> list[str]:
    """Return the errors that ranks of this host have told."""
    return [path.read_text() for path in sorted(folder.glob("error-*"))]


def tell_joined(folder: Path | None, ended: bool = False) -> None:
    """Tell `hvpipe run` that a rank has joined the others, or has ended properly."""
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / ("ended" if ended else "joined")).touch()


def any_joined(folder: Path) -> bool:
    """Tell whether a rank of this host has joined the others."""
    return (folder / "joined").exists()


def any_ended(folder: Path) -> bool:
    """Tell whether a rank of this host has ended properly."""
    return (folder / "ended").exists()


@dataclass(frozen=True)
class Loss:
    """The ranks that a job has lost, and the step that it was in: 0 before the first one."""

    ranks: tuple[int, ...]
    step: int


def tell_loss(job: str, checkpoints: Path, ranks: Sequence[int], step: int) -> None:
    """Tell `hvpipe run` that the job should start again without some of its ranks.

    Args:
        job: The job folder. If it is another host's, the folder of checkpoints gets the file.
        checkpoints: The folder of checkpoints, which all hosts share.
        ranks: The ranks that are lost.
        step: The step that the job was in.
    """
    folder = Path(job) if Path(job).is_dir() else checkpoints
    with contextlib.suppress(OSError), atomic_file(folder / _loss_file(job)) as file:
        file.write(json.dumps({"ranks": list(ranks), "step": step}).encode())


def read_loss(job: Path) -> Loss | None:
    """Return what `tell_loss` has told of this job; None if it has not."""
    found = None
    checkpoint = last_checkpoint(job)
    for folder in (job, *([Path(checkpoint).parent] if checkpoint else [])):
        path = folder / _loss_file(str(job))
        if path.exists():
            told = json.loads(path.read_text())
            found = Loss(tuple(told["ranks"]), told["step"])
            path.unlink()
    return found


def _loss_file(job: str) -> str:
    return f"lost-{Path(job).name}.json"
