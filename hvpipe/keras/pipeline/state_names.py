"""Names for a pipeline's training state that do not depend on how the model is cut into stages.

A variable's name holds its number among the variables of the whole model's layers:

    weights/12                   variable 12: a weight, a statistic, or the state of a seed generator
    optimizer/_momentums/12      the optimizer's slot for it
    optimizer/_iterations        a variable that an optimizer has once

Names of an optimizer inside another one (loss scaling) begin with optimizer/inner_optimizer/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras import compat
from hvpipe.keras.graph.deferred_build import variables_of, weights_of
from hvpipe.keras.pipeline.layout import Layout
from hvpipe.keras.pipeline.on_all_ranks import on_all_ranks
from hvpipe.keras.seeds import seeds_of
from hvpipe.session import Session


@dataclass(frozen=True)
class ModelVariable:
    """A variable of the whole model, and the world ranks that hold it, ascending."""

    variable: Any
    holders: tuple[int, ...]


@dataclass(frozen=True)
class RankState:
    """The state that one rank holds, by name.

    Attributes:
        variables: All variables of the whole model, by number.
        weights: This rank's variables.
        optimizer: This rank's optimizer state.
        owned: The names that this rank saves. The first holder saves a variable. The first rank that trains
            anything saves the variables that an optimizer has only once.
        seeds: The names of seed generators' states, each with this rank's index among the holders.
        may_differ: The names of statistics and seeds, which may differ between holders.
    """

    variables: tuple[ModelVariable, ...]
    weights: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    owned: frozenset[str]
    seeds: Mapping[str, int]
    may_differ: frozenset[str]

    @property
    def named(self) -> dict[str, Any]:
        """Weights and optimizer state, by name."""
        return {**self.weights, **self.optimizer}


def agree_on_trainable(session: Session, layout: Layout) -> None:
    """Copy other ranks' trainable flags to this rank's copies of their layers; collective.

    Users change the flags of `pipe.layers`, which has one rank's layers. Files describe all layers.

    Raises:
        MismatchError: Ranks that share a layer have different flags. Raised on all ranks.
    """
    every = _with_flags(layout.stages.graph.all_layers())
    stages = layout.stages_of(session.world.rank)
    own = {id(one) for stage in stages for one in _with_flags(layout.stages.layers(stage))}
    mine = {number: one.trainable for number, one in enumerate(every) if id(one) in own}
    everyone = session.engine.allgather_object(mine, "which layers are trainable")
    for number, one in enumerate(every):
        flags = {rank: known[number] for rank, known in enumerate(everyone) if number in known}
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
    """Return everything with a trainable flag: layers, the layers inside them, then variables.

    A layer comes before those inside it, because setting its flag sets theirs.
    """
    inner = {id(one): one for layer in layers for one in compat.layers_in(layer)}
    return [*inner.values(), *variables_of(layers)]


def rank_state(session: Session, layout: Layout, optimizer: Any, trainable: Sequence[Any]) -> RankState:
    """Return this rank's part of the state, and build the optimizer if it is not built; collective.

    Args:
        session: The session.
        layout: The layout.
        optimizer: This rank's optimizer; None before `compile`.
        trainable: The variables that the optimizer trains.

    Returns:
        The state by name.

    Raises:
        MismatchError: Only some ranks that share a layer train it. Raised on all ranks.
        HvpipeError: The optimizer's state cannot be assigned to variables. Raised on all ranks.
    """
    agree_on_trainable(session, layout)
    rank = session.world.rank
    variables = model_variables(layout)
    weights = {f"weights/{i}": v.variable for i, v in enumerate(variables) if rank in v.holders}
    numbers = numbers_of(variables)
    slots = on_all_ranks(
        session, "naming the optimizer's state", lambda: _slots_of(optimizer, trainable, numbers)
    )
    trained = 0 if optimizer is None else len(compat.trained_variables(optimizer))
    trains = session.engine.agree("how many variables each rank trains", float(trained))
    first_training_rank = next((r for r, count in enumerate(trains) if count), 0)

    def owner(name: str) -> int:
        number = number_in(name)
        return first_training_rank if number is None else variables[number].holders[0]

    owned = {name for name in (*weights, *slots) if owner(name) == rank}
    layers = layout.stages.graph.all_layers()
    states = {id(state) for state in seeds_of(layers)}
    seeds = {
        f"weights/{i}": v.holders.index(rank)
        for i, v in enumerate(variables)
        if id(v.variable) in states and rank in v.holders
    }
    equal = {id(v) for v in weights_of(layers)}
    may_differ = frozenset(name for name, v in weights.items() if id(v) not in equal)
    return RankState(variables, weights, slots, frozenset(owned), seeds, may_differ)


def model_variables(layout: Layout) -> tuple[ModelVariable, ...]:
    """Return all variables of the model's layers, in the order of its graph."""
    stages = layout.stages
    ranks_of: dict[int, set[int]] = {}
    for stage in range(len(stages.cuts)):
        for variable in variables_of(stages.layers(stage)):
            ranks_of.setdefault(id(variable), set()).update(layout.ranks_of(stage))
    everything = variables_of(stages.graph.all_layers())
    return tuple(ModelVariable(v, tuple(sorted(ranks_of[id(v)]))) for v in everything)


