"""The status of running jobs: small files that each rank writes and `hvpipe top` reads."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hvpipe.atomic_file import atomic_file
from hvpipe.own_folder import is_own, make_own, open_plain, read_at_most, user_on

GONE_S = 30.0
"""A rank that has been silent for longer was killed, or its host cannot be reached."""

JOB_PREFIX = "hvpipe-job-"
_SWEPT_S = 3600.0
_MOST_BYTES = 1 << 26  # of a file: more than a hundred thousand ranks write
_MOST = 1e18
"""No figure of a rank is larger."""


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank at one moment; None for what is unknown. `at_s` and `began_s` are Unix times."""

    job: str
    script: str
    rank: int
    size: int
    host: str
    at_s: float
    began_s: float
    steps: int = 0
    step_s: float | None = None
    images_per_s: float | None = None
    process_cores: float | None = None
    system_share: float | None = None
    resident_bytes: int | None = None
    gpu_share: float | None = None
    gpu_memory_bytes: int | None = None
    gpu_power_w: float | None = None
    sent_bytes_per_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: object) -> RankStatus | None:
        """Return the status; None if no rank wrote it. Anybody may have made the file."""
        if not isinstance(document, Mapping) or not document.keys() <= _TYPES.keys():
            return None
        if any(not isinstance(value, _TYPES[name]) for name, value in document.items()):
            return None
        if not all(abs(value) < _MOST for value in document.values() if isinstance(value, (int, float))):
            return None
        try:
            return RankStatus(**{name: _printable(value) for name, value in document.items()})
        except TypeError:
            return None


def _printable(value: Any) -> Any:
    """Return a value without what a terminal would obey."""
    if not isinstance(value, str):
        return value
    return "".join(letter if letter.isprintable() else "?" for letter in value)


_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
_TYPES = {
    column.name: _KINDS[str(column.type).removesuffix(" | None")]
    + ((type(None),) if "None" in str(column.type) else ())
    for column in fields(RankStatus)
}


@dataclass(frozen=True)
class RunningJob:
    """A running job: the newest status of each of its ranks, in rank order."""

    name: str
    ranks: tuple[RankStatus, ...]

    @property
    def began_s(self) -> float:
        """The time when the job started, as a Unix time."""
        return min(rank.began_s for rank in self.ranks)


def status_root(folder: str | None) -> Path:
    """Return where jobs report: `folder`, or this user's folder in /dev/shm or among temporary files."""
    if folder is not None:
        return Path(folder)
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"hvpipe-{os.getuid()}"


class StatusFolder:
    """A job's folder with a file of this rank. `close` removes both. May raise OSError."""

    def __init__(self, folder: str | None, job: str, rank: int) -> None:
        root, user = status_root(folder), None
        if folder is None:
            make_own(root)
        else:
            root.mkdir(mode=0o700, exist_ok=True)
            user = user_on(root)
        _sweep(root, user)
        self._folder = root / f"{JOB_PREFIX}{job}"
        make_own(self._folder, user)
        self._mine = self._folder / f"rank-{rank}.json"

    def write(self, mine: RankStatus, others: Iterable[RankStatus] = ()) -> None:
        """Write the status of this rank, and what ranks of other hosts have told it, all by its clock."""
        with atomic_file(self._mine) as file:
            file.write(json.dumps([one.to_json() for one in (mine, *others)]).encode())

    def close(self) -> None:
        """Remove this rank's file, and the folder with the last rank."""
        with contextlib.suppress(OSError):
            self._mine.unlink(missing_ok=True)
            self._folder.rmdir()  # fails until the last rank has left


def read_jobs(root: Path) -> list[RunningJob]:
    """Return the jobs with a rank that has written lately, newest first. `root` is the folder of jobs."""
    ahead_s = _ahead_s(root)
    jobs = []
    try:
        folders = sorted(path for path in root.glob(f"{JOB_PREFIX}*") if path.is_dir())
    except OSError:
        return []
    for folder in folders:
        ranks: dict[int, RankStatus] = {}
        for path in folder.glob("rank-*.json"):
            for one in _read_file(path, ahead_s):
                if one.rank not in ranks or ranks[one.rank].at_s < one.at_s:
                    ranks[one.rank] = one
        if any(time.time() - one.at_s < GONE_S for one in ranks.values()):
            statuses = tuple(ranks[rank] for rank in sorted(ranks))
            jobs.append(RunningJob(folder.name.removeprefix(JOB_PREFIX), statuses))
    return sorted(jobs, key=lambda job: job.began_s, reverse=True)


def _ahead_s(root: Path) -> float:
    """Return the seconds that this host's clock is ahead of the file system's; 0 if it cannot be told."""
    try:
        with tempfile.TemporaryFile(dir=root) as file:
            return time.time() - os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


def _read_file(path: Path, ahead_s: float) -> list[RankStatus]:
    """Return what a rank wrote, in the time of this host: the file's own time tells it from the rank's."""
    with contextlib.suppress(OSError, ValueError, RecursionError), open_plain(path) as file:
        written_s = os.fstat(file.fileno()).st_mtime + ahead_s
        document = json.loads(read_at_most(file, _MOST_BYTES, path))
        told = map(RankStatus.from_json, document if isinstance(document, list) else [])
        found = [one for one in told if one is not None]
        late_s = written_s - found[0].at_s if found else 0.0  # by which this clock is ahead of the rank's
        return [replace(one, at_s=one.at_s + late_s, began_s=one.began_s + late_s) for one in found]
    return []


def _sweep(root: Path, user: int | None) -> None:
    """Remove the files of killed jobs, and nothing else: the user may have named any folder."""
    for folder in root.glob(f"{JOB_PREFIX}*"):
        with contextlib.suppress(OSError):
            if not is_own(folder, user):
                continue
            names = ("rank-*.json", ".*.json.*.partial")
            files = [path for name in names for path in folder.glob(name)]
            newest_s = max((path.lstat().st_mtime for path in files), default=folder.stat().st_mtime)
            if time.time() - newest_s > _SWEPT_S:
                for path in files:
                    path.unlink()
                folder.rmdir()
