"""Checks that all ranks train the same model: versions, settings of layers, loss and optimizer."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvpipe.errors import MismatchError
from hvpipe.keras.compat import Functional, layers_in, nodes_by_depth
from hvpipe.session import Session

logger = logging.getLogger("hvpipe")

# Ranks draw and build for themselves: values come from rank 0, and batches may differ in size and length.
_MAY_DIFFER = re.compile(
    "(.*_)?(seed|initializer)|batch_size|(batch_|batch_input_|build_input_)?shape|(build|compile)_config"
    "|shared_object_id"
)
_WHAT = "comparing the models of all ranks"
_NUMBERED = re.compile(r"_\d+$")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


class Item(NamedTuple):
    """What is compared, and this rank's value of it.

    Attributes:
        place: Whose setting it is.
        value: Its value, as errors say it.
        own: Whether it is an argument of a class of the user's own, whose meaning hvpipe does not know.
    """

    place: str
    value: str
    own: bool = False


def check_same_model(session: Session, model: Any) -> None:
    """Raise MismatchError, on every rank, unless all ranks train the same model; collective."""
    items = [
        *layer_items(layers_in(model)),
        *settings_items("optimizer", model.optimizer),
        *loss_items(model),
    ]
    check_same(session, "All ranks should train the same model", items)


def check_same(session: Session, wanted: str, items: Iterable[Item]) -> None:
    """Raise MismatchError, on every rank, unless all ranks have the same versions and items; collective.

    Of an argument of the user's own class that differs rank 0 warns.
    """
    mine = [Item("Keras", keras.__version__), Item("TensorFlow", tf.__version__), *items]
    digests = session.engine.allgather_object(hashlib.sha256(repr(mine).encode()).hexdigest(), _WHAT)
    if len(set(digests)) == 1:
        return
    everyone = [[Item(*one) for one in of_rank] for of_rank in session.engine.allgather_object(mine, _WHAT)]
    for own in (False, True):
        first, *others = ([one for one in items if one.own == own] for items in everyone)
        for rank, theirs in enumerate(others, 1):
            if differs := _difference(first, theirs):
                here, there = differs
                said = f"{there.place} {there.value}" if there.place != here.place else there.value
                found = f"{here.place} {here.value} on rank 0 and {said} on rank {rank}"
                if not own:
                    raise MismatchError(f"{wanted}. Received: {found}")
                if session.world.rank == 0:
                    logger.warning(
                        "hvpipe: %s. If it decides what is computed, give all ranks the same value.", found
                    )
                return


def _difference(ours: Sequence[Item], theirs: Sequence[Item]) -> tuple[Item, Item] | None:
    """Return the first items that differ; None if none do."""
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            return one, other
    if len(ours) == len(theirs):
        return None
    what = "the number of settings"
    return Item(what, str(len(ours))), Item(what, str(len(theirs)))


def layer_items(layers: Sequence[Any]) -> Iterator[Item]:
    """Yield classes and settings of layers, and the calls in functional models. Names do not count."""
    with _without_constants():
        for place, layer in enumerate(layers):
            kind = type(layer).__name__
            said = f"layer {place} ({kind})"
            yield Item(f"the class of layer {place}:", kind)
            if isinstance(layer, Functional):
                yield from _calls(said, layer)
            if not (isinstance(layer, keras.Model) and _is_of_keras(layer)):  # its layers have their own
                yield from _config_items(said, layer)


def _calls(place: str, functional: Any) -> Iterator[Item]:
    """Yield which operation reads the tensors of which others."""
    made: dict[int, int] = {}
    nodes = nodes_by_depth(functional)
    for number, node in enumerate(node for depth in sorted(nodes, reverse=True) for node in nodes[depth]):
        reads = ", ".join(f"call {made[id(tensor)]}" for tensor in node.arguments.keras_tensors)
        made |= {id(tensor): number for tensor in node.outputs}
        yield Item(f"call {number} in {place}:", f"{type(node.operation).__name__} of {reads or 'nothing'}")


def loss_items(model: Any) -> Iterator[Item]:
    """Yield what a model was compiled with to compute its loss."""
    for name in ("loss", "loss_weights"):
        value = getattr(model, name, None)
        if isinstance(value, keras.losses.Loss):
            yield from settings_items(name, value)
        else:
            yield from _flat(name, _plain(value))


@contextlib.contextmanager
def _without_constants() -> Iterator[None]:
    """Let no initializer turn a large array into a list: initializers are not compared."""
    constant = keras.initializers.Constant
    get_config = constant.get_config
    constant.get_config = lambda self: {}
    try:
        yield
    finally:
        constant.get_config = get_config


def settings_items(place: str, thing: Any) -> Iterator[Item]:
    """Yield the class of a loss or optimizer, and its config if it has one."""
    yield Item(f"{place} class:", type(thing).__name__)
    yield from _config_items(place, thing)


def _config_items(place: str, thing: Any) -> Iterator[Item]:
    yield from _flat(place, _plain(_without_rates(_config_of(thing))), not _is_of_keras(thing))


def _is_of_keras(thing: Any) -> bool:
    return type(thing).__module__.partition(".")[0] == "keras"


def _config_of(thing: Any) -> dict[str, Any]:
    """Return the settings of a layer, loss or optimizer, but for its name; {} if it does not tell them."""
    # Not the method of the instance: data_parallel's finishes an update first.
    read = getattr(type(thing), "get_config", None)
    try:
        config = read(thing) if read is not None else {}
    except Exception:  # whatever the user's own code raises: then it cannot be compared
        return {}
    return {key: one for key, one in config.items() if key != "name"} if isinstance(config, dict) else {}


def _without_rates(settings: Any) -> Any:
    """Leave out learning rates that are numbers: all ranks take rank 0's."""
    if not isinstance(settings, Mapping):
        return settings
    return {
        name: _without_rates(value)
        for name, value in settings.items()
        if not (name == "learning_rate" and isinstance(value, (int, float)))
    }


