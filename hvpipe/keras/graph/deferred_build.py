"""Builds a model without memory for its weights, and gives memory to the layers that this rank runs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from hvpipe.errors import HvpipeError
from hvpipe.keras import compat
from hvpipe.session import Session


def build_without_memory(session: Session, build_model: Callable[[], Any]) -> Any:
    """Return the model that `build_model()` returns, with variables that have no values yet; collective.

    Layers take their seeds from Python's generator, whose state is rank 0's on all ranks. So a weight gets
    the initial value that it has in the undivided model, whichever rank it is on.

    Args:
        session: The session.
        build_model: Takes no arguments and returns a Keras model.

    Returns:
        The model.

    Raises:
        HvpipeError: The function assigns a value to one of the model's variables, which would be lost.
    """
    random.setstate(session.engine.broadcast_object(random.getstate(), what="building the model"))
    model, assigned = _build(build_model)
    lost = next((v for v in variables_of([model]) if any(v is other for other in assigned)), None)
    if lost is not None:
        raise HvpipeError(
            "build_model gives its variables values (by adapt, load_weights, set_weights, weights=...) "
            "before they have memory. Load them into the pipeline, by load(file), or pass the model itself "
            f"instead of the function. Received: a value for {lost.path}"
        )
    return model


def without_memory(build_model: Callable[[], Any]) -> Any:
    """Return a model like `build_without_memory`, but on this rank only; assigned values are ignored."""
    return _build(build_model)[0]


class _AssignmentRecorder(keras.StatelessScope):
    """Gives variables no memory, and records which ones are assigned values."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
        self.updates: list[tuple[Any, Any]] = []

    @property
    def assigned(self) -> list[Any]:
        """The variables that got values."""
        return [variable for variable, _ in self.updates]

    def add_update(self, update: Any) -> None:
        self.updates.append(update)
        super().add_update(update)


def _build(build_model: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """Return the model, and the variables that the function assigned values to.

    If the function compiles the model, the optimizer and the metrics have memory.
    """
    # Otherwise the end of Keras's next StatelessScope would give memory to all of the model's variables.
    with (
        compat.uninitialized_variables_kept(),
        compat.values_as_initializers(),
        _AssignmentRecorder() as scope,
    ):
        model = build_model()
    if not isinstance(model, keras.Model):
        raise HvpipeError(
            f"build_model should return a Keras model. Received: {type(model).__name__} from build_model"
        )
    if model.compiled:
        metrics = compat.compiled_metrics(model)
        parts = [model.optimizer, *(() if metrics is None else compat.user_metrics(metrics))]
        made = [v for part in parts for v in getattr(part, "variables", ())]
        for variable in made:
            if not compat.has_memory(variable):
                compat.initialize_now(variable)
        for variable, value in scope.updates:
            if any(variable is one for one in made):
                variable.assign(value)
    return model, scope.assigned


def give_memory(layers: Iterable[Any]) -> None:
    """Give the variables of these layers their initial values, unless they have values."""
    for variable in variables_of(layers):
        if not compat.has_memory(variable):
            compat.initialize_now(variable)


class _RaisingInitializer:
    """The initializer of a variable that other ranks hold: raises an error.

    Keras calls the initializer when a graph reads a variable without memory.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise foreign_weight_error(self._path)


def foreign_weight_error(path: str) -> HvpipeError:
    """Return the error for a stage that reads a weight of another stage's layers."""
    return HvpipeError(
        "A stage should read only the weights of its own layers. A function, Lambda or loss that reads "
        "another stage's weight gives it no gradient. Move the code that reads the weight into a layer that "
        "holds it, and call that layer in the model; stages may share the layer. "
        f"Received: {path}, of another stage"
    )


def leave_to_others(layers: Iterable[Any]) -> None:
    """Let graphs on this rank raise an error when they read variables that have no memory here."""
    for variable in variables_of(layers):
        if not compat.has_memory(variable):
            compat.set_initializer(variable, _RaisingInitializer(variable.path))


@contextlib.contextmanager
def lent_memory(layers: Iterable[Any]) -> Iterator[None]:
    """Give memory to variables of these layers that have none, and take it back at the end."""
    lent = [(v, compat.initializer_of(v)) for v in variables_of(layers) if not compat.has_memory(v)]
    try:
        for variable, _ in lent:
            compat.initialize_now(variable)
        yield
    finally:
        for variable, initializer in lent:
            compat.drop_memory(variable)
            compat.set_initializer(variable, initializer)


def variables_of(layers: Iterable[Any]) -> list[Any]:
    """Return all variables of these layers, each once, with the states of seed generators."""
    found = {id(v): v for layer in layers for v in layer.variables}
    return list(found.values())


def trained_by(layers: Iterable[Any]) -> list[Any]:
    """Return the variables of these layers that are trained, each once.

    As Keras does for a model, this asks the variables. A frozen layer may have a layer inside that is
    trained, but its `trainable_variables` are empty.
    """
    return [variable for variable in variables_of(layers) if variable.trainable]


def weights_of(layers: Iterable[Any]) -> list[Any]:
    """Return the variables that are made to be trained, frozen or not; without statistics and seeds."""
    found = {
        id(v): v
        for layer in layers
        for inner in compat.layers_in(layer)
        for v in compat.own_trainable_variables(inner)
    }
    return list(found.values())
