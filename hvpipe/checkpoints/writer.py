"""Writes checkpoints in the background: every rank its part, and rank 0 the manifest when all are there."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvpipe.checkpoints import folder as folders
from hvpipe.checkpoints.arrays import write_arrays
from hvpipe.checkpoints.files import FileRecord, write_file
from hvpipe.checkpoints.manifest import Manifest, RankPart
from hvpipe.errors import HvpipeError

logger = logging.getLogger("hvpipe")

_FAILED = "failed"
_LONGEST_PAUSE_S = 0.25


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes: its arrays, and the manifest, whose parts are still missing.

    Attributes:
        values: Arrays by name, or what NumPy makes arrays of. They must not change.
        manifest: The same on all ranks.
        samples: Samples that this rank has trained on.
        epoch_samples: The same since the epoch began.
        notes: What else to keep, as JSON.
    """

    values: Mapping[str, Any]
    manifest: Manifest
    samples: int = 0
    epoch_samples: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WriterOptions:
    """Where to write, and for which rank.

    Attributes:
        folder: The folder of checkpoints, which all ranks see.
        rank: This rank.
        ranks: How many ranks write.
        keep: How many complete checkpoints to keep.
        timeout_s: How long rank 0 waits for the parts of the others, in seconds.
        on_change: Called with True when writing begins, and with False when it has ended.
        on_complete: Called on rank 0 with each checkpoint that it has completed.
        on_failure: Called on other ranks when their part was not written. Then all call `share_failure`.
        gives_up: Whether to wait no longer for the parts of other ranks.
    """

    folder: Path
    rank: int
    ranks: int
    keep: int = 3
    timeout_s: float = 300.0
    on_change: Callable[[bool], None] = lambda busy: None
    on_complete: Callable[[Path], None] = lambda place: None
    on_failure: Callable[[], None] = lambda: None
    gives_up: Callable[[], bool] = lambda: False


class Writer:
    """Writes one checkpoint at a time on a thread of its own."""

    def __init__(self, options: WriterOptions) -> None:
        self._options = options
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._lost: frozenset[int] = frozenset()
        self._others_failure: str | None = None
        self._part_ended = threading.Event()
        self._left: set[str] = set()  # names of checkpoints that failed

    def lose(self, ranks: Iterable[int]) -> None:
        """Wait no longer for parts that these ranks have not written, because they are lost."""
        self._lost = frozenset(ranks)

    def start(self, snapshot: Snapshot) -> None:
        """Begin to write. Waits first for the checkpoint before it."""
        self.wait()
        self._failure = self._others_failure = None
        self._part_ended.clear()
        self._options.on_change(True)
        # A daemon: a process that ends for another reason must not wait for a disk.
        self._thread = threading.Thread(
            target=self._run, args=(snapshot,), name="hvpipe-checkpoint", daemon=True
        )
        self._thread.start()

    def share_failure(self, gather: Callable[[str | None], Sequence[str | None]]) -> None:
        """Let rank 0 wait no longer for a part that another rank could not write; collective.

        Args:
            gather: Returns what each rank gives it, in rank order. It goes by the ranks' own connection, as
                their disk may be full.
        """
        causes = gather(self._failure)
        failed = next(((rank, cause) for rank, cause in enumerate(causes) if rank > 0 and cause), None)
        if failed is not None:
            self._others_failure = f"rank {failed[0]}: {failed[1]}"

    def wait_for_part(self) -> None:
        """Wait until this rank has written its part, or could not."""
        if self._thread is not None:
            self._part_ended.wait()

    def wait(self) -> str | None:
        """Wait until this rank has written its part, on rank 0 until the checkpoint is complete.

        Returns:
            Why the last checkpoint failed; None if it did not.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        return self._failure

    def _run(self, snapshot: Snapshot) -> None:
        options, position = self._options, snapshot.manifest.position
        name = folders.name_of(position.step, snapshot.manifest.run)
        try:
            if options.rank == 0:  # only now, because other ranks may have been writing theirs
                folders.abandon(options.folder, self._left - {name})
            place = folders.begin(options.folder, position.step, snapshot.manifest.run)
            self._write_part(place, snapshot)
            self._part_ended.set()
            if options.rank == 0:
                folders.finish(place, replace(snapshot.manifest, parts=self._parts(place)))
                options.on_complete(place)
                folders.prune(options.folder, options.keep, place)
        except Exception as error:  # nobody catches it: unreported, it would look like success
            self._failure = _text(error, options.folder / name)
            self._left.add(name)
            if options.rank > 0:
                options.on_failure()
            logger.error(
                "hvpipe: the checkpoint of step %d in %s was not written; the one before it is still there. "
                "Received on rank %d: %s",
                position.step,
                options.folder,
                options.rank,
                self._failure,
            )
        finally:
            self._part_ended.set()
            options.on_change(False)

    def _write_part(self, place: Path, snapshot: Snapshot) -> None:
        rank = self._options.rank
        part = RankPart(
            rank,
            FileRecord(f"rank-{rank}.npz", 0, ""),  # until it is written
            tuple(snapshot.values),
            snapshot.samples,
            snapshot.epoch_samples,
            snapshot.notes,
        )
        try:
            file = write_file(place / f"rank-{rank}.npz", lambda sink: write_arrays(sink, snapshot.values))
        except Exception as error:
            # Rank 0 reads this sooner than it hears of it by `share_failure`, unless the disk is full.
            if rank > 0:
                with contextlib.suppress(OSError):
                    folders.announce_part(place, replace(part, notes={_FAILED: _text(error, place)}))
            raise
        folders.announce_part(place, replace(part, file=file))

    def _parts(self, place: Path) -> tuple[RankPart, ...]:
        """Wait for the parts of all ranks."""
        found: list[RankPart] = []
        deadline_s, pause_s = time.monotonic() + self._options.timeout_s, 0.005
        while len(found) < self._options.ranks:
            part = folders.announced_part(place, len(found))
            if part is not None and _FAILED in part.notes:
                raise HvpipeError(f"rank {part.rank}: {part.notes[_FAILED]}")
            if part is not None:
                found.append(part)
                continue
            if self._others_failure is not None:
                raise HvpipeError(self._others_failure)
            if len(found) in self._lost:
                raise HvpipeError(f"rank {len(found)} was lost before it had written its part")
            if self._options.gives_up():
                raise HvpipeError(f"ranks were lost before rank {len(found)} had written its part")
            if time.monotonic() > deadline_s:
                raise HvpipeError(
                    f"All ranks should write their part within {self._options.timeout_s:g} s "
                    f"(HVPIPE_TIMEOUT), to a folder that all hosts share. "
                    f"Received: no rank-{len(found)}.json in {place}"
                )
            time.sleep(pause_s)
            if pause_s == _LONGEST_PAUSE_S:
                folders.look_anew(place)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return tuple(found)


def _text(error: Exception, place: Path) -> str:
    """Return the text of an error, with its type unless the text is meant for users, and with its path."""
    if isinstance(error, OSError):
        return str(error) if error.filename is not None else f"{error}: {str(place)!r}"
    return str(error) if isinstance(error, HvpipeError) else f"{type(error).__name__}: {error}"