def _plain(value: Any) -> Any:
    """Return what can be compared: values without addresses of objects, names and layers inside."""
    if isinstance(value, Mapping):
        return _plain_dict(value)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, str):
        return "a path" if os.sep in value else _ADDRESS.sub("", value)
    if isinstance(value, (bool, int, float, type(None))):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return hashlib.sha256(value.tobytes()).hexdigest()[:8]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, keras.losses.Loss):
        return {"class": type(value).__name__, **_plain(_config_of(value))}
    return getattr(value, "__name__", type(value).__name__)


def _plain_dict(value: Mapping[Any, Any]) -> Any:
    if value.get("class_name") == "__lambda__":  # its code names files
        return "a lambda"
    config = value.get("config")
    if isinstance(config, Mapping) and "trainable" in config:
        return "a layer"  # with items of its own
    if isinstance(config, Mapping) and "DTypePolicy" not in str(value.get("class_name")):
        value = {**value, "config": {key: one for key, one in config.items() if key != "name"}}
    found: list[tuple[str, Any]] = []
    for key, one in value.items():
        if not _MAY_DIFFER.fullmatch(str(key)):
            found.append((_NUMBERED.sub("", str(key)), _plain(one)))
    found.sort(key=repr)  # dicts that are made from sets have another order on each rank
    again = ("" if not n or found[n - 1][0] != key else f" ({n})" for n, (key, _) in enumerate(found))
    return {key + number: one for (key, one), number in zip(found, again, strict=True)}


def _flat(place: str, value: Any, own: bool = False) -> Iterator[Item]:
    """Yield the values in nested dicts and lists, with their places."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat(f"{place} {key}", one, own)
    elif isinstance(value, list) and any(isinstance(one, (Mapping, list)) for one in value):
        for number, one in enumerate(value):
            yield from _flat(f"{place}[{number}]", one, own)
    else:
        yield Item(f"{place}:", repr(value), own)
