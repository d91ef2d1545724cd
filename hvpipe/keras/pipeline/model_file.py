"""Saves a pipeline's whole model in one plain Keras file: rank 0 writes it, all ranks read it."""

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

from hvpipe.config_file import MOST_BYTES
from hvpipe.errors import HvpipeError
from hvpipe.keras import compat
from hvpipe.keras.pipeline.on_all_ranks import on_all_ranks
from hvpipe.keras.pipeline.state_names import RankState, numbers_of, optimizer_names, unbuilt_copy
from hvpipe.keras.pipeline.tensor_channel import TensorChannel
from hvpipe.own_folder import open_plain
from hvpipe.session import Session

_ABSENT = object()
_WEIGHTS_IN_A_FILE = 8  # times all weights: optimizers have up to some four values for each


def write_whole(
    session: Session, pipeline: Any, model: Any, state: RankState, write: Callable[[Any], None]
) -> None:
    """Let rank 0 write the undivided model, compiled like its pipeline; collective.

    Meanwhile rank 0 holds all weights and slots in host memory.

    Args:
        session: The session.
        pipeline: The PipelineParallel.
        model: The undivided model.
        state: This rank's state.
        write: Writes the model it is given.

    Raises:
        HvpipeError: Writing failed. Raised on all ranks.
    """
    values = _gather(session, state)

    def on_rank_0() -> None:
        if session.world.rank == 0:
            with _all_weights(model, state, values):
                stand_in = _OptimizerStandIn.of(optimizer_of(pipeline), model, state)
                if stand_in is not None:
                    stand_in.save_as(values)
                with _compiled(model, pipeline, stand_in):
                    write(model)

    on_all_ranks(session, f"saving {model.name}", on_rank_0)


def read_whole(
    session: Session, pipeline: Any, model: Any, state: RankState, path: Any, skip_mismatch: bool
) -> bool:
    """Read this rank's part of a plain Keras file that every rank sees; collective.

    The optimizer's state is read if the file has an optimizer with the same number of variables and, in a
    .keras file, of the same class.

    Args:
        session: The session.
        pipeline: The PipelineParallel.
        model: The undivided model.
        state: This rank's state, whose variables get the values.
        path: The path of the file.
        skip_mismatch: As for keras.Model.load_weights.

    Returns:
        Whether the optimizer's state was read.

    Raises:
        HvpipeError: Reading failed, or it is a file of another format. Raised on all ranks, before anything
            has changed.
    """
    if not str(path).endswith((".keras", ".weights.h5", ".weights.json")):
        raise HvpipeError(
            "A pipeline should load a file that ends with .keras, .weights.h5 or .weights.json. "
            f"Received: {os.fspath(path)!r}"
        )

    odd: dict[int, str] = {}

    def read() -> dict[str, Any]:
        stand_in = None
        _check_size(path, state)
        if _optimizer_in(path) in (None, *_classes_of(optimizer_of(pipeline))):
            stand_in = _OptimizerStandIn.of(optimizer_of(pipeline), model, state)
        found: dict[str, Any] = {}
        if stand_in is not None:
            stand_in.load_into(found, state.optimizer)
        with _compiled(model, pipeline, stand_in), _weights_into(found, model, state.weights, odd):
            try:
                model.load_weights(path, skip_mismatch=skip_mismatch)
            except Exception:  # Keras's, on what all layers lack
                if not odd:
                    raise
            else:
                odd.clear()  # skipped, or found at another place in the file
        return found

    values = on_all_ranks(session, f"loading {os.fspath(path)}", read)
    _check_same_model(session, model, path, odd)
    for name, value in values.items():
        state.named[name].assign(value)
    return any(name in state.optimizer for name in values)


def _check_same_model(session: Session, model: Any, path: Any, odd: Mapping[int, str]) -> None:
    """Raise HvpipeError if any rank has found a layer that the file has otherwise; collective.

    Args:
        session: The session.
        model: The undivided model.
        path: The path of the file.
        odd: What differs, by the layer's number in the model.
    """
    everyone = session.engine.allgather_object(min(odd.items(), default=None), "reading a model's file")
    if found := [one for one in everyone if one is not None]:
        _, what = min(found)
        raise HvpipeError(
            f"{os.fspath(path)} should be a file of this model, {model.name}. "
            f"Received: a file of another model: {what}"
        )


