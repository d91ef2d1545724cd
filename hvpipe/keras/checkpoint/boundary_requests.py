"""What ranks decide alike and without a message at a step boundary: to write a checkpoint, or to stop."""

from __future__ import annotations

import time

from hvpipe.checkpoints.every import Every
from hvpipe.engine.engine import EngineClient

# Bits of `EngineClient.requests`, which all ranks see alike at a step boundary.
STOP = 1
"""A rank was asked to stop."""
BUSY = 2
"""A rank still writes the checkpoint before."""
_TIME = 4  # rank 0's clock says that a checkpoint is due
FAILED = 8
"""A rank has not written its part of the checkpoint."""


class CheckpointTimer:
    """Knows when the next checkpoint is due.

    Args:
        every: The interval.
        engine: The engine, whose requests ranks share.
        rank: This rank.
        step: Steps done so far.
    """

    def __init__(self, every: Every, engine: EngineClient, rank: int, step: int) -> None:
        self._every = every
        self._engine = engine
        self._rank = rank
        self._last_s = time.monotonic()
        self._last_step = step
        self._due = False

    def follow(self, rank: int) -> None:
        """Continue as this rank after a loss. The interval continues, and ends on all ranks alike."""
        self._rank = rank

    def due(self, step: int, epochs: int | None = None) -> bool:
        """Return whether to write now.

        While any rank is still writing, a checkpoint that is due waits for a later boundary.

        Args:
            step: Steps done so far.
            epochs: At the end of an epoch, how many are done.
        """
        if self._every.unit == "steps":
            self._due = self._due or step // self._every.amount > self._last_step // self._every.amount
        elif self._every.unit == "epochs":
            self._due = self._due or (epochs is not None and epochs % self._every.amount == 0)
        elif self._rank == 0 and time.monotonic() - self._last_s >= self._every.amount:
            self._engine.request(_TIME)
        requests = self._engine.requests()
        self._last_step = step
        return bool((self._due or requests & _TIME) and not requests & BUSY)

    def written(self) -> None:
        """Start the next interval. Call it on all ranks at the same boundary."""
        self._due = False
        self._last_s = time.monotonic()
        self._engine.request(_TIME, False)
