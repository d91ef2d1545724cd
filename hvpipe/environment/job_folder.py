"""Files and exit codes by which the ranks of a host and `hvpipe run` tell each other what happens."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvpipe.atomic_file import atomic_file
from hvpipe.own_folder import check_own, is_own, make_own, read_own

STOPPED = 75
"""What all ranks exit with after a checkpoint that they were asked for: EX_TEMPFAIL of sysexits.h."""

TOO_FEW = 69
"""What ranks exit with if fewer than --min-np are left: EX_UNAVAILABLE of sysexits.h."""

CHOSEN_CODES = (STOPPED, TOO_FEW)
"""What hvpipe itself lets all ranks exit with."""

PREFIX = "hvpipe-run-"
"""What the names of job folders begin with."""

_OLD_S = 24 * 3600.0
_MOST_BYTES = 1 << 24  # that anybody tells in one file

_STOP = "stop"
_CHECKPOINT = "checkpoint"
_CHECKPOINTS = "checkpoints"
_PRINTS = "prints-tracebacks"


@contextlib.contextmanager
def new_job_folder() -> Iterator[Path]:
    """Make a job folder, and remove it afterwards. First remove a killed job's folder that is a day old.

    The folder is locked. So systemd-tmpfiles does not clean it up, however long the job runs.
    """
    _remove_old()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        lock = os.open(name, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            yield Path(name)
        finally:
            os.close(lock)


def _remove_old() -> None:
    """Remove folders of killed jobs that are a day old."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            old = time.time() - left.lstat().st_mtime > _OLD_S
            if old and is_own(left) and not is_running(left):
                shutil.rmtree(left, ignore_errors=True)


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
    """Ask the ranks to write a checkpoint and exit with STOPPED. Raises OSError if that cannot be told."""
    make_own(folder)  # somebody may have removed it
    _tell(folder, _STOP)


def asked_to_stop(folder: Path) -> bool:
    """Tell whether `ask_to_stop` has asked this rank."""
    return is_own(folder) and (folder / _STOP).exists()


@contextlib.contextmanager
def listening(folder: Path, rank: int) -> Iterator[None]:
    """Let others know that this rank stops when asked."""
    sign = folder / f"listening-{rank}"
    with contextlib.suppress(OSError):
        _tell(folder, sign.name, str(os.getpid()).encode())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            check_own(folder)
            sign.unlink()


@contextlib.contextmanager
def listening_away(job: str, rank: int) -> Iterator[None]:
    """Let `hvpipe stop` on this host know that this rank stops when asked; the job folder is on another host.

    Args:
        job: The path of the job folder there.
        rank: This rank.
    """
    folder, lock = away_folder(job), -1
    _remove_old()
    try:
        make_own(folder)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError:  # a full disk, or a file system without locks
        if lock >= 0:
            os.close(lock)
        yield
        return
    try:
        with listening(folder, rank):
            yield
    finally:
        os.close(lock)
        with contextlib.suppress(OSError):  # another rank has just removed it
            if not any(folder.glob("listening-*")):
                shutil.rmtree(folder, ignore_errors=True)


def away_folder(job: str) -> Path:
    """Return the folder by which the ranks of a host are asked to stop if their job folder is on another."""
    return Path(tempfile.gettempdir()) / f"{Path(job).name}-away"


def listeners(folder: Path) -> list[int]:
    """Return the processes of the ranks that `any_listens` has found."""
    told = [read_own(path, _MOST_BYTES) for path in folder.glob("listening-*") if _lives(path)]
    return [int(pid) for pid in told if pid is not None and pid.isdigit()]


def any_listens(folder: Path) -> bool:
    """Tell whether a rank of this host stops when asked. Ranks that were killed have left their sign."""
    return is_own(folder) and any(_lives(path) for path in folder.glob("listening-*"))


def tell_checkpoint(folder: Path, place: Path) -> None:
    """Tell `hvpipe run` of a complete checkpoint."""
    with contextlib.suppress(OSError):
        _tell(folder, _CHECKPOINT, os.fsencode(place))


def last_checkpoint(folder: Path) -> str | None:
    """Return the last checkpoint that the job completed; None before the first."""
    told = read_own(folder / _CHECKPOINT, _MOST_BYTES)
    return None if told is None else os.fsdecode(told)


def abort_marker(folder: Path) -> Path:
    """Return the file by which a rank says that it ends all ranks, because of an error."""
    return folder / "aborting"


def any_aborts(folder: Path) -> bool:
    """Tell whether a rank of this host has said by `abort_marker` that it ends all ranks."""
    return is_own(folder) and abort_marker(folder).exists()


def tell_error(folder: Path, rank: int, text: str, more: str) -> bool:
    """Tell `hvpipe run` the error for which this rank ends all ranks, and its traceback.

    Returns:
        Whether it is told.
    """
    with contextlib.suppress(OSError):
        _tell(folder, f"traceback-{rank}", more.encode(errors="backslashreplace"))
        _tell(folder, f"error-{rank}", text.encode(errors="backslashreplace"))
        _tell(folder, abort_marker(folder).name)
        return True
    return False


