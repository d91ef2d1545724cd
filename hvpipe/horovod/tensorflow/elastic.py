"""The names of `horovod.tensorflow.elastic`: state that is committed, restored and given to all ranks.

Ranks do not come and go while a job runs: a rank that fails ends the job, and its launcher starts it again. A
training function that raises HorovodInternalError in all ranks is called again with the committed state.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvpipe.horovod import world
from hvpipe.keras.initial_state import is_built
from hvpipe.keras.named import objects
from hvpipe.keras.variables import native

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]


class HorovodInternalError(RuntimeError):
    """`run` restores the committed state and calls the function again. Collectives do not raise it."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts changed; `run` calls the function again with its present state. hvpipe never raises it."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class State:
    """What training needs to go on. Subclasses say how it is saved, restored and given to all ranks."""

    def __init__(self, **others: Any) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Call these before the training function is called again."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Prepare for another call of the training function."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: Any) -> None:
        """Do nothing: hosts do not change while a job runs."""

    def commit(self) -> None:
        """Save the present state, to return to it after an error."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: hosts do not change while a job runs."""

    def save(self) -> None:
        """Save the present state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget what belongs to the ended call."""


class ObjectState(State):
    """State of plain Python values, which are attributes: `state.epoch`."""

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = objects.broadcast_object,
        get_rank: Callable[[], int] = world.rank,
        **values: Any,
    ) -> None:
        super().__init__()
        self._bcast_object = bcast_object
        self._saved = values
        for name, value in values.items():
            setattr(self, name, value)

    def save(self) -> None:
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        if not self._saved:
            return
        received = self._bcast_object({name: getattr(self, name) for name in self._saved})
        self._saved = received
        self.restore()


class TensorFlowState(ObjectState):
    """State of TensorFlow or Keras variables and of plain values."""

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **values: Any) -> None:
        super().__init__(**values)
        self._variables = list(variables or [])
        self._values = self._read()

    def _listed(self) -> list[Any]:
        return [native(variable) for variable in self._variables]

    def _read(self) -> list[Any]:
        return [np.array(variable.numpy()) for variable in self._listed()]

    def save(self) -> None:
        self._values = self._read()
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self._listed(), self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        objects.broadcast_variables(self._listed(), 0, name="elastic")
        self._values = self._read()
        super().sync()


class TensorFlowKerasState(TensorFlowState):
    """State of a Keras model, its optimizer and plain values: `state.epoch`, `state.batch`.

    Args:
        model: A built model.
        optimizer: Its optimizer; None for the one that the model is compiled with.
        backend: Changes nothing.
        **values: Plain values to keep, which become attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **values: Any) -> None:
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if not is_built(model):
            raise ValueError(
                "The model of a state should be built: give it an input shape, or call it on a batch first. "
                f"Received: model {model.name}, not built"
            )
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)  # now, so that its variables keep their order
        super().__init__(**values)

    def _listed(self) -> list[Any]:
        optimizer = self.optimizer.variables if self.optimizer is not None else []
        return [native(variable) for variable in [*self.model.variables, *optimizer]]

    def restore(self) -> None:
        # Variables that the optimizer has made since then begin at zero again.
        for variable, value in zip(self._listed(), self._values, strict=False):
            variable.assign(value)
        for variable in self._listed()[len(self._values) :]:
            variable.assign(np.zeros_like(variable.numpy()))
        ObjectState.restore(self)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the training function `func(state, ...)` with recovery from HorovodInternalError.

    It first gives all ranks the state of rank 0. After a HorovodInternalError, which must come on all ranks,
    it restores the committed state and calls `func` again.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        sync = True
        while True:
            if sync:
                state.sync()
            try:
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                state.restore()
                sync = True
            except HostsUpdatedInterrupt as interrupt:
                sync = not interrupt.skip_sync
            state.on_reset()

    return wrapper
