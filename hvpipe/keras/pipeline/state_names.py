"""Names for the state of a pipeline's training that do not depend on how the model is cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import keras

from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras.graph.deferred_build import variables_of, weights_of
from hvpipe.keras.pipeline.layout import Layout
from hvpipe.keras.seeds import seeds_of
from hvpipe.session import Session

Result = TypeVar("Result")

# A variable goes by its number among the variables of the whole model's layers:
#
#   weights/12                   variable 12: a weight, a statistic, or the state of a seed generator
#   optimizer/_momentums/12      the optimizer's slot for it
#   optimizer/_iterations        what an optimizer has once
#
# Those of an optimizer within an optimizer (loss scaling) begin with optimizer/inner_optimizer/.


@dataclass(frozen=True)
class Place:
    """A variable of the whole model, and the world ranks that hold it, ascending."""

    variable: Any
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Holdings:
    """What one rank has of the state, by name.

    `owned` are the names that this rank saves, so that each is saved once: the first holder does. What an
    optimizer has once is that of the first rank that trains anything. `seeds` are the states of seed
    generators, each with this rank's place among its holders; `apart` are the names of these and of
    statistics, in which holders may differ.
    """

    places: tuple[Place, ...]
    weights: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    owned: frozenset[str]
    seeds: Mapping[str, int]
    apart: frozenset[str]

    @property
    def named(self) -> dict[str, Any]:
        return {**self.weights, **self.optimizer}


def agree_on_trainable(session: Session, layout: Layout) -> None:
    """Let this rank's copies of other ranks' layers be trainable as they are where they live; collective.

    Files tell of all layers, and `pipe.layers` changes those of one rank. Raises MismatchError, on all
    ranks, where ranks that share a layer differ.
    """
    every = _with_flags(layout.stages.graph.all_layers())
    stages = layout.stages_of(session.world.rank)
    own = {id(one) for stage in stages for one in _with_flags(layout.stages.layers(stage))}
    mine = {number: one.trainable for number, one in enumerate(every) if id(one) in own}
    everyone = session.engine.allgather_object(mine)
    for number, one in enumerate(every):
        flags = {rank: told[number] for rank, told in enumerate(everyone) if number in told}
        (first, flag), *others = flags.items()
        odd = next((rank for rank, other in others if other != flag), None)
        if odd is not None:
            raise MismatchError(
                "Ranks that share a layer should all train it or none: set `trainable` on each of them. "
                f"Received: {one.path or one.name} with trainable={flag} on rank {first} and "
                f"trainable={not flag} on rank {odd}"
            )
        if one.trainable != flag:
            one.trainable = flag


def _with_flags(layers: Sequence[Any]) -> list[Any]:
    """All that says of itself whether it is trainable; what changes others as well comes before them."""
    inner = {id(one): one for layer in layers for one in layer._flatten_layers()}
    return [*inner.values(), *variables_of(layers)]


def holdings_of(session: Session, layout: Layout, optimizer: Any, trainable: Sequence[Any]) -> Holdings:
    """This rank's part of the state; `optimizer` (None before compile) trains `trainable`. Collective.

    Builds the optimizer where that was not done. Raises MismatchError where ranks that share a layer do not
    all train it, and HvpipeError for an optimizer whose state cannot be told apart by variable, both on all
    ranks.
    """
    agree_on_trainable(session, layout)
    rank = session.world.rank
    places = places_of(layout)
    weights = {f"weights/{i}": p.variable for i, p in enumerate(places) if rank in p.holders}
    numbers = numbers_of(places)
    slots = together(
        session, "naming the optimizer's state", lambda: _slots_of(optimizer, trainable, numbers)
    )
    trained = 0 if optimizer is None else len(optimizer._trainable_variables)
    trains = session.engine.agree("how many variables each rank trains", float(trained))
    keeper = next((r for r, count in enumerate(trains) if count), 0)

    def owner(name: str) -> int:
        number = number_in(name)
        return keeper if number is None else places[number].holders[0]

    owned = {name for name in (*weights, *slots) if owner(name) == rank}
    layers = layout.stages.graph.all_layers()
    states = {id(state) for state in seeds_of(layers)}
    seeds = {
        f"weights/{i}": p.holders.index(rank)
        for i, p in enumerate(places)
        if id(p.variable) in states and rank in p.holders
    }
    kept = {id(v) for v in weights_of(layers)}
    apart = frozenset(name for name, v in weights.items() if id(v) not in kept)
    return Holdings(places, weights, slots, frozenset(owned), seeds, apart)


def places_of(layout: Layout) -> tuple[Place, ...]:
    """All variables of the model's layers, in the order of its graph."""
    stages = layout.stages
    ranks_of: dict[int, set[int]] = {}
    for stage in range(len(stages.cuts)):
        for variable in variables_of(stages.layers(stage)):
            ranks_of.setdefault(id(variable), set()).update(layout.ranks_of(stage))
    everything = variables_of(stages.graph.all_layers())
    return tuple(Place(v, tuple(sorted(ranks_of[id(v)]))) for v in everything)