def tell_exit(folder: Path, rank: int, code: int, text: str) -> None:
    """Tell `hvpipe run` the call by which this rank ends with an exit code other than 0."""
    with contextlib.suppress(OSError):
        _tell(folder, f"exit-{rank}", f"{code} {text}".encode(errors="backslashreplace"))


def exits_by_rank(folder: Path) -> dict[int, tuple[int, str]]:
    """Return the exit code and the call of each rank of this host that has told them."""
    found = {}
    for path in folder.glob("exit-*"):
        code, _, text = (read_own(path, _MOST_BYTES) or b"").decode(errors="replace").partition(" ")
        number = path.name.partition("-")[2]
        if number.isdigit() and code.isdigit():
            found[int(number)] = int(code), text
    return dict(sorted(found.items()))


def print_tracebacks(folder: Path) -> None:
    """Let ranks know that `hvpipe run` prints what they tell by `tell_error`."""
    with contextlib.suppress(OSError):
        _tell(folder, _PRINTS)


def launcher_prints(folder: Path) -> bool:
    """Tell whether `hvpipe run` prints what ranks tell by `tell_error`."""
    return is_own(folder) and (folder / _PRINTS).exists()


def told_by_rank(folder: Path) -> dict[int, tuple[str, str]]:
    """Return the error, in a line, and the traceback of each rank of this host that has told them."""
    found = {}
    for path in folder.glob("error-*"):
        number = path.name.partition("-")[2]
        told = [read_own(folder / f"{kind}-{number}", _MOST_BYTES) for kind in ("error", "traceback")]
        if number.isdigit() and told[0] is not None:
            error, traceback = ((text or b"").decode(errors="replace") for text in told)
            found[int(number)] = error, traceback or f"{error}\n"
    return dict(sorted(found.items()))


def tell_joined(folder: Path | None) -> None:
    """Tell `hvpipe run` that a rank has joined the others."""
    if folder is not None:
        with contextlib.suppress(OSError):
            _tell(folder, "joined")


def any_joined(folder: Path) -> bool:
    """Tell whether a rank of this host has joined the others."""
    return is_own(folder) and (folder / "joined").exists()


def tell_checkpoints(folder: Path, checkpoints: Path) -> None:
    """Tell `hvpipe run` where ranks of other hosts leave what they have to tell."""
    with contextlib.suppress(OSError):
        _tell(folder, _CHECKPOINTS, os.fsencode(checkpoints.absolute()))


def tell_end(job: str | None, checkpoints: Path | None, code: int = 0) -> None:
    """Tell `hvpipe run` that a rank has ended properly.

    Args:
        job: The job folder, which may be another host's; None outside of `hvpipe run`.
        checkpoints: The folder of checkpoints, which all hosts share, or None.
        code: The exit code, if hvpipe has chosen it: STOPPED or TOO_FEW.
    """
    place = _place(job, checkpoints) if job else None
    if job and place is not None:
        with contextlib.suppress(OSError), atomic_file(place / _end_file(job)) as file:
            file.write(str(code).encode())


def read_end(job: Path) -> int | None:
    """Return the exit code that `tell_end` has reported of this job; None if it has not."""
    found = _take(job, _end_file(str(job)))
    return max((int(each) for each in found if each.isdigit()), default=0) if found else None


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
    """Return the loss that `tell_loss` has reported of this job; None if it has not."""
    found = _take(job, _loss_file(str(job)))
    if not found:
        return None
    told = json.loads(found[-1])
    return Loss(tuple(told["ranks"]), told["step"])


def _tell(folder: Path, name: str, what: bytes = b"") -> None:
    """Write a file of the job folder. Another user may have made one where the first was removed."""
    check_own(folder)
    with atomic_file(folder / name) as file:
        file.write(what)


def _take(job: Path, name: str) -> list[bytes]:
    """Return what this user's ranks have told in files of this name, and remove the files.

    They are in the job folder, or beside the checkpoints. That folder may be one of several users. Its owner
    counts, too, who could as well change the checkpoints; a file server may give him what this user writes.
    """
    places: dict[Path, tuple[int, ...]] = {job: ()}
    if told := read_own(job / _CHECKPOINTS, _MOST_BYTES):
        checkpoints = Path(os.fsdecode(told))
        with contextlib.suppress(OSError):
            places[checkpoints] = (checkpoints.stat().st_uid,)
    texts = [(folder / name, read_own(folder / name, _MOST_BYTES, users)) for folder, users in places.items()]
    found = {path: text for path, text in texts if text is not None}
    for path in found:
        path.unlink(missing_ok=True)
    return list(found.values())


def _lives(sign: Path) -> bool:
    """Tell whether the process that a file names is there."""
    try:
        told = read_own(sign, _MOST_BYTES)
        if told is None:
            return False
        os.kill(int(told), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):  # it may be
        return True
    return True


def _place(job: str, checkpoints: Path | None) -> Path | None:
    """Return where a rank tells something: in the job folder, or else beside the checkpoints."""
    return Path(job) if is_own(Path(job)) else checkpoints


def _loss_file(job: str) -> str:
    return f"lost-{Path(job).name}.json"


def _end_file(job: str) -> str:
    return f"ended-{Path(job).name}"