def numbers_of(variables: Sequence[ModelVariable]) -> dict[int, int]:
    """Return the number of each variable, by id."""
    return {id(one.variable): number for number, one in enumerate(variables)}


def number_in(name: str) -> int | None:
    """Return the variable's number in a name; None for a variable that an optimizer has only once."""
    last = name.rpartition("/")[2]
    return int(last) if last.isdigit() else None


def optimizer_names(optimizer: Any, numbers: Mapping[int, int], prefix: str = "optimizer") -> dict[str, Any]:
    """Return the variables of a built optimizer by name.

    Like Keras's own, the optimizer must keep slots in lists in the order of its trained variables, and all
    other variables in attributes.

    Args:
        optimizer: The optimizer.
        numbers: The numbers of the variables that it trains, by id.
        prefix: What names begin with.
    """
    trained = [numbers[id(v)] for v in compat.trained_variables(optimizer)]
    found: dict[str, Any] = {}
    for attribute, value in compat.optimizer_attributes(optimizer).items():
        if isinstance(value, keras.Variable):
            found[f"{prefix}/{attribute}"] = value
        elif isinstance(value, list) and len(value) == len(trained):
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
                "To be saved, an optimizer should keep a list for each kind of slot, in the order of the "
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
    # Variables that became trainable later have no slots yet. In the undivided model they would have some.
    known = {id(v) for v in compat.trained_variables(optimizer)}
    left = [v for v in trainable if id(v) not in known]
    if left:
        fresh = unbuilt_copy(optimizer)
        fresh.build(left)
        found = {**optimizer_names(fresh, numbers), **found}
    return found


def unbuilt_copy(optimizer: Any) -> Any:
    """Return an optimizer of the same class and settings that is not built."""
    return type(optimizer).from_config(optimizer.get_config())


def reset_slots(optimizer: Any, state: RankState) -> None:
    """Before the first step, set slots to the initial values that match the current weights.

    Plain Keras makes slots at the first step, after weights are loaded. Some are copies of the weights
    (ScheduleFreeAdamW).
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if int(compat.step_count(inner)) > 0:
        return
    numbers = numbers_of(state.variables)
    # One variable at a time: memory may not suffice for all slots twice.
    for variable in compat.trained_variables(inner):
        fresh = unbuilt_copy(optimizer)
        fresh.build([variable])
        for name, value in optimizer_names(fresh, numbers).items():
            if number_in(name) is not None:
                state.optimizer[name].assign(value)
