"""Checkpoints of a pipeline: each rank writes its own part, and any layout can continue from them.

A folder holds an index and the shards that it names:

    checkpoint.json      the model's variables, the optimizer, and which shard holds what
    000007-2.npz         what rank 2 wrote in the 7th save, by the names of state_names.py

Shards have new names in every save. The index is replaced when all of them are complete; until then the
folder holds the old checkpoint. Shards that the index does not name are removed last.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.atomic_file import atomic_file
from hvpipe.checkpoints.arrays import read_arrays, write_arrays
from hvpipe.config_file import Table, read_document, write_document
from hvpipe.errors import HvpipeError
from hvpipe.keras.pipeline.on_all_ranks import on_all_ranks
from hvpipe.keras.pipeline.state_names import ModelVariable, RankState, number_in
from hvpipe.keras.seeds import own_seed
from hvpipe.session import Session

INDEX = "checkpoint.json"
FORMAT, VERSION = "hvpipe-checkpoint", 1
_SHARD = re.compile(r"\.?(\d{6,})-\d+\.npz(\.\d+\.partial)?")


@dataclass(frozen=True)
class Shard:
    """A file of a checkpoint: its name, its size in bytes, and the names of its values."""

    file: str
    size_bytes: int
    names: tuple[str, ...]


def save_checkpoint(
    session: Session, folder: str | os.PathLike[str], model_name: str, state: RankState, optimizer: Any
) -> None:
    """Write the state of all ranks; collective.

    Args:
        session: The session.
        folder: A folder that all ranks see.
        model_name: The model's name.
        state: This rank's state.
        optimizer: This rank's optimizer; None before `compile`.

    Raises:
        HvpipeError: Writing failed. Raised on all ranks; the old checkpoint is still there.
    """
    path = Path(folder)
    rank = session.world.rank
    what = f"saving a checkpoint in {path}"
    serial = on_all_ranks(session, what, lambda: _next_serial(path) if rank == 0 else 0)
    serial = session.engine.broadcast_object(serial, what="saving a checkpoint")
    shard = on_all_ranks(
        session, what, lambda: _write_shard(path, f"{serial:06d}-{rank}.npz", variables_to_write(state, rank))
    )
    shards = session.engine.allgather_object(shard, "saving a checkpoint")

    def finish() -> None:
        if rank == 0:
            _check_shards(path, shards)
            write_document(path / INDEX, _index(model_name, state, optimizer, shards))
            _remove_others(path, shards)

    on_all_ranks(session, what, finish)


def load_checkpoint(
    session: Session, folder: str | os.PathLike[str], state: RankState, optimizer: Any
) -> bool:
    """Read this rank's part of a checkpoint; collective.

    Args:
        session: The session.
        folder: A folder that all ranks see.
        state: This rank's state, whose variables get the values.
        optimizer: This rank's optimizer; None before `compile`.

    Returns:
        Whether the optimizer's state was read.

    Raises:
        HvpipeError: The checkpoint is incomplete, or of another model or optimizer. Raised on all ranks,
            before anything has changed.
    """
    path = Path(folder)
    values = on_all_ranks(
        session,
        f"loading the checkpoint in {path}",
        lambda: _read(path, state, optimizer, session.world.rank),
    )
    for name, value in values.items():
        state.named[name].assign(value)
    return any(name in state.optimizer for name in values)


# Writing ----------------------------------------------------------------------------------------------------


def variables_to_write(state: RankState, rank: int) -> dict[str, Any]:
    """Return the variables that this rank saves: those that it owns, and its own statistics and seeds."""
    found = {name: state.named[name] for name in sorted(state.owned)}
    for name, variable in state.weights.items():
        if name not in found and name in state.may_differ:
            found[f"{name}@{rank}"] = variable
    return found


def _next_serial(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return max((int(match[1]) for match in map(_SHARD.fullmatch, os.listdir(folder)) if match), default=0) + 1


def _write_shard(folder: Path, name: str, variables: Mapping[str, Any]) -> Shard:
    """Write a .npz, one array at a time."""
    with atomic_file(folder / name, sync=True) as file:
        write_arrays(file, variables)
    return Shard(name, (folder / name).stat().st_size, tuple(variables))


def _index(model_name: str, state: RankState, optimizer: Any, shards: Sequence[Shard]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        **describe(model_name, state, optimizer),
        "shards": [{"file": s.file, "bytes": s.size_bytes, "names": list(s.names)} for s in shards],
    }


def describe(model_name: str, state: RankState, optimizer: Any) -> dict[str, Any]:
    """Return what a model must have to read a checkpoint, as JSON."""
    return {
        "model": model_name,
        "variables": [_described(one) for one in state.variables],
        "optimizer": "" if optimizer is None else type(optimizer).__name__,
    }


def _described(one: ModelVariable) -> dict[str, Any]:
    variable = one.variable
    return {
        "path": variable.path,
        "shape": list(variable.shape),
        "dtype": keras.backend.standardize_dtype(variable.dtype),
        "holders": list(one.holders),
    }


def _remove_others(folder: Path, shards: Iterable[Shard]) -> None:
    current = {shard.file for shard in shards}
    for name in os.listdir(folder):
        if _SHARD.fullmatch(name) and name not in current:
            with contextlib.suppress(OSError):
                (folder / name).unlink()


# Reading ----------------------------------------------------------------------------------------------------


def _read(folder: Path, state: RankState, optimizer: Any, rank: int) -> dict[str, Any]:
    """Return the values of this rank's variables by name, after all checks."""
    if not (folder / INDEX).exists():
        raise HvpipeError(
            f"A checkpoint should have an index, {INDEX}. An interrupted save leaves none. "
            f"Received: folder={str(folder)!r} without one"
        )
    index = read_document(folder / INDEX)
    index.check_format(FORMAT, VERSION)
    shards = [
        Shard(table.file_name("file"), table.integer("bytes"), tuple(table.texts("names")))
        for table in index.tables("shards")
    ]
    return read_shards(folder, index, shards, state, optimizer, rank)