def numbers_of(places: Sequence[Place]) -> dict[int, int]:
    """The number of each variable, by id."""
    return {id(place.variable): number for number, place in enumerate(places)}


def number_in(name: str) -> int | None:
    """The number of the variable that a name is about; None for what an optimizer has once."""
    last = name.rpartition("/")[2]
    return int(last) if last.isdigit() else None


def optimizer_names(optimizer: Any, numbers: Mapping[int, int], prefix: str = "optimizer") -> dict[str, Any]:
    """The variables of a built optimizer by name; `numbers` are those of what it trains, by id.

    As all of Keras's do, it keeps slots in lists in the order of the variables, the rest in attributes.
    """
    trained = [numbers[id(v)] for v in optimizer._trainable_variables]
    found: dict[str, Any] = {}
    for attribute, value in vars(optimizer).items():
        if isinstance(value, keras.Variable):
            found[f"{prefix}/{attribute}"] = value
        elif isinstance(value, list) and attribute not in ("_variables", "_trainable_variables"):
            if len(value) != len(trained):
                continue
            for number, slot in zip(trained, value, strict=True):
                if isinstance(slot, keras.Variable):
                    found[f"{prefix}/{attribute}/{number}"] = slot
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        found |= optimizer_names(inner, numbers, f"{prefix}/inner_optimizer")
    known = {id(v) for v in found.values()}
    for variable in optimizer.variables:
        if id(variable) not in known:
            raise HvpipeError(
                "An optimizer whose state is saved keeps a list for each kind of slot, in the order of the "
                "variables it was built with, and everything else in attributes. "
                f"Received: {type(optimizer).__name__} with a variable {variable.path} elsewhere"
            )
    return found


def _slots_of(optimizer: Any, trainable: Sequence[Any], numbers: Mapping[int, int]) -> dict[str, Any]:
    if optimizer is None:
        return {}
    if not optimizer.built:
        optimizer.build(list(trainable))
    found = optimizer_names(optimizer, numbers)
    # What was made trainable after that has no slots yet, but would have in the undivided model.
    known = {id(v) for v in optimizer._trainable_variables}
    left = [v for v in trainable if id(v) not in known]
    if left:
        fresh = another(optimizer)
        fresh.build(left)
        found = {**optimizer_names(fresh, numbers), **found}
    return found


def another(optimizer: Any) -> Any:
    """An optimizer of the same kind and settings, not built."""
    return type(optimizer).from_config(optimizer.get_config())


def begin_slots_anew(optimizer: Any, holdings: Holdings) -> None:
    """Where no step has been taken, give slots what they begin with on the weights as they are now.

    Keras makes them at the first step, after all loading, and some are copies of the weights
    (ScheduleFreeAdamW).
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if int(inner._iterations) > 0:
        return
    numbers = numbers_of(holdings.places)
    # One variable at a time: for all slots twice there may be no memory.
    for variable in inner._trainable_variables:
        fresh = another(optimizer)
        fresh.build([variable])
        for name, value in optimizer_names(fresh, numbers).items():
            if number_in(name) is not None:
                holdings.optimizer[name].assign(value)


def together(session: Session, what: str, action: Callable[[], Result]) -> Result:
    """Do something on every rank; where it fails on one, all get an HvpipeError that says why. Collective."""
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:
        error = raised
    reasons = session.engine.allgather_object(None if error is None else _told(error))
    for rank, reason in enumerate(reasons):
        if reason is not None:
            message = f"{what} should succeed on every rank. Received: rank {rank}: {reason}"
            raise HvpipeError(message) from error
    return result


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, HvpipeError) else f"{type(error).__name__}: {error}"
