"""Building a model without memory for its weights, and giving some of its layers theirs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from keras.src.backend.common import global_state

from hvpipe.errors import HvpipeError
from hvpipe.session import Session

_WAITING = "uninitialized_variables"


def build_without_memory(session: Session, build_model: Callable[[], Any]) -> Any:
    """The model that `build_model()` returns, its variables without values; collective.

    All ranks draw the seeds that layers take from Python's generator as rank 0 does, so a weight starts
    with the same value on whichever rank it comes to live, the one it has in the undivided model.
    Raises HvpipeError where the function makes a variable from a value instead of an initializer, or gives
    one of the model's a value, which would be lost.
    """
    random.setstate(session.engine.broadcast_object(random.getstate()))
    model, assigned = _built(build_model)
    lost = next((v for v in variables_of([model]) if any(v is other for other in assigned)), None)
    if lost is not None:
        raise HvpipeError(
            "build_model gives its variables values (by load_weights, set_weights, weights=...) before they "
            "have memory. Load them into the pipeline, by load(file), or pass the model itself instead of "
            f"the function. Received: a value for {lost.path}"
        )
    return model


def without_memory(build_model: Callable[[], Any]) -> Any:
    """What `build_without_memory` gives, on this rank alone, with seeds of its own, whatever was assigned."""
    return _built(build_model)[0]


class _Recording(keras.StatelessScope):
    """Gives variables no memory, and knows which ones were to be given values."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
        self.assigned: list[Any] = []

    def add_update(self, update: Any) -> None:
        self.assigned.append(update[0])
        super().add_update(update)


def _built(build_model: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """The model, and the variables that the function assigned values to."""
    before = list(global_state.get_global_attribute(_WAITING, []))
    try:
        with _Recording() as scope:
            model = build_model()
    except ValueError as error:
        if "create a variable" not in str(error):
            raise
        raise HvpipeError(
            "build_model makes a variable from a value, not from an initializer, so its memory cannot be "
            "left out; pass the model itself instead of the function. "
            f"Received: {str(error).splitlines()[0]}"
        ) from error
    finally:
        # Else the next scope of Keras's own that ends would give memory to all of them.
        global_state.set_global_attribute(_WAITING, before)
    if not isinstance(model, keras.Model):
        raise HvpipeError(
            f"build_model should return a Keras model. Received: {type(model).__name__} from it"
        )
    return model, scope.assigned


def give_memory(layers: Iterable[Any]) -> None:
    """Give the variables of these layers, which have none yet, their initial values."""
    for variable in variables_of(layers):
        if variable._value is None:
            variable._deferred_initialize()


class _Elsewhere:
    """In place of the initializer of a variable that lives on other ranks alone.

    Keras takes a new initial value where a graph reads a variable without memory.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise reads_foreign(self._path)


def reads_foreign(path: str) -> HvpipeError:
    """What is told where a stage reads a weight of another stage's layers."""
    return HvpipeError(
        "A stage should read the weights of its own layers alone: those of another stage's that a function, "
        "Lambda or loss reads would get no gradient of that. Let a layer that holds the weight do what reads "
        "it, and call that layer in the model; stages may share it. "
        f"Received: {path}, of another stage"
    )


def leave_to_others(layers: Iterable[Any]) -> None:
    """Let no graph on this rank read those variables of these layers that have no memory here."""
    for variable in variables_of(layers):
        if variable._value is None:
            variable._initializer = _Elsewhere(variable.path)


@contextlib.contextmanager
def lent_memory(layers: Iterable[Any]) -> Iterator[None]:
    """Give the variables of these layers that have no memory theirs, and take it back at the end."""
    lent = [(v, v._initializer) for v in variables_of(layers) if v._value is None]
    try:
        for variable, _ in lent:
            variable._deferred_initialize()
        yield
    finally:
        for variable, initializer in lent:
            variable._value, variable._initializer = None, initializer


def variables_of(layers: Iterable[Any]) -> list[Any]:
    """All variables of these layers, each once, the states of seed generators among them."""
    found = {id(v): v for layer in layers for v in layer.variables}
    return list(found.values())


def weights_of(layers: Iterable[Any]) -> list[Any]:
    """Those variables that are made to be trained, frozen or not; others are statistics and seeds."""
    found = {
        id(v): v for layer in layers for inner in layer._flatten_layers() for v in inner._trainable_variables
    }
    return list(found.values())
