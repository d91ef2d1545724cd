"""The values of a pipeline in a checkpoint: each rank writes its own, and ranks of any layout read them.

Names are those of state_names.py. Statistics and seeds that another rank owns are written too, with this
rank's number: weights/12@3 on rank 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvpipe.checkpoints.arrays import read_arrays
from hvpipe.checkpoints.files import check_seen
from hvpipe.checkpoints.manifest import Manifest, RankPart
from hvpipe.errors import HvpipeError
from hvpipe.keras.checkpoint.model_check import (
    as_variable,
    check_kind,
    check_optimizer,
    check_variables,
    described,
)
from hvpipe.keras.pipeline.state_names import RankState, number_in
from hvpipe.keras.seeds import own_seed

KIND = "pipeline"


def describe(model_name: str, state: RankState, optimizer: Any) -> dict[str, Any]:
    """Return what a model must have to read a checkpoint, as JSON. `optimizer` is None before `compile`."""
    return {
        "name": model_name,
        "optimizer": "" if optimizer is None else type(optimizer).__name__,
        "variables": _rows(state),
        "holders": [list(one.holders) for one in state.variables],
    }


def variables_to_write(state: RankState, rank: int) -> dict[str, Any]:
    """Return the variables that this rank saves: those that it owns, and its own statistics and seeds."""
    found = {name: state.named[name] for name in sorted(state.owned)}
    for name, variable in state.weights.items():
        if name not in found and name in state.may_differ:
            found[f"{name}@{rank}"] = variable
    return found


def read_values(
    place: Path, manifest: Manifest, state: RankState, optimizer: Any, rank: int
) -> dict[str, Any]:
    """Return the values of this rank's variables by name, after all checks.

    Args:
        place: The checkpoint.
        manifest: Its manifest.
        state: This rank's state.
        optimizer: This rank's optimizer; None before `compile`. Its values are not read if there are none.
        rank: This rank.

    Raises:
        HvpipeError: It is of another model or optimizer, or this rank cannot read a file.
    """
    check_kind(manifest, KIND)
    check_variables(_rows(state), manifest.model["variables"])
    wanted = dict(state.weights)
    part_of = {name: part for part in manifest.parts for name in part.names}
    if optimizer is not None and manifest.model["optimizer"]:
        check_optimizer(manifest, optimizer)
        _check_all_slots_are_wanted(part_of, state, place)
        wanted |= state.optimizer
    sources = {name: _source(name, part_of, manifest, state, rank) for name in wanted}
    missing = [name for name, source in sources.items() if source not in part_of]
    if missing:
        raise HvpipeError(
            "The optimizer should have the settings it was saved with, and the same layers should be "
            f"trainable. Received: {_with_path(missing[0], state)}, which {place} does not have"
        )
    values: dict[str, Any] = {}
    for part in manifest.parts:
        of_part = {name: source for name, source in sources.items() if part_of[source] is part}
        if of_part:
            values |= _values_in(place, part, of_part, wanted)
    for name, holder in state.seeds.items():
        if sources[name] == name:  # the first holder's seed: other holders derive their own from it
            values[name] = own_seed(values[name], holder)
    return values


def _rows(state: RankState) -> list[list[Any]]:
    return described({f"weights/{number}": one.variable for number, one in enumerate(state.variables)})


def _source(
    name: str, part_of: Mapping[str, RankPart], manifest: Manifest, state: RankState, rank: int
) -> str:
    """Return the saved name to read a variable from: this rank's own copy if the same ranks share it."""
    number, own = number_in(name), f"{name}@{rank}"
    if number is None or own not in part_of:
        return name
    return own if manifest.model["holders"][number] == list(state.variables[number].holders) else name


def _values_in(
    place: Path, part: RankPart, sources: Mapping[str, str], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """Read variables from one file, each from its source."""
    check_seen(place, part.file)
    arrays, found = read_arrays(place / part.file.name, dict.fromkeys(sources.values())), {}
    for name, source in sources.items():
        found[name] = as_variable(arrays[source], wanted[name])
        if found[name].shape != tuple(wanted[name].shape):
            raise HvpipeError(
                f"{name} should be of shape {tuple(wanted[name].shape)}, as {wanted[name].path} is. "
                f"Received: {found[name].shape} in {place / part.file.name}"
            )
    return found


def _check_all_slots_are_wanted(part_of: Mapping[str, RankPart], state: RankState, place: Path) -> None:
    """Raise HvpipeError if the saved optimizer has more slots for a weight that this rank trains."""
    trained = {
        number
        for name in state.weights
        if (number := number_in(name)) is not None and state.variables[number].variable.trainable
    }
    for name in part_of:
        of_the_optimizer = name.startswith("optimizer/") and number_in(name) in trained
        if of_the_optimizer and name not in state.optimizer:
            raise HvpipeError(
                "The optimizer should have the settings it was saved with. "
                f"Received: one without {_with_path(name, state)}, which {place} has"
            )


def _with_path(name: str, state: RankState) -> str:
    """Return a name with the path of its variable, for errors."""
    number = number_in(name)
    return name if number is None else f"{name} (for {state.variables[number].variable.path})"
