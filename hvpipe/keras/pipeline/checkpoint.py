"""Checkpoints of a pipeline: each rank writes its own part, and any other layout can go on from them."""

from __future__ import annotations

import contextlib
import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.config_file import Table, read_document, write_document
from hvpipe.errors import HvpipeError
from hvpipe.keras.pipeline.state_names import Holdings, Place, number_in, together
from hvpipe.keras.seeds import own_seed
from hvpipe.session import Session

# A folder holds an index and the shards that it names:
#
#   checkpoint.json      the model's variables, the optimizer, and which shard has what
#   000007-2.npz         what rank 2 wrote in the 7th save, by the names of pipeline_state
#
# Shards have new names in every save, and the index is replaced when all of them are complete: until then
# the folder is the checkpoint that it was. Only then shards that no index names are removed.
INDEX = "checkpoint.json"
FORMAT, VERSION = "hvpipe-checkpoint", 1
_SHARD = re.compile(r"\.?(\d{6,})-\d+\.npz(\.partial)?")


@dataclass(frozen=True)
class Shard:
    """A file of a checkpoint, its size, and the names of what it holds."""

    file: str
    size_bytes: int
    names: tuple[str, ...]


def save_checkpoint(
    session: Session, folder: str | os.PathLike[str], model_name: str, holdings: Holdings, optimizer: Any
) -> None:
    """Write all ranks' state into a folder that all of them see; collective.

    Raises HvpipeError, on all ranks, where that fails; the checkpoint before it is then still there.
    """
    path = Path(folder)
    rank = session.world.rank
    what = f"saving a checkpoint in {path}"
    serial = together(session, what, lambda: _next_serial(path) if rank == 0 else 0)
    serial = session.engine.broadcast_object(serial)
    shard = together(
        session, what, lambda: _write_shard(path, f"{serial:06d}-{rank}.npz", _to_write(holdings, rank))
    )
    shards = session.engine.allgather_object(shard)

    def finish() -> None:
        if rank == 0:
            _check_shards(path, shards)
            write_document(path / INDEX, _index(model_name, holdings, optimizer, shards))
            _remove_others(path, shards)

    together(session, what, finish)


def load_checkpoint(
    session: Session, folder: str | os.PathLike[str], holdings: Holdings, optimizer: Any
) -> bool:
    """Give this rank its part of a checkpoint's state; whether the optimizer's was in it. Collective.

    Raises HvpipeError, on all ranks and before anything is changed, where the folder has no whole
    checkpoint, or one of another model or optimizer.
    """
    path = Path(folder)
    values = together(
        session,
        f"loading the checkpoint in {path}",
        lambda: _read(path, holdings, optimizer, session.world.rank),
    )
    for name, value in values.items():
        holdings.named[name].assign(value)
    return any(name in holdings.optimizer for name in values)


# Writing ----------------------------------------------------------------------------------------------------


def _to_write(holdings: Holdings, rank: int) -> dict[str, Any]:
    """What this rank saves. Of statistics and seeds, in which holders may differ, each holder its own."""
    found = {name: holdings.named[name] for name in sorted(holdings.owned)}
    for name, variable in holdings.weights.items():
        if name not in found and name in holdings.apart:
            found[f"{name}@{rank}"] = variable
    return found


