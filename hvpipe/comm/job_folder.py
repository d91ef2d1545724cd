"""Files and exit codes by which the ranks of a host and `hvpipe run` tell each other what happens."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvpipe.atomic_file import atomic_file

STOPPED = 75
"""What all ranks exit with after a checkpoint that they were asked for: EX_TEMPFAIL of sysexits.h."""

TOO_FEW = 69
"""What ranks exit with if fewer than --min-np are left: EX_UNAVAILABLE of sysexits.h."""

PREFIX = "hvpipe-run-"
"""What the names of job folders begin with."""

_OLD_S = 24 * 3600.0

_STOP = "stop"
_CHECKPOINT = "checkpoint"
_CHECKPOINTS = "checkpoints"
_PRINTS = "prints-tracebacks"


@contextlib.contextmanager
def new_job_folder() -> Iterator[Path]:
    """Make a job folder, and remove it afterwards. First remove a killed job's folder that is a day old.

    The folder is locked. So systemd-tmpfiles does not clean it up, however long the job runs.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            old = time.time() - left.lstat().st_mtime > _OLD_S
            if old and is_own_folder(left) and not is_running(left):
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        lock = os.open(name, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            yield Path(name)
        finally:
            os.close(lock)


def is_own_folder(path: Path) -> bool:
    """Tell whether a path is a folder of this user. Among temporary files, anybody can make one."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def is_running(folder: Path) -> bool:
    """Tell whether the `hvpipe run` that has made a job folder is there."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def ask_to_stop(folder: Path) -> None:
    """Ask the ranks to write a checkpoint and exit with STOPPED."""
    folder.mkdir(mode=0o700, exist_ok=True)  # somebody may have removed it
    (folder / _STOP).touch()


def asked_to_stop(folder: Path) -> bool:
    """Tell whether `ask_to_stop` has asked this rank."""
    return (folder / _STOP).exists()


@contextlib.contextmanager
def listening(folder: Path, rank: int) -> Iterator[None]:
    """Let others know that this rank stops when asked."""
    sign = folder / f"listening-{rank}"
    with contextlib.suppress(OSError), atomic_file(sign) as file:
        file.write(str(os.getpid()).encode())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            sign.unlink()


def any_listens(folder: Path) -> bool:
    """Tell whether a rank of this host stops when asked. Ranks that were killed have left their sign."""
    return any(_lives(path) for path in folder.glob("listening-*"))


def tell_checkpoint(folder: Path, place: Path) -> None:
    """Tell `hvpipe run` of a complete checkpoint."""
    with contextlib.suppress(OSError):
        (folder / _CHECKPOINT).write_bytes(os.fsencode(place))


def last_checkpoint(folder: Path) -> str | None:
    """Return the last checkpoint that the job completed; None before the first."""
    path = folder / _CHECKPOINT
    return os.fsdecode(path.read_bytes()) if path.exists() else None


def abort_sign(folder: Path) -> Path:
    """Return the file by which a rank says that it ends all ranks, because of an error."""
    return folder / "aborting"


def tell_error(folder: Path, rank: int, text: str, more: str) -> bool:
    """Tell `hvpipe run` the error for which this rank ends all ranks; return whether it worked."""
    with contextlib.suppress(OSError):
        (folder / f"traceback-{rank}").write_text(more, errors="backslashreplace")
        (folder / f"error-{rank}").write_text(text, errors="backslashreplace")
        abort_sign(folder).touch()
        return True
    return False


def print_tracebacks(folder: Path) -> None:
    """Let ranks know that `hvpipe run` prints what they tell by `tell_error`."""
    with contextlib.suppress(OSError):
        (folder / _PRINTS).touch()


def launcher_prints(folder: Path) -> bool:
    """Tell whether `hvpipe run` prints what ranks tell by `tell_error`."""
    return (folder / _PRINTS).exists()


def told_by_rank(folder: Path) -> dict[int, tuple[str, str]]:
    """Return the error, in a line, and the traceback of each rank of this host that has told them."""
    found = {}
    for rank in sorted(int(path.name.partition("-")[2]) for path in folder.glob("error-*")):
        line, more = (folder / f"error-{rank}").read_text(), folder / f"traceback-{rank}"
        found[rank] = line, more.read_text() if more.exists() else f"{line}\n"
    return found


def errors(folder: Path) -> list[str]:
    """Return the errors that ranks of this host have told."""
    return [path.read_text() for path in sorted(folder.glob("error-*"))]


def tell_joined(folder: Path | None) -> None:
    """Tell `hvpipe run` that a rank has joined the others."""
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / "joined").touch()


def any_joined(folder: Path) -> bool:
    """Tell whether a rank of this host has joined the others."""
    return (folder / "joined").exists()


def tell_checkpoints(folder: Path, checkpoints: Path) -> None:
    """Tell `hvpipe run` where ranks of other hosts leave what they have to tell."""
    with contextlib.suppress(OSError), atomic_file(folder / _CHECKPOINTS) as file:
        file.write(os.fsencode(checkpoints.absolute()))


def tell_end(job: str | None, checkpoints: Path | None) -> None:
    """Tell `hvpipe run` that a rank has ended properly.

    Args:
        job: The job folder, which may be another host's; None outside of `hvpipe run`.
        checkpoints: The folder of checkpoints, which all hosts share, or None.
    """
    place = _place(job, checkpoints) if job else None
    if job and place is not None:
        with contextlib.suppress(OSError):
            (place / _end_file(job)).touch()


def read_end(job: Path) -> bool:
    """Tell whether `tell_end` has told of an end of this job."""
    paths = [folder / _end_file(str(job)) for folder in _places(job)]
    found = [path for path in paths if path.exists()]
    for path in found:
        path.unlink(missing_ok=True)
    return bool(found)


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
    place = _place(job, checkpoints)
    assert place is not None
    with contextlib.suppress(OSError), atomic_file(place / _loss_file(job)) as file:
        file.write(json.dumps({"ranks": list(ranks), "step": step}).encode())


def read_loss(job: Path) -> Loss | None:
    """Return what `tell_loss` has told of this job; None if it has not."""
    found = None
    for folder in _places(job):
        path = folder / _loss_file(str(job))
        if path.exists():
            told = json.loads(path.read_text())
            found = Loss(tuple(told["ranks"]), told["step"])
            path.unlink()
    return found


def _lives(sign: Path) -> bool:
    """Tell whether the process that a file names is there."""
    try:
        os.kill(int(sign.read_text()), 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ValueError):  # it may be
        return True
    return True


def _place(job: str, checkpoints: Path | None) -> Path | None:
    """Return where a rank tells something: in the job folder, or else beside the checkpoints."""
    return Path(job) if Path(job).is_dir() else checkpoints


def _places(job: Path) -> list[Path]:
    """Return where ranks may have told something."""
    told = job / _CHECKPOINTS
    with contextlib.suppress(OSError):
        return [job, Path(os.fsdecode(told.read_bytes()))]
    return [job]


def _loss_file(job: str) -> str:
    return f"lost-{Path(job).name}.json"


def _end_file(job: str) -> str:
    return f"ended-{Path(job).name}"