def read_shards(
    folder: Path, index: Table, shards: Sequence[Shard], state: RankState, optimizer: Any, rank: int
) -> dict[str, Any]:
    """Return the values of this rank's variables by name, after all checks.

    Args:
        folder: The folder of the shards.
        index: What `describe` returned when they were written.
        shards: The shards.
        state: This rank's state.
        optimizer: This rank's optimizer; None before `compile`.
        rank: This rank.
    """
    saved = index.tables("variables")
    _check_model(index, saved, state.variables)
    wanted = dict(state.weights)
    if optimizer is not None and index.text("optimizer"):
        _check_optimizer(index, optimizer)
        wanted |= state.optimizer
    shard_of = {name: shard for shard in shards for name in shard.names}
    sources = {name: _source(name, shard_of, saved, state, rank) for name in wanted}
    missing = [name for name, source in sources.items() if source not in shard_of]
    if missing:
        raise HvpipeError(
            "The optimizer should have the settings it was saved with, and the same layers should be "
            f"trainable. Received: {_with_path(missing[0], state)}, which {folder} does not have"
        )
    if optimizer is not None and index.text("optimizer"):
        _check_all_slots_are_wanted(shard_of, state, folder)
    _check_shards(folder, {shard_of[source] for source in sources.values()})
    values = _values(folder, shard_of, sources, wanted)
    for name, holder in state.seeds.items():
        if sources[name] == name:  # the first holder's seed: other holders derive their own from it
            values[name] = own_seed(values[name], holder)
    return values


def _source(
    name: str, shard_of: Mapping[str, Shard], saved: Sequence[Table], state: RankState, rank: int
) -> str:
    """Return the saved name to read a variable from: this rank's own copy if the same ranks share it."""
    number, own = number_in(name), f"{name}@{rank}"
    if number is None or own not in shard_of:
        return name
    same_holders = saved[number].numbers("holders") == list(state.variables[number].holders)
    return own if same_holders else name


