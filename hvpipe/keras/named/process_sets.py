"""Process sets: groups of ranks that run collectives among themselves."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.session import Session, current, is_initialized

# The session of each set that was added: its number means another set, or none, in the next session.
_added_in: weakref.WeakKeyDictionary[ProcessSet, weakref.ref[Session]] = weakref.WeakKeyDictionary()


class ProcessSet:
    """Some ranks, which take part in a collective together.

    Args:
        ranks: The ranks, or a communicator of mpi4py, whose ranks are taken. The ranks may give different
            parts of a communicator that was split: each rank then has the set of its own part.

    Raises:
        ValueError: If `ranks` is neither.

    Example:
        ```python
        even = hk.add_process_set([rank for rank in range(hk.size()) if rank % 2 == 0])
        if even.included():
            total = hk.allreduce(loss, op="sum", process_set=even)
        ```
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks: Iterable[int] | Any) -> None:
        if hasattr(ranks, "Get_group"):
            self.mpi_comm = ranks
            return
        wanted = "ProcessSet should be made from a list of ranks or an mpi4py communicator"
        if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
            raise ValueError(f"{wanted}. Received: {ranks!r}")
        listed = list(ranks)
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in listed):
            raise ValueError(f"{wanted}. Received: {listed!r}")
        self.ranks = sorted(listed)

    def size(self) -> int | None:
        """Return the number of ranks; None before `add_process_set` or `init`."""
        return None if self.process_set_id is None else len(self._registered())

    def rank(self) -> int | None:
        """Return this rank's place in the set; None if the set is not added, or this rank is no member."""
        if self.process_set_id is None:
            return None
        ranks, mine = self._registered(), current().world.rank
        return ranks.index(mine) if mine in ranks else None

    def included(self) -> bool | None:
        """Return whether this rank is a member; None if the ranks are not known yet."""
        return None if self.ranks is None else current().world.rank in self.ranks

    def __repr__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )

    def _registered(self) -> list[int]:
        return ranks_of(number_of(self))


class _AllRanks(ProcessSet):
    """The set of all ranks, which always exists."""

    def __init__(self) -> None:
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int] | None:  # type: ignore[override]
        return list(range(current().world.size)) if is_initialized() else None


global_process_set: ProcessSet = _AllRanks()
"""All ranks."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set; all ranks of the world call it together.

    Args:
        process_set: The set, or its ranks.

    Returns:
        The set, ready for use.

    Raises:
        ValueError: If a set of these ranks exists, or for ranks that do not exist.
        MismatchError: If the ranks of the world give different sets.

    Example:
        ```python
        first_two = hk.add_process_set([0, 1])
        ```
    """
    return registered(process_set, may_exist=False)


def registered(process_set: ProcessSet | Sequence[int], *, may_exist: bool) -> ProcessSet:
    """Add a process set as `add_process_set` does. One that `may_exist` gets the number of its twin."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _read_ranks(added)
    assert added.ranks is not None
    sets = _of_every_part(added, added.ranks)
    calls = current().named_calls()
    found = [calls.set_of(ranks) if may_exist else -1 for ranks in sets]
    if may_exist:
        everyone = current().engine.allgather_object((sets, found), "process sets given to init")
        if any(each != everyone[0] for each in everyone):
            raise MismatchError(f"All ranks should give the same process sets. Received, by rank: {everyone}")
    try:
        numbers = [calls.add_set(r) if known < 0 else known for r, known in zip(sets, found, strict=True)]
        added.process_set_id = numbers[sets.index(added.ranks)]
        _added_in[added] = weakref.ref(current())
    except HvpipeError as error:
        if type(error) is not HvpipeError:
            raise
        raise ValueError(str(error)) from None
    return added


def register_all(process_sets: Iterable[ProcessSet | Sequence[int]]) -> list[ProcessSet]:
    """Add the sets that `init` is given. A set that an earlier call has added gets that one's number.

    Raises ValueError on all ranks if one of them gives a set twice, or the set of all ranks.
    """
    given = [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in process_sets]
    for each in given:
        _read_ranks(each)
    everyone = list(range(current().world.size))
    by_rank = current().engine.allgather_object([each.ranks for each in given], "process sets given to init")
    for rank, listed in enumerate(by_rank):
        for place, ranks in enumerate(listed):
            if ranks == everyone or ranks in listed[:place]:
                raise ValueError(
                    "process_sets should hold each set of ranks once, and not the set of all ranks, which is "
                    f"global_process_set. Received: entry {place} of ranks {ranks} on rank {rank}"
                )
    return [registered(each, may_exist=True) for each in given]


def _read_ranks(process_set: ProcessSet) -> None:
    """Let a set of a communicator know its ranks; collective among the communicator's ranks."""
    if process_set.mpi_comm is not None and process_set.ranks is None:
        process_set.ranks = sorted(process_set.mpi_comm.allgather(current().world.rank))


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; all ranks of the world call it together.

    Args:
        process_set: A set that `add_process_set` returned.

    Returns:
        Whether it was removed: False for the set of all ranks, and for one that was not added.

    Raises:
        MismatchError: If the ranks of the world give different sets.

    Example:
        ```python
        hk.remove_process_set(first_two)
        ```
    """
    number = process_set.process_set_id
    if number is None or number == 0 or _of_ended_session(process_set):
        return False
    process_set.process_set_id = None
    numbers = _of_every_part(process_set, number)
    removed = [current().named_calls().remove_set(each) for each in numbers]
    return all(removed)


def _of_every_part(process_set: ProcessSet, mine: Any) -> list[Any]:
    """Return `mine` of all parts of a communicator that may have been split, each once; collective.

    If any rank has made its set from a list of ranks, return only this rank's.
    """
    given = current().engine.allgather_object(
        (mine, process_set.mpi_comm is not None), "add_process_set or remove_process_set"
    )
    if not all(from_communicator for _, from_communicator in given):
        return [mine]
    parts = [part for part, _ in given]
    return [part for place, part in enumerate(parts) if part not in parts[:place]]


def number_of(process_set: ProcessSet | None) -> int:
    """Return a set's number; raise ValueError for a set that does not exist, or is no set."""
    if process_set is None:
        return 0
    if not isinstance(process_set, ProcessSet) or process_set.process_set_id is None:
        raise ValueError(
            "process_set should be a ProcessSet that was added first, by add_process_set. "
            f"Received: {process_set!r}"
        )
    if _of_ended_session(process_set):
        raise ValueError(
            "A process set should be added again after shutdown() and init(). "
            f"Received: {process_set}, of a session that has ended"
        )
    ranks_of(process_set.process_set_id)
    return process_set.process_set_id


def _of_ended_session(process_set: ProcessSet) -> bool:
    added_in = _added_in.get(process_set)
    return added_in is not None and added_in() is not current()


def ranks_of(number: int) -> list[int]:
    """Return the ranks of the set with a number; raise ValueError if no set has it."""
    ranks: list[int] = current().named_calls().ranks_of(number)
    if not ranks:
        raise ValueError(
            "A process set should be added by add_process_set, and not be removed. "
            f"Received: process_set_id={number}, which no set has"
        )
    return ranks
