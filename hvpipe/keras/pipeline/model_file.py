"""The whole model of a pipeline in one file of plain Keras: written by rank 0, read by all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.saving.serialization_lib import SerializableDict

from hvpipe.errors import HvpipeError
from hvpipe.keras.pipeline.state_names import Holdings, another, numbers_of, optimizer_names, together
from hvpipe.keras.pipeline.tensor_channel import Mail
from hvpipe.session import Session

_ABSENT = object()


def write_whole(
    session: Session, owner: Any, model: Any, holdings: Holdings, write: Callable[[Any], None]
) -> None:
    """Let rank 0 `write` the undivided model, compiled as its pipeline `owner` is; collective.

    Rank 0 holds all weights and slots while it writes, in host memory. Raises HvpipeError, on all ranks,
    where writing fails.
    """
    values = _gather(session, holdings)

    def on_rank_0() -> None:
        if session.world.rank == 0:
            with _weights_of_all(model, holdings, values):
                stand_in = _SlotsOfAll.of(optimizer_of(owner), model, holdings)
                if stand_in is not None:
                    stand_in.give(values)
                with _compiled(model, owner, stand_in):
                    write(model)

    together(session, f"saving {model.name}", on_rank_0)


def read_whole(
    session: Session, owner: Any, model: Any, holdings: Holdings, path: Any, skip_mismatch: bool
) -> bool:
    """Take this rank's part out of a plain Keras file that every rank can see; collective.

    The optimizer's state comes too, and True is returned, where the file has one of as many variables (and,
    in a .keras file, of the same class). Raises HvpipeError, on all ranks and before anything is changed,
    where reading fails.
    """

    def read() -> dict[str, Any]:
        stand_in = None
        if _optimizer_in(path) in (None, *_classes_of(optimizer_of(owner))):
            stand_in = _SlotsOfAll.of(optimizer_of(owner), model, holdings)
        found: dict[str, Any] = {}
        if stand_in is not None:
            stand_in.take_into(found, holdings.optimizer)
        with _compiled(model, owner, stand_in), _weights_into(found, model, holdings.weights):
            model.load_weights(path, skip_mismatch=skip_mismatch)
        return found

    values = together(session, f"loading {os.fspath(path)}", read)
    for name, value in values.items():
        holdings.named[name].assign(value)
    return any(name in holdings.optimizer for name in values)


def optimizer_of(pipeline: Any) -> Any:
    """The optimizer of a pipeline, None where it is not compiled."""
    return pipeline.optimizer if pipeline.compiled else None


def _gather(session: Session, holdings: Holdings) -> dict[str, Any]:
    """Every name's value on rank 0, from the rank that owns it; nothing on the others."""
    mine = {name: holdings.named[name] for name in sorted(holdings.owned)}
    catalog = session.engine.allgather_object(
        {name: (tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for name, v in mine.items()}
    )
    mail = Mail(session)
    if session.world.rank != 0:
        for name, variable in mine.items():
            mail.send(0, variable.numpy(), variable.dtype, variable.shape, name)
        mail.finish()
        return {}
    found: dict[str, Any] = dict(mine)
    with tf.device("CPU"):
        for source, described in enumerate(catalog[1:], start=1):
            for name, (shape, dtype) in described.items():
                found[name] = mail.expect(source, dtype, shape, name).take()
    return found


@contextlib.contextmanager
def _weights_of_all(model: Any, holdings: Holdings, values: Mapping[str, Any]) -> Iterator[None]:
    """The variables of other ranks have memory and their values; afterwards those that had none have none."""
    given = []
    try:
        with tf.device("CPU"):
            for number, place in enumerate(holdings.places):
                name = f"weights/{number}"
                if name in holdings.weights:
                    continue
                if place.variable._value is None:
                    place.variable._initialize(values[name])
                    given.append(place.variable)
                else:
                    place.variable.assign(values[name])
        yield
    finally:
        for variable in given:
            variable._value = None


@contextlib.contextmanager
def _compiled(model: Any, owner: Any, stand_in: _SlotsOfAll | None) -> Iterator[None]:
    """To Keras's saving the model looks compiled as its pipeline is, with the stand-in as its optimizer."""
    config = None
    if owner.compiled:
        # XLA is off in the pipeline alone.
        config = SerializableDict(**{**owner._compile_config.config, "jit_compile": "auto"})
    look = {
        "optimizer": None if stand_in is None else stand_in.optimizer,
        "compiled": owner.compiled,
        "_compile_config": config,
    }
    # Around Keras's own way to set attributes, which would note them as parts of the model for good.
    attributes = vars(model)
    before = {name: attributes.get(name, _ABSENT) for name in look}
    attributes.update(look)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                del attributes[name]
            else:
                attributes[name] = value


class _SlotsOfAll:
    """Stands in for the undivided model's optimizer: what it reads and writes is the pipeline's.

    It is built on variables of one element each, and knows so the order in which Keras saves the state.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self._names = names  # of its variables, by id

    @staticmethod
    def of(optimizer: Any, model: Any, holdings: Holdings) -> _SlotsOfAll | None:
        if optimizer is None:
            return None
        numbers = numbers_of(holdings.places)
        small = {id(v): _miniature(v) for v in model.trainable_variables}
        built = another(optimizer)
        built.build(list(small.values()))
        names = optimizer_names(built, {id(v): numbers[key] for key, v in small.items()})
        return _SlotsOfAll(built, {id(variable): name for name, variable in names.items()})

    def give(self, values: Mapping[str, Any]) -> None:
        """Let it be saved with these values, by name."""

        def save_own_variables(optimizer: Any, store: Any) -> None:
            for i, variable in enumerate(optimizer.variables):
                store[str(i)] = np.asarray(values[self._names[id(variable)]])

        self._replace("save_own_variables", save_own_variables)

    def take_into(self, found: dict[str, Any], wanted: Mapping[str, Any]) -> None:
        """Let what it is given by a file go into `found`, where it fits the `wanted` variables by name."""

        def load_own_variables(optimizer: Any, store: Any) -> None:
            if len(store.keys()) != len(optimizer.variables):
                return
            for i, variable in enumerate(optimizer.variables):
                name = self._names[id(variable)]
                if name not in wanted:
                    continue
                value = np.asarray(store[str(i)])
                if tuple(value.shape) != tuple(wanted[name].shape):
                    raise HvpipeError(
                        "The file's optimizer should be of the same class as the pipeline's. "
                        f"Received: {name} of shape {value.shape}, wanted {tuple(wanted[name].shape)}"
                    )
                found[name] = value

        self._replace("load_own_variables", load_own_variables)

    def _replace(self, method: str, function: Callable[[Any, Any], None]) -> None:
        optimizer = self.optimizer
        while optimizer is not None:
            vars(optimizer)[method] = lambda store, optimizer=optimizer: function(optimizer, store)
            optimizer = getattr(optimizer, "inner_optimizer", None)


@contextlib.contextmanager
def _weights_into(found: dict[str, Any], model: Any, wanted: Mapping[str, Any]) -> Iterator[None]:
    """What the model's layers load goes into `found`, as far as it is `wanted`, and not into the layers."""
    names = {id(variable): name for name, variable in wanted.items()}

    def load_by(layer: Any) -> Callable[[Any], None]:
        own = layer.load_own_variables

        def load_own_variables(store: Any) -> None:
            # Not of layers of other ranks: one that computes with what it loads would find no memory here.
            if not any(id(variable) in names for variable in layer.variables):
                return
            with _Kept(set(names)) as kept:
                own(store)
            found.update({names[key]: value for key, value in kept.state_mapping.items()})

        return load_own_variables

    layers = list({id(layer): layer for layer in model._flatten_layers()}.values())
    for layer in layers:
        vars(layer)["load_own_variables"] = load_by(layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["load_own_variables"]


class _Kept(keras.StatelessScope):
    """Holds what is assigned to some variables, and lets what is assigned to others go."""

    def __init__(self, wanted: set[int]) -> None:
        super().__init__(initialize_variables=False)
        self._wanted = wanted

    def add_update(self, update: Any) -> None:
        if id(update[0]) in self._wanted:
            super().add_update(update)


def _miniature(variable: Any) -> Any:
    """A variable of one element with what an optimizer looks at: path, rank, dtype."""
    small = keras.Variable(
        initializer="zeros", shape=(1,) * len(variable.shape), dtype=variable.dtype, name=variable.name
    )
    small._path = variable.path
    small.overwrite_with_gradient = getattr(variable, "overwrite_with_gradient", False)
    return small


def _classes_of(optimizer: Any) -> list[str]:
    """Of the optimizer and of the one inside: with mixed_float16 a file names the latter alone."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [type(optimizer).__name__, *([] if inner is None else _classes_of(inner))]


def _optimizer_in(path: Any) -> str | None:
    """The class of the optimizer in a .keras file; None for other files, "" where it has none."""
    if not os.fspath(path).endswith(".keras"):
        return None
    if os.path.isdir(path):
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    else:
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json"))
    optimizer = (config.get("compile_config") or {}).get("optimizer")
    return optimizer["class_name"] if isinstance(optimizer, dict) else ""