def optimizer_of(pipeline: Any) -> Any:
    """Return a pipeline's optimizer; None before `compile`."""
    return pipeline.optimizer if pipeline.compiled else None


def _gather(session: Session, state: RankState) -> dict[str, Any]:
    """Return all values by name on rank 0, each from the rank that owns it; nothing on other ranks."""
    mine = {name: state.named[name] for name in sorted(state.owned)}
    catalog = session.engine.allgather_object(
        {name: (tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for name, v in mine.items()},
        "saving the model",
    )
    channel = TensorChannel(session)
    if session.world.rank != 0:
        for name, variable in mine.items():
            channel.send(0, variable.numpy(), variable.dtype, variable.shape, name)
        channel.finish()
        return {}
    found: dict[str, Any] = dict(mine)
    with tf.device("CPU"):
        for source, described in enumerate(catalog[1:], start=1):
            for name, (shape, dtype) in described.items():
                found[name] = channel.receive(source, dtype, shape, name).wait()
    return found


@contextlib.contextmanager
def _all_weights(model: Any, state: RankState, values: Mapping[str, Any]) -> Iterator[None]:
    """Give other ranks' variables their values, and take the memory back from those that had none."""
    given = []
    try:
        with tf.device("CPU"):
            for number, one in enumerate(state.variables):
                name = f"weights/{number}"
                if name in state.weights:
                    continue
                if compat.has_memory(one.variable):
                    one.variable.assign(values[name])
                else:
                    compat.initialize_with(one.variable, values[name])
                    given.append(one.variable)
        yield
    finally:
        for variable in given:
            compat.drop_memory(variable)


@contextlib.contextmanager
def _compiled(model: Any, pipeline: Any, stand_in: _OptimizerStandIn | None) -> Iterator[None]:
    """Let the model look compiled like its pipeline, with the stand-in as its optimizer."""
    config = None
    if pipeline.compiled:
        # Only the pipeline cannot use XLA.
        config = compat.SerializableDict(**{**compat.compile_config(pipeline), "jit_compile": "auto"})
    look = {
        "optimizer": None if stand_in is None else stand_in.optimizer,
        "compiled": pipeline.compiled,
        compat.COMPILE_CONFIG: config,
    }
    # Bypass Keras's attribute tracking, which would make them parts of the model for good.
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


class _OptimizerStandIn:
    """Stands in for the undivided model's optimizer while Keras saves or loads: redirects its state.

    It is built for one-element variables. So its state has the order in which Keras saves it, and takes no
    memory.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, str]) -> None:
        """`names` holds the names of the optimizer's variables, by id."""
        self.optimizer = optimizer
        self._names = names

    @staticmethod
    def of(optimizer: Any, model: Any, state: RankState) -> _OptimizerStandIn | None:
        """Return a stand-in for the whole model, like one rank's optimizer; None without one."""
        if optimizer is None:
            return None
        numbers = numbers_of(state.variables)
        small = {id(v): _one_element_copy(v) for v in model.trainable_variables}
        built = unbuilt_copy(optimizer)
        built.build(list(small.values()))
        names = optimizer_names(built, {id(v): numbers[key] for key, v in small.items()})
        return _OptimizerStandIn(built, {id(variable): name for name, variable in names.items()})

    def save_as(self, values: Mapping[str, Any]) -> None:
        """Let Keras save these values, by name."""

        def save_own_variables(optimizer: Any, store: Any) -> None:
            for i, variable in enumerate(optimizer.variables):
                store[str(i)] = np.asarray(values[self._names[id(variable)]])

        self._replace("save_own_variables", save_own_variables)

    def load_into(self, found: dict[str, Any], wanted: Mapping[str, Any]) -> None:
        """Let Keras load the values of the `wanted` variables into `found`, by name."""

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
        """Replace a method of the optimizer and of the optimizers inside it."""
        optimizer = self.optimizer
        while optimizer is not None:
            vars(optimizer)[method] = lambda store, optimizer=optimizer: function(optimizer, store)
            optimizer = getattr(optimizer, "inner_optimizer", None)


@contextlib.contextmanager
def _weights_into(
    found: dict[str, Any], model: Any, wanted: Mapping[str, Any], odd: dict[int, str]
) -> Iterator[None]:
    """Let the model's layers load the `wanted` variables into `found`, and leave the layers unchanged.

    What a layer cannot load is added to `odd`, by the layer's number.
    """
    names = {id(variable): name for name, variable in wanted.items()}

    def load_by(number: int, layer: Any) -> Callable[[Any], None]:
        own = layer.load_own_variables

        def load_own_variables(store: Any) -> None:
            # Skip other ranks' layers. A layer that computes with loaded values would find no memory here.
            if not any(id(variable) in names for variable in layer.variables):
                return
            try:
                with _AssignmentCapture(set(names)) as captured:
                    own(store)
            except Exception as error:
                odd.setdefault(number, _difference(layer, store, error))
                raise
            odd.pop(number, None)
            found.update({names[key]: value for key, value in captured.state_mapping.items()})

        return load_own_variables

    layers = list({id(layer): layer for layer in compat.layers_in(model)}.values())
    for number, layer in enumerate(layers):
        vars(layer)["load_own_variables"] = load_by(number, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["load_own_variables"]


def _difference(layer: Any, store: Any, error: Exception) -> str:
    """Say what a layer has otherwise than its part of a file."""
    ours = [*compat.own_trainable_variables(layer), *compat.own_statistics(layer)]  # as Keras numbers them
    saved = {key: list(getattr(store[key], "shape", ())) for key in store.keys()}  # noqa: SIM118  # no dict
    by_number = all(key.isdigit() for key in saved)
    for number, variable in enumerate(ours if by_number else ()):
        there, shape = saved.get(str(number)), list(variable.shape)
        if there != shape:
            has = "does not have it" if there is None else f"has it as {there}"
            return f"variable {variable.path} should have the shape {shape}, and the file {has}"
    if by_number and len(saved) > len(ours):
        return f"layer {layer.name!r} should have {len(ours)} variables, and the file has {len(saved)}"
    return f"layer {layer.name!r} cannot read its variables: {str(error).partition(chr(10))[0]}"


class _AssignmentCapture(keras.StatelessScope):
    """Keeps the values assigned to the wanted variables (by id), and drops all others."""

    def __init__(self, wanted: set[int]) -> None:
        super().__init__(initialize_variables=False)
        self._wanted = wanted

    def add_update(self, update: Any) -> None:
        if id(update[0]) in self._wanted:
            super().add_update(update)


def _one_element_copy(variable: Any) -> Any:
    """Return a one-element variable with the properties that an optimizer reads: path, rank, dtype."""
    small = keras.Variable(
        initializer="zeros", shape=(1,) * len(variable.shape), dtype=variable.dtype, name=variable.name
    )
    compat.set_path(small, variable.path)
    small.overwrite_with_gradient = getattr(variable, "overwrite_with_gradient", False)
    return small


def _classes_of(optimizer: Any) -> list[str]:
    """Return the classes of an optimizer and of the one inside it.

    With mixed_float16, a file names only the inner one.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    return [type(optimizer).__name__, *([] if inner is None else _classes_of(inner))]


def _check_size(path: Any, state: RankState) -> None:
    """Raise HvpipeError if a .keras file unpacks to far more than the model and an optimizer take."""
    if not os.fspath(path).endswith(".keras") or os.path.isdir(path):
        return
    shapes = [(one.variable.shape, one.variable.dtype) for one in state.variables]
    weights_bytes = sum(int(np.prod(shape)) * tf.as_dtype(dtype).size for shape, dtype in shapes)
    most_bytes = _WEIGHTS_IN_A_FILE * weights_bytes + MOST_BYTES
    try:
        with open_plain(path) as file, zipfile.ZipFile(file) as archive:
            received_bytes = sum(entry.file_size for entry in archive.infolist())
    except (OSError, zipfile.BadZipFile) as error:
        raise HvpipeError(f"{os.fspath(path)} should be a .keras file. Received: {error}") from error
    if received_bytes > most_bytes:
        raise HvpipeError(
            f"{os.fspath(path)} should be a file of this model, and unpack to {most_bytes:,} bytes at most. "
            f"Received: {received_bytes:,} bytes"
        )


def _optimizer_in(path: Any) -> str | None:
    """Return the class of the optimizer in a .keras file, "" if it has none; None for other files."""
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
