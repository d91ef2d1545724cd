"""Checks that all ranks train the same model: versions, settings of layers, loss and optimizer."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvpipe.errors import MismatchError
from hvpipe.keras.compat import layers_in
from hvpipe.session import Session

Item = tuple[str, str]
"""What is compared, and this rank's value of it."""

# Ranks draw and build for themselves: seeds and values come from rank 0, and batches may differ in size.
_MAY_DIFFER = frozenset(("seed", "build_config", "compile_config", "shared_object_id"))
_SHAPES = frozenset(("batch_shape", "batch_input_shape", "shape"))
_LINKS = frozenset(("keras_history", "input_layers", "output_layers"))
_WHAT = "comparing the models of all ranks"
_NUMBERED = re.compile(r"_\d+$")


def check_same_model(session: Session, model: Any) -> None:
    """Raise MismatchError, on every rank, unless all ranks train the same model; collective."""
    optimizer = _flat("optimizer", _plain(without_rates(settings_of(model.optimizer)), {}))
    items = [*layer_items(layers_in(model)), *optimizer, *loss_items(model)]
    check_same(session, "All ranks should train the same model", items)


def check_same(session: Session, wanted: str, items: Iterable[Item]) -> None:
    """Raise MismatchError, on every rank, unless all ranks have the same versions and items; collective."""
    mine = [("Keras", keras.__version__), ("TensorFlow", tf.__version__), *items]
    digests = session.engine.allgather_object(hashlib.sha256(repr(mine).encode()).hexdigest(), _WHAT)
    if len(set(digests)) == 1:
        return
    everyone = session.engine.allgather_object(mine, _WHAT)
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    pairs = zip(everyone[0], everyone[rank], strict=False)
    nothing = (("the number of settings", str(len(found))) for found in (everyone[0], everyone[rank]))
    here, there = next(((one, two) for one, two in pairs if one != two), tuple(nothing))
    said = f"{there[0]} {there[1]}" if there[0] != here[0] else there[1]
    raise MismatchError(f"{wanted}. Received: {here[0]} {here[1]} on rank 0 and {said} on rank {rank}")


def layer_items(layers: Sequence[Any]) -> Iterator[Item]:
    """Yield the settings of layers, if their `get_config` has them. Names that Keras numbers do not count."""
    names = {name: f"#{place}" for place, one in enumerate(layers) if (name := getattr(one, "name", None))}
    for place, layer in enumerate(layers):
        kind = type(layer).__name__
        yield f"the class of layer {place}:", kind
        yield from _flat(f"layer {place} ({kind})", _plain(settings_of(layer), names))


def loss_items(model: Any) -> Iterator[Item]:
    """Yield what a model was compiled with to compute its loss."""
    for name in ("loss", "loss_weights"):
        yield from _flat(name, _plain(getattr(model, name, None), {}))


def settings_of(thing: Any) -> Mapping[str, Any]:
    """Return the class of a layer or optimizer, and its config if it has one."""
    found = {"class": type(thing).__name__}
    # Not the method of the instance: data_parallel's finishes an update first.
    read = getattr(type(thing), "get_config", None)
    try:
        config = read(thing) if read is not None else {}
    except Exception:  # whatever the user's own code raises: then it cannot be compared
        return found
    return {**config, **found} if isinstance(config, dict) else found


def without_rates(settings: Any) -> Any:
    """Leave out learning rates that are numbers: all ranks take rank 0's."""
    if not isinstance(settings, Mapping):
        return settings
    return {
        name: without_rates(value)
        for name, value in settings.items()
        if not (name == "learning_rate" and isinstance(value, (int, float)))
    }


def _plain(value: Any, names: Mapping[str, str]) -> Any:
    """Return what can be compared: values without addresses of objects, and layers by their place."""
    if isinstance(value, Mapping):
        return _plain_dict(value, names)
    if isinstance(value, (list, tuple)):
        return [_plain(one, names) for one in value]
    if isinstance(value, str):
        return "a path" if os.sep in value else _NUMBERED.sub("", value) if value in names else value
    if isinstance(value, (bool, int, float, type(None))):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return hashlib.sha256(value.tobytes()).hexdigest()[:8]
    if isinstance(value, np.generic):
        return _plain(value.item(), names)
    if isinstance(value, keras.losses.Loss):
        return _plain(settings_of(value), names)
    return getattr(value, "__name__", type(value).__name__)


def _plain_dict(value: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    if value.get("class_name") == "__lambda__":  # its code names files
        return "a lambda"
    if isinstance(value.get("layers"), list):  # of a model; those that are only operations are numbered, too
        named = [one.get("config") for one in value["layers"] if isinstance(one, Mapping)]
        found_here = [str(one.get("name")) for one in named if isinstance(one, Mapping)]
        names = {**{name: f"operation {place}" for place, name in enumerate(found_here)}, **names}
    config = value.get("config")
    own = names.get(str(config.get("name")), "") if isinstance(config, Mapping) else ""
    if own.startswith("#"):  # a layer, which has items of its own
        value = {"class_name": value.get("class_name"), "inbound_nodes": value.get("inbound_nodes")}
    found: dict[str, Any] = {}
    for key, one in value.items():
        if key in _MAY_DIFFER:
            continue
        if key in _SHAPES and isinstance(one, (list, tuple)):
            one = one[1:]
        if key in _LINKS:
            found[str(key)] = _places(one, names)
        elif key == "name" and isinstance(one, str):
            found[key] = _NUMBERED.sub("", one)
        else:
            found[str(key)] = _plain(one, names)
    return found


def _places(links: Any, names: Mapping[str, str]) -> Any:
    """Return links between the layers of a model, with places instead of names."""
    if isinstance(links, Mapping):
        return {key: _places(one, names) for key, one in links.items()}
    if isinstance(links, (list, tuple)):
        return [_places(one, names) for one in links]
    return names.get(links, links) if isinstance(links, str) else links


def _flat(place: str, value: Any) -> Iterator[Item]:
    """Yield the values in nested dicts and lists, with their places."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flat(f"{place} {key}".strip(), one)
    elif isinstance(value, list) and any(isinstance(one, (Mapping, list)) for one in value):
        for number, one in enumerate(value):
            yield from _flat(f"{place}[{number}]", one)
    else:
        yield f"{place}:", repr(value)
