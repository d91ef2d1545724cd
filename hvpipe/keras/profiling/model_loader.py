"""Loads the model named on the command line: calls the function that builds it, and makes random inputs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvpipe.errors import HvpipeError
from hvpipe.keras import compat
from hvpipe.keras.graph.layer_graph import LayerGraph, TensorSpec, functional_of, layer_graph
from hvpipe.keras.profiling.measure import built_model
from hvpipe.specs.profile_request import InputShape, ProfileTask


def load_model_and_batch(task: ProfileTask) -> tuple[Any, Any]:
    """Build the model that the task names, and its micro-batch.

    A function may return (model, batch). Otherwise the batch has random values: floats between 0 and 1, and
    integers below the size of the Embedding that reads them, or 0 and 1.

    Args:
        task: Names the function, and the samples of a micro-batch.

    Returns:
        The model, without memory for its weights, and the batch.

    Raises:
        HvpipeError: The function does not exist or takes arguments, the model has no graph, or the number of
            samples is missing.
    """
    function = load_function(task)
    given: list[Any] = []

    def build() -> Any:
        found = function()
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], keras.Model):
            given.append(found[1])
            return found[0]
        return found

    model = built_model(build)
    if given:
        return model, given[0]
    # First, or a model or a shape that cannot be measured would be reported only in the next try.
    batch = random_batch(model, task.microbatch or 1, task.input_shapes)
    if task.microbatch is None:
        raise HvpipeError(
            f"Give --microbatch, the number of samples, or let {task.function} return the model and a "
            "micro-batch"
        )
    return model, batch


def load_function(task: ProfileTask) -> Any:
    """Return the function of the task's file or module; HvpipeError unless it can be called as it is."""
    module = _load_file(task.place) if task.is_file else _load_module(task.place)
    function = getattr(module, task.function, None)
    if not callable(function):
        callables = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise HvpipeError(
            f"{task.place} should have a function {task.function!r} that returns the model. "
            f"Received: {', '.join(callables) or 'no functions'}"
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise HvpipeError(
            f"{task.function} should take no arguments: write a function that calls it with its arguments. "
            f"Received: {task.function}{inspect.signature(function)}"
        ) from error
    return function


def random_batch(model: Any, samples: int, shapes: Sequence[InputShape] = ()) -> Any:
    """Return random values for all inputs in the structure that the model takes, as a tuple of one.

    Args:
        model: The model.
        samples: The samples of the batch.
        shapes: The axes of a sample for inputs that leave some open.
    """
    graph = layer_graph(model)
    functional = functional_of(model)
    names = [x.name for x in functional.inputs]
    known = {shape.name or names[0]: shape.axes for shape in shapes}
    unnamed = len(names) > 1 and "" in {shape.name for shape in shapes}
    if unnamed or not set(known) <= set(names):
        raise HvpipeError(
            f"--input-shape should name one of the inputs {', '.join(names)}. "
            f"Received: {', '.join(shape.name or 'no name' for shape in shapes)}"
        )
    random = np.random.default_rng(0)
    values = []
    for name, number in zip(names, graph.inputs, strict=True):
        spec = graph.tensors[number]
        axes = _sample_axes(name, spec, known.get(name))
        values.append(_random_values(random, name, spec.dtype, (samples, *axes), _whole_below(graph, number)))
    return (keras.tree.pack_sequence_as(compat.inputs_structure(functional), values),)


def _sample_axes(name: str, spec: TensorSpec, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the axes of a sample: the input's own, or the given ones if they fit."""
    wanted = spec.shape[1:]
    if given is None:
        if None in wanted:
            raise HvpipeError(
                f"The input {name!r} leaves axes of a sample open, {list(wanted)}: set them, as in "
                f"--input-shape {name}={','.join(str(axis or 64) for axis in wanted)}"
            )
        return tuple(axis for axis in wanted if axis is not None)
    if len(given) != len(wanted) or any(w not in (None, g) for g, w in zip(given, wanted, strict=True)):
        raise HvpipeError(
            f"--input-shape should fit the input {name!r}, {list(wanted)}. Received: {list(given)}"
        )
    return given


def _whole_below(graph: LayerGraph, number: int) -> int:
    """Return the bound of an input's integers: the rows of the Embeddings that read it, or 2."""
    rows = [
        call.operation.input_dim
        for call in graph.calls
        if isinstance(call.operation, keras.layers.Embedding) and number in {n for n, _ in call.reads}
    ]
    return min(rows, default=2)


def _random_values(
    random: np.random.Generator, name: str, dtype: str, shape: tuple[int, ...], below: int
) -> Any:
    if dtype == "bool" or "int" in dtype:
        return random.integers(0, 2 if dtype == "bool" else below, shape).astype(dtype)
    if "float" not in dtype:
        raise HvpipeError(
            "Only numeric inputs can have random values; for others the function should return the model and "
            f"a micro-batch. Received: input {name!r} of dtype {dtype}"
        )
    return random.random(shape, np.float32)


def _load_file(path: str) -> Any:
    """Import a file. It can import modules from its own folder, as when Python runs it."""
    folder = str(Path(path).absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise HvpipeError(f"The model should be in a Python file. Received: {path!r}, which is not one")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise HvpipeError(
                f"{name} should be a module that can be imported from here, or a file, {name}.py. "
                f"Received: {error}"
            ) from error
        raise