def _next_serial(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return max((int(match[1]) for match in map(_SHARD.fullmatch, os.listdir(folder)) if match), default=0) + 1


def _write_shard(folder: Path, name: str, variables: Mapping[str, Any]) -> Shard:
    """Write a .npz, one array at a time; it has its name when it is complete."""
    partial = folder / f".{name}.partial"
    try:
        with open(partial, "wb") as file:
            with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
                for key, variable in variables.items():
                    with archive.open(f"{key}.npy", "w", force_zip64=True) as entry:
                        np.lib.format.write_array(entry, _plain(variable.numpy()), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / name)
    finally:
        partial.unlink(missing_ok=True)
    return Shard(name, (folder / name).stat().st_size, tuple(variables))


def _plain(array: Any) -> Any:
    """bfloat16 and its like, of which NumPy knows nothing, as the integers of their bits."""
    found = np.asarray(array)
    return found if found.dtype.kind in "biufc" else found.view(f"u{found.dtype.itemsize}")


def _index(model_name: str, holdings: Holdings, optimizer: Any, shards: Sequence[Shard]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": model_name,
        "variables": [_described(place) for place in holdings.places],
        "optimizer": "" if optimizer is None else type(optimizer).__name__,
        "shards": [{"file": s.file, "bytes": s.size_bytes, "names": list(s.names)} for s in shards],
    }


def _described(place: Place) -> dict[str, Any]:
    variable = place.variable
    return {
        "path": variable.path,
        "shape": list(variable.shape),
        "dtype": keras.backend.standardize_dtype(variable.dtype),
        "holders": list(place.holders),
    }


def _remove_others(folder: Path, shards: Iterable[Shard]) -> None:
    current = {shard.file for shard in shards}
    for name in os.listdir(folder):
        if _SHARD.fullmatch(name) and name not in current:
            with contextlib.suppress(OSError):
                (folder / name).unlink()


# Reading ----------------------------------------------------------------------------------------------------


def _read(folder: Path, holdings: Holdings, optimizer: Any, rank: int) -> dict[str, Any]:
    """The values of this rank's variables, by name, all checked."""
    if not (folder / INDEX).exists():
        raise HvpipeError(
            f"A checkpoint should have an index, {INDEX}, which is written when all else is complete. "
            f"Received: folder={str(folder)!r} without one"
        )
    index = read_document(folder / INDEX)
    index.check_format(FORMAT, VERSION)
    saved = index.tables("variables")
    _check_model(index, saved, holdings.places)
    wanted = dict(holdings.weights)
    if optimizer is not None and index.text("optimizer"):
        _check_optimizer(index, optimizer)
        wanted |= holdings.optimizer
    shards = [
        Shard(table.text("file"), table.integer("bytes"), tuple(table.texts("names")))
        for table in index.tables("shards")
    ]
    home = {name: shard for shard in shards for name in shard.names}
    sources = {name: _source(name, home, saved, holdings, rank) for name in wanted}
    missing = [name for name, source in sources.items() if source not in home]
    if missing:
        raise HvpipeError(
            "The optimizer should have the settings it was saved with, and the same layers be trainable. "
            f"Received: {_spoken(missing[0], holdings)}, which {folder} does not have"
        )
    if optimizer is not None and index.text("optimizer"):
        _check_nothing_is_left(home, holdings, folder)
    _check_shards(folder, {home[source] for source in sources.values()})
    values = _values(folder, home, sources, wanted)
    for name, place in holdings.seeds.items():
        if sources[name] == name:  # the first holder's
            values[name] = own_seed(values[name], place)
    return values


def _source(
    name: str, home: Mapping[str, Shard], saved: Sequence[Table], holdings: Holdings, rank: int
) -> str:
    """What a variable is read from: where the same ranks share it, this rank's own copy."""
    number, own = number_in(name), f"{name}@{rank}"
    if number is None or own not in home:
        return name
    same_holders = saved[number].numbers("holders") == list(holdings.places[number].holders)
    return own if same_holders else name


def _values(
    folder: Path, home: Mapping[str, Shard], sources: Mapping[str, str], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    found = {}
    for file in sorted({home[source].file for source in sources.values()}):
        try:
            with np.load(folder / file, allow_pickle=False) as archive:
                for name, source in sources.items():
                    if home[source].file == file:
                        found[name] = _as_variable(archive[source], wanted[name])
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise HvpipeError(
                f"{folder / file} should be as it was written. Received: {type(error).__name__}: {error}"
            ) from error
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


def _check_model(index: Table, saved: Sequence[Table], places: Sequence[Place]) -> None:
    """The same variables in the same order; the numbers that Keras appends to names do not count."""
    theirs = [
        (table.text("path"), tuple(map(int, table.numbers("shape"))), table.text("dtype")) for table in saved
    ]
    ours = [(d["path"], tuple(d["shape"]), d["dtype"]) for d in map(_described, places)]
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
            f"The checkpoint's optimizer should be of the class of this one, {type(optimizer).__name__}. "
            f"Received: {index.text('optimizer')}"
        )


def _check_nothing_is_left(home: Mapping[str, Shard], holdings: Holdings, folder: Path) -> None:
    """Raise where the optimizer that was saved kept more of a weight that this rank trains."""
    trained = {
        number
        for name in holdings.weights
        if (number := number_in(name)) is not None and holdings.places[number].variable.trainable
    }
    for name in home:
        of_the_optimizer = name.startswith("optimizer/") and number_in(name) in trained
        if of_the_optimizer and name not in holdings.optimizer:
            raise HvpipeError(
                "The optimizer should have the settings it was saved with. "
                f"Received: one without {_spoken(name, holdings)}, which {folder} has"
            )


def _spoken(name: str, holdings: Holdings) -> str:
    number = number_in(name)
    return name if number is None else f"{name} (for {holdings.places[number].variable.path})"