def _values(
    folder: Path, shard_of: Mapping[str, Shard], sources: Mapping[str, str], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """Read each variable from its source, one shard after the other."""
    found = {}
    for file in sorted({shard_of[source].file for source in sources.values()}):
        of_file = {name: source for name, source in sources.items() if shard_of[source].file == file}
        values = read_arrays(folder / file, dict.fromkeys(of_file.values()))
        for name, source in of_file.items():
            try:
                found[name] = _as_variable(values[source], wanted[name])
            except ValueError as error:
                raise HvpipeError(f"{folder / file} should be unchanged. Received: {error}") from error
    return found


def _as_variable(array: Any, variable: Any) -> Any:
    dtype = np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
    value = array if dtype.kind in "biufc" else array.view(dtype)
    if value.shape != tuple(variable.shape):
        raise ValueError(f"{variable.path} of shape {value.shape}, wanted {tuple(variable.shape)}")
    return value


def _check_shards(folder: Path, shards: Iterable[Shard]) -> None:
    for shard in sorted(shards, key=lambda shard: shard.file):
        path = folder / shard.file
        size_bytes = path.stat().st_size if path.exists() else None
        if size_bytes != shard.size_bytes:
            raise HvpipeError(
                "Every rank should see all files of a checkpoint, in a folder that the hosts share. "
                f"Received: {path} "
                + ("is missing" if size_bytes is None else f"of {size_bytes} bytes, not {shard.size_bytes}")
            )


def _check_model(index: Table, saved: Sequence[Table], variables: Sequence[ModelVariable]) -> None:
    """Raise HvpipeError unless both have the same variables in the same order.

    The numbers that Keras appends to names do not count.
    """
    theirs = [
        (table.text("path"), tuple(map(int, table.numbers("shape"))), table.text("dtype")) for table in saved
    ]
    ours = [(d["path"], tuple(d["shape"]), d["dtype"]) for d in map(_described, variables)]
    for number in range(max(len(ours), len(theirs))):
        mine = ours[number] if number < len(ours) else None
        other = theirs[number] if number < len(theirs) else None
        if mine is None or other is None or (_bare(mine[0]), *mine[1:]) != (_bare(other[0]), *other[1:]):
            raise HvpipeError(
                f"The checkpoint should be of this model, whose variable {number} is {_variable(mine)}. "
                f"Received: a checkpoint of {index.text('model')!r}, whose variable {number} is "
                f"{_variable(other)}"
            )


def _bare(path: str) -> str:
    return re.sub(r"_\d+(?=/|$)", "", path)


def _variable(described: tuple[str, tuple[int, ...], str] | None) -> str:
    return "missing" if described is None else f"{described[0]} {described[2]}{list(described[1])}"


def _check_optimizer(index: Table, optimizer: Any) -> None:
    if index.text("optimizer") != type(optimizer).__name__:
        raise HvpipeError(
            f"The checkpoint's optimizer should be of this optimizer's class, {type(optimizer).__name__}. "
            f"Received: {index.text('optimizer')}"
        )


def _check_all_slots_are_wanted(shard_of: Mapping[str, Shard], state: RankState, folder: Path) -> None:
    """Raise HvpipeError if the saved optimizer has more slots for a weight that this rank trains."""
    trained = {
        number
        for name in state.weights
        if (number := number_in(name)) is not None and state.variables[number].variable.trainable
    }
    for name in shard_of:
        of_the_optimizer = name.startswith("optimizer/") and number_in(name) in trained
        if of_the_optimizer and name not in state.optimizer:
            raise HvpipeError(
                "The optimizer should have the settings it was saved with. "
                f"Received: one without {_with_path(name, state)}, which {folder} has"
            )


def _with_path(name: str, state: RankState) -> str:
    """Return a name with the path of its variable, for errors."""
    number = number_in(name)
    return name if number is None else f"{name} (for {state.variables[number].variable.path})"
