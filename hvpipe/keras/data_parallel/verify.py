"""Compares weights over ranks: a checksum of each variable, and which ranks differ in which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras.compat import layers_in
from hvpipe.keras.initial_state import checksum_of, shared_slots
from hvpipe.keras.training_alone import tell_of_difference
from hvpipe.keras.variables import name_of, untrained_in
from hvpipe.session import Session


def chosen_interval(session: Session, verify_every: int | None) -> int:
    """Return after how many steps to compare: the argument's value, else the setting's; 0: never."""
    if verify_every is not None and verify_every < 1:
        raise HvpipeError(f"verify_every should be positive. Received: verify_every={verify_every}")
    return session.settings.verify_every if verify_every is None else verify_every


def checksum(variable: Any) -> int:
    """Return a checksum of a variable's bytes."""
    return int(checksum_of([variable]))


def equal_on_all_ranks(model: Any, on_purpose: Sequence[Any] = ()) -> list[Any]:
    """Return the variables that all ranks should share.

    Not what layers compute from each rank's data, nor what each rank trains alone `on_purpose`.
    """
    own = {id(v) for v in on_purpose} | {id(v) for v, _ in untrained_in(layers_in(model))}
    return [*(v for v in model.variables if id(v) not in own), *shared_slots(model.optimizer)]


def verify_equal(session: Session, variables: Sequence[Any], step: int) -> None:
    """Raise MismatchError, on all ranks, if a variable differs between ranks; collective.

    The error names the first such variable, and the ranks that differ from most others.
    """
    different = _different(session, variables, f"verifying {len(variables)} variables after step {step}")
    if different:
        place, sums = next(iter(different.items()))
        raise difference(step, name_of(variables[place]), sums, len(different), len(variables))


def _different(session: Session, variables: Sequence[Any], what: str) -> dict[int, dict[int, int]]:
    """Return the checksums by rank of the variables that differ, by their places; collective."""
    mine = np.array([[checksum(variable) for variable in variables]], np.int64)
    session.engine.agree(what)
    everyone = session.engine.allgather(mine)
    sums = {place: dict(enumerate(each.tolist())) for place, each in enumerate(everyone.T)}
    return {place: each for place, each in sums.items() if len(set(each.values())) > 1}


def tell_of_unaveraged(session: Session, model: Any, variables: Sequence[Any]) -> None:
    """After the first step of a `fit`, report weights among `variables` that differ; collective.

    Raises:
        HvpipeError: If there are any and the session is strict.
    """
    weights = {id(v) for v in model.weights}
    variables = [v for v in variables if id(v) in weights]
    if len(set(session.engine.agree("weights after the first step of fit", checksum_of(variables)))) == 1:
        return
    different = _different(session, variables, "the weights that differ after the first step of fit")
    found = {id(variables[place]) for place in different}
    nets = [
        f"{layer.name} ({count} of {len(layer.weights)} weights)"
        for layer in model.layers
        if (count := sum(id(v) in found for v in layer.weights))
    ]
    names = ", ".join(variables[place].path for place in list(different)[:3])
    tell_of_difference(session, model, ", ".join([*nets, f"beginning with {names}"]))


def difference(step: int, name: str, sums: Mapping[int, int], different: int, compared: int) -> MismatchError:
    """Return the error for variables that differ between ranks.

    Args:
        step: The step after which they differ.
        name: The first variable that differs.
        sums: Its checksum on each rank that holds it, by rank, ascending.
        different: How many variables differ.
        compared: How many were compared.
    """
    # Where two values are equally frequent, that of the lowest rank counts as right.
    usual, _ = Counter(sums.values()).most_common(1)[0]
    odd = ", ".join(str(rank) for rank, found in sums.items() if found != usual)
    return MismatchError(
        f"All ranks should have the same weights after step {step}. Look for a rank that sets weights on its "
        "own, for faulty memory, or for an update outside of fit. "
        f"Received: {name} differs on rank {odd} from the other ranks; in all "
        f"{different} of {compared} variables differ"
    )
