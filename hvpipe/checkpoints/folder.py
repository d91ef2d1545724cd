"""A folder of checkpoints: which are complete, writing one more, removing old ones.

    run1/
      0000000500-4f2a9c/    the checkpoint of step 500, written by the start 4f2a9c of the job
        rank-0.npz          the arrays of rank 0
        rank-0.json         what rank 0 wrote; rank 0 waits for these files of all ranks
        rank-1.npz, rank-1.json
        manifest.json       comes last: now the checkpoint is complete

Two starts of a job never write to the same place, so nothing that is complete is ever overwritten.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from hvpipe.atomic_file import sync_folder
from hvpipe.checkpoints.files import write_file
from hvpipe.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    RankPart,
    part_document,
    read_part,
    write_manifest,
)
from hvpipe.config_file import read_document
from hvpipe.errors import HvpipeError
from hvpipe.log import logger
from hvpipe.own_folder import check_own, is_own, user_name, user_on
from hvpipe.proc import boot_id

_DAMAGED = ".damaged"
_LOCK = ".lock"
_ENDING_S, _LOST_HOST_S = 5.0, 120.0
_locks: dict[Path, int] = {}  # open files of locks that this process holds
_NAME = re.compile(r"(\d{10})-([0-9a-f]{6})")


def folder_path(folder: object) -> Path:
    """Return the path that a user gives for a folder; raise HvpipeError for none."""
    if isinstance(folder, (str, os.PathLike)) and os.fspath(folder):
        return Path(folder)
    raise HvpipeError(f"folder should be the path of a folder. Received: folder={folder!r}")


def name_of(step: int, run: str) -> str:
    """Return the name of a checkpoint: its step, and the start of the job (6 hex digits) that writes it."""
    return f"{step:010d}-{run}"


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, the newest first."""
    return [path for path in _all(folder) if (path / MANIFEST).is_file()]


def incomplete(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder that were not finished, the newest first."""
    return [path for path in _all(folder) if not (path / MANIFEST).is_file()]


def begin(folder: Path, step: int, run: str) -> Path:
    """Make the place of a new checkpoint; every rank may call it."""
    place = folder / name_of(step, run)
    place.mkdir(parents=True, exist_ok=True)
    if not is_own(place, os.geteuid()):  # another user may have made it, or the file server gives it to one
        check_own(place, user_on(folder))
    sync_folder(folder)
    return place


def announce_part(place: Path, part: RankPart) -> None:
    """Say what this rank wrote, after its file is on the disk."""
    text = json.dumps(part_document(part))
    write_file(place / f"rank-{part.rank}.json", lambda sink: sink.write(text.encode()))


def announced_part(place: Path, rank: int) -> RankPart | None:
    """Return what a rank has written; None if it has not said so yet."""
    path = place / f"rank-{rank}.json"
    return read_part(read_document(path)) if path.is_file() else None


def look_anew(place: Path) -> None:
    """Let NFS look again for files that were missing: its client does so once the folder has changed here."""
    with contextlib.suppress(OSError):
        probe = place / ".look"
        probe.touch()
        probe.unlink()


def finish(place: Path, manifest: Manifest) -> None:
    """Complete a checkpoint whose parts have all been written."""
    position = replace(
        manifest.position,
        samples=sum(part.samples for part in manifest.parts),
        epoch_samples=sum(part.epoch_samples for part in manifest.parts),
    )
    write_manifest(place, replace(manifest, position=position))


def prune(folder: Path, keep: int, last: Path) -> None:
    """Remove all complete checkpoints but the newest `keep`, and unfinished ones older than `last`.

    Args:
        folder: The folder.
        keep: How many to keep, at least 1.
        last: The checkpoint that was completed last. A later one may be under way.
    """
    for old in complete(folder)[keep:]:
        remove(old)
    for left in incomplete(folder):
        if left.name < last.name:
            remove(left)


def abandon(folder: Path, names: Iterable[str]) -> None:
    """Remove what was written of checkpoints that failed, unless it is complete."""
    for name in names:
        if not (folder / name / MANIFEST).is_file():
            shutil.rmtree(folder / name, ignore_errors=True)


def remove(place: Path) -> None:
    """Remove a checkpoint. The manifest goes first, so that an interruption leaves an incomplete one."""
    with contextlib.suppress(OSError):
        (place / MANIFEST).unlink(missing_ok=True)
        sync_folder(place)
        shutil.rmtree(place)


def set_aside(place: Path) -> None:
    """Rename a damaged checkpoint, so that it no longer counts but can be examined."""
    with contextlib.suppress(OSError):
        os.replace(place, place.with_name(place.name + _DAMAGED))


def damaged(folder: Path) -> list[Path]:
    """Return the checkpoints that were set aside."""
    return sorted(folder.glob(f"*{_DAMAGED}"))


def of_a_fit(folder: Path) -> bool:
    """Tell whether a folder has checkpoints of a `fit`, or is one of them."""
    return bool(_all(folder)) or (folder / "rank-0.json").exists()


def check_folder(folder: Path) -> None:
    """Make the folder if it does not exist. Raises HvpipeError if it cannot be written, or is a checkpoint.

    Warn if users beside this one and root can write there: a checkpoint of theirs would be resumed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(6)}"
        probe.touch(exist_ok=False)
        mine, found = (probe.stat().st_uid, 0), folder.stat()
        probe.unlink()
    except OSError as error:
        raise HvpipeError(
            f"Checkpoint needs a folder that can be written. Received: {str(folder)!r}: {error.strerror}"
        ) from error
    if (folder / MANIFEST).exists():
        raise HvpipeError(
            "Checkpoint needs a folder for several checkpoints. "
            f"Received: {str(folder)!r}, which is one itself: it has a {MANIFEST}"
        )
    if found.st_uid not in mine or found.st_mode & stat.S_IWOTH:
        logger.warning(
            "hvpipe: other users can change the checkpoints in %s, which belongs to %s: %s.",
            *(folder, user_name(found.st_uid), stat.filemode(found.st_mode)),
        )


