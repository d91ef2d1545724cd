"""The batches of an elastic `fit`: if fewer ranks repeat a step, they divide its batches among them.

    batches of all ranks    0 1 2 | 3 4 5 | 6 7 8        3 ranks: a round of 3 batches for each step
    rank 1 is lost in step 2      | 3 4 | 5 6 | 7 8      2 ranks continue from batch 3

Every rank reads all batches in the same order, as with `shard`, and keeps those of the last two steps.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.session import Session

_KEPT_STEPS = 2
"""With overlap="step", a loss in one step may undo the one before."""


class ElasticData:
    """What each step trains on.

    Args:
        session: The ranks that train together.
        source: The batches of all ranks in one dataset; None: each rank has its own data.
        steps_per_epoch: As given to `fit`; None: an epoch is one pass over the source.
    """

    def __init__(self, session: Session, source: Any, steps_per_epoch: int | None) -> None:
        self._session = session
        self._source = source
        self._steps_per_epoch = steps_per_epoch
        self._iterator: Any = None
        self._waiting: collections.deque[Any] = collections.deque()  # read, and given to no step
        self._rounds: dict[int, list[Any]] = {}  # by step
        self.position = 0
        """Batches of the source before those that wait, since the iterator was made."""
        self.ended = False
        """Whether the data of the epoch has been read to the end, and the epoch is not finished yet."""

    @property
    def shares_source(self) -> bool:
        """Whether ranks share one dataset, which is divided anew when ranks are lost."""
        return self._source is not None

    def epoch(self, begin: Callable[[], None], end: Callable[[], None]) -> Iterator[tuple[int, int, Any]]:
        """Stand in for Keras's enumeration of an epoch: yield while there is a batch for every rank."""
        begin()
        self.ended = False
        if self._iterator is None or self._steps_per_epoch is None:
            self._begin(self._read_source())
        step = 0
        while step != self._steps_per_epoch and self._has_round():
            yield step, step, self._iterator
            step += 1
        self.ended = True
        if self._steps_per_epoch is None and int(self._source.cardinality()) >= 0:
            self._read_source()  # as Keras does at the end of an epoch: a shuffle gets its next order
        end()

    def take(self, step: int, iterator: Any) -> Any:
        """Return this rank's batch for a step.

        Args:
            step: The number of the step since `fit` began.
            iterator: Keras's iterator.

        Raises:
            StopIteration: If there is no batch for every rank.
        """
        if not self.shares_source and iterator is not self._iterator:
            self._begin(iterator)
        if not self._has_round():
            raise StopIteration
        batches = [self._waiting.popleft() for _ in range(self._width)]
        self.position += len(batches)
        self._rounds[step] = batches
        self._rounds.pop(step - _KEPT_STEPS, None)
        return batches[self._session.world.rank if self.shares_source else 0]

    def rewind(self, step: int) -> None:
        """Take back what was given to the steps after this one."""
        for later in sorted((n for n in self._rounds if n > step), reverse=True):
            batches = self._rounds.pop(later)
            self._waiting.extendleft(reversed(batches))
            self.position -= len(batches)

    def resume(self, epoch: int, batch: int, ranks: int, notes: Mapping[str, Any]) -> None:
        """Continue in an epoch after `batch` of its batches, as `ranks` ranks counted them.

        If `notes` say how many batches of the source that were, they are right: ranks may have been lost.
        """
        if self._steps_per_epoch is None:
            for _ in range(2 * epoch if int(self._source.cardinality()) >= 0 else epoch):
                self._begin(self._read_source())
        else:
            batch += epoch * self._steps_per_epoch
        name = "source" if self._steps_per_epoch is None else "position"
        wanted = int(notes.get(name, notes.get("read", batch) * ranks))
        while self.position < wanted:
            if not self._waiting:
                self._waiting.append(self._next_of(wanted))
            self._waiting.popleft()
            self.position += 1

    def _next_of(self, wanted: int) -> Any:
        try:
            return next(self._iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise HvpipeError(
                f"The data should have the {wanted} batches of all ranks that the checkpoint counts: use the "
                f"batch size with which it was written. Received: data that ended after {self.position}"
            ) from None

    def notes(self, counted: int) -> dict[str, int]:
        """Return what `resume` needs as `notes`, if `counted` steps have run in the epoch."""
        if not self.shares_source:
            return {}
        if self._steps_per_epoch is not None:
            return {"position": self.position}
        return {"source": self.position} if counted else {}

    def batch(self) -> int | None:
        """Return what `resume` needs as `batch`; None if the steps of the epoch say it."""
        if not self.shares_source or self._steps_per_epoch is not None:
            return None
        return self.position // self._session.world.size

    def has_more(self) -> bool:
        """Return whether the epoch has a batch for every rank left."""
        return self.shares_source and self._steps_per_epoch is None and self._has_round()

    def _read_source(self) -> Any:
        return iter(self._source.prefetch(tf.data.AUTOTUNE))

    @property
    def _width(self) -> int:
        return self._session.world.size if self.shares_source else 1

    def _begin(self, iterator: Any) -> None:
        self._iterator = iterator
        self._waiting.clear()
        self._rounds.clear()
        self.position = 0

    def _has_round(self) -> bool:
        while len(self._waiting) < self._width:
            try:
                self._waiting.append(next(self._iterator))
            except (StopIteration, tf.errors.OutOfRangeError):
                return False
        return True
