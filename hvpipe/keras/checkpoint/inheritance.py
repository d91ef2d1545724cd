"""Who writes what after a loss: divides a pipeline's state among the remaining ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvpipe.keras.pipeline.state_names import number_in


@dataclass(frozen=True)
class Held:
    """The state of a rank that is left.

    Attributes:
        place: The steps that it has done, the epoch, and the batches done in it.
        trains: Whether its optimizer trains any variable.
        names: The names of its state (state_names.py).
    """

    place: tuple[int, int, int]
    trains: bool
    names: frozenset[str]


def shares(held: Sequence[Held | None], variables: int) -> list[frozenset[str]] | None:
    """Return the names that each rank writes, so that every name is written once.

    Args:
        held: What each rank has; None for a rank that has no complete state.
        variables: How many variables the whole model has.

    Returns:
        The names by rank; None if no rank has some variable, or the ranks are at different places.
    """
    known = [each for each in held if each is not None]
    if len(known) < len(held) or len({each.place for each in known}) != 1:
        return None
    # The variables that an optimizer has only once are those of a rank that trains.
    training_first = sorted(range(len(known)), key=lambda rank: not known[rank].trains)
    found: list[set[str]] = [set() for _ in known]
    for name in sorted(frozenset().union(*(each.names for each in known))):
        order = training_first if number_in(name) is None else range(len(known))
        found[next(rank for rank in order if name in known[rank].names)].add(name)
    if any(not any(f"weights/{i}" in names for names in found) for i in range(variables)):
        return None
    return [frozenset(names) for names in found]
