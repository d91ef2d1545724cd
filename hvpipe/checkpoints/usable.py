"""The newest checkpoint that is unchanged: all ranks check its files together, and agree."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from hvpipe.checkpoints import folder as folders
from hvpipe.checkpoints.files import UnreadableError, damage
from hvpipe.checkpoints.manifest import Manifest, read_manifest
from hvpipe.errors import HvpipeError

logger = logging.getLogger("hvpipe")


class RankExchange(Protocol):
    """The ranks that resume together."""

    rank: int
    size: int

    def broadcast(self, value: str | None) -> str | None:
        """Return rank 0's value on every rank."""

    def gather(self, value: str | None) -> list[str | None]:
        """Return the values of all ranks, in rank order."""


def newest_usable(folder: Path, ranks: RankExchange) -> tuple[Path, Manifest] | None:
    """Return the newest complete checkpoint whose files are unchanged; collective.

    Each file is read and checked by one rank. A damaged checkpoint is renamed and loudly reported, and the
    one before it is tried. One that a rank cannot read is an error.

    Args:
        folder: The folder of checkpoints, which all ranks see.
        ranks: The ranks.

    Returns:
        The checkpoint and its manifest; None if the folder has no complete one.

    Raises:
        HvpipeError: All complete checkpoints are damaged, or an earlier start of the job found them damaged;
            or a rank cannot read one. Raised on all ranks.
    """
    found = folders.complete(folder) if ranks.rank == 0 else []
    refused: list[str] = []
    while True:
        name = ranks.broadcast(found[0].name if found else None)
        if name is None:
            break
        place = folder / name
        manifest = own = unreadable = None
        try:
            manifest = checked_manifest(place, ranks.rank, ranks.size)
        except UnreadableError as error:
            unreadable = str(error)
        except HvpipeError as error:
            own = str(error)
        for rank, cause in enumerate(ranks.gather(unreadable)):
            if cause is not None:
                raise HvpipeError(
                    f"Every rank should be able to read the checkpoint {place}, which may be intact. Make it "
                    "readable and start again; or remove it, to resume from the one before it. "
                    f"Received on rank {rank}: {cause}"
                )
        causes = {rank: cause for rank, cause in enumerate(ranks.gather(own)) if cause is not None}
        if not causes and manifest is not None:
            return place, manifest
        rank, cause = next(iter(causes.items()))
        refused.append(cause)
        if ranks.rank == 0:
            found.pop(0)
            logger.warning(
                "hvpipe: the checkpoint %s is DAMAGED and will not be used%s. Received on rank %d: %s",
                place,
                ": training continues from the one before it" if found else "",
                rank,
                cause,
            )
            folders.set_aside(place)
    # Those of earlier starts count, too: a job that is started again must not begin anew without a word.
    damaged = ranks.broadcast(", ".join(p.name for p in folders.damaged(folder)) if ranks.rank == 0 else None)
    if damaged:
        raise HvpipeError(
            f"Training should resume from a checkpoint in {folder}, but all of them are damaged. To start "
            "from the beginning, remove them or use another folder. "
            f"Received: {'; '.join([damaged, *refused])}"
        )
    if ranks.rank == 0 and (left := folders.incomplete(folder)):
        logger.warning(
            "hvpipe: %s has no complete checkpoint: training starts from the beginning. Received: %d that "
            "were not finished, such as %s",
            folder,
            len(left),
            left[0].name,
        )
    return None


def checked_manifest(place: Path, rank: int, size: int) -> Manifest:
    """Read the manifest of a checkpoint, and check this rank's share of its files.

    Raises:
        UnreadableError: They may be unchanged, but cannot be read.
        HvpipeError: They are damaged.
    """
    manifest = read_manifest(place)
    if not manifest.parts:
        raise HvpipeError(f"{place} names no files")
    for part in manifest.parts[rank::size]:
        cause = damage(place, part.file)
        if cause is not None:
            raise HvpipeError(cause)
    return manifest