def claim(folder: Path) -> str:
    """Lock a folder until this process ends.

    Returns:
        "locked"; "held" if this process has locked it before; "taken" if another process has; or "unknown" if
        there are no locks here.
    """
    lock = folder.resolve() / _LOCK
    if lock in _locks and os.fstat(_locks[lock]).st_nlink > 0:  # the folder may have been made anew
        return "held"
    try:
        file = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return "unknown"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        return "taken" if isinstance(error, BlockingIOError) else "unknown"
    _locks[lock] = file
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(file, 0)
        os.pwrite(file, f"{socket.gethostname()} {os.getpid()} {boot_id()}".encode(), 0)
    return "locked"


def holder(folder: Path) -> tuple[str, str, str]:
    """Return the host, process and boot of who has locked a folder; empty if the lock does not say it."""
    with contextlib.suppress(OSError, ValueError):
        host, process, *boot = (folder / _LOCK).read_text()[:300].split()
        return host, process, boot[0] if boot else ""
    return "", "", ""


def claim_or_refuse(folder: Path) -> str:
    """Lock a folder as `claim` does, and raise HvpipeError if another job has locked it.

    The processes of a job that was killed may take some seconds to end, and a file server notices after a
    minute or two that a host is lost.
    """
    began_s, told = time.monotonic(), False
    while (found := claim(folder)) == "taken":
        host, process, boot = holder(folder)
        here = host in ("", socket.gethostname()) and boot in ("", boot_id())
        limit_s = _ENDING_S if here else _LOST_HOST_S
        who = f"process {process} on {host}" if host else "another process"
        if time.monotonic() - began_s > limit_s:
            raise HvpipeError(
                "A folder of checkpoints belongs to one job: another one would resume from its checkpoints. "
                f"End the other job, or use another folder. Received: {str(folder)!r}, where {who} "
                "writes checkpoints"
            )
        if not told:
            logger.warning(
                "hvpipe: %s writes checkpoints to %s. Waiting %g s for its end.", who, folder, limit_s
            )
        told = True
        time.sleep(0.1)
    return found


def _forget_locks() -> None:
    """Leave the locks to the parent process: a child may outlive it."""
    while _locks:
        os.close(_locks.popitem()[1])


os.register_at_fork(after_in_child=_forget_locks)


def _all(folder: Path) -> list[Path]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [folder / name for name in sorted(filter(_NAME.fullmatch, names), reverse=True)]
