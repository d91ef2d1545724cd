"""Traces a train function before it runs, so that its graph can be inspected first, and planned anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvpipe.errors import HvpipeError
from hvpipe.keras.compat import step_functions
from hvpipe.keras.data_parallel.planned_updates import PlannedUpdates

_MOST_PLANS = 3  # one from the model, one from its graph's findings, a third for another batch shape


class PlannedFunction:
    """A train function that is made anew where the plan that its graphs hold was replaced.

    Args:
        function: The train function.
        make_anew: Returns another one, without graphs.
        updates: Has the plan.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        make_anew: Callable[[], Callable[..., Any]],
        updates: PlannedUpdates,
    ) -> None:
        self._function, self._ahead = function, TraceAhead(function)
        self._make_anew = make_anew
        self._updates = updates
        self._plan: int | None = None  # of the graphs

    def fitted(self, data: Any) -> Callable[..., Any]:
        """Return a function whose graph for `data`, an iterator or a list of batches, fits the plan."""
        for _ in range(_MOST_PLANS):
            if self._plan not in (None, self._updates.plans):
                self._function = self._make_anew()
                self._ahead = TraceAhead(self._function)
            self._plan = self._updates.plans
            if self._updates.fit(lambda: self._ahead.trace(data)):
                return self._function
        raise HvpipeError(
            "train_step should have gradients for the same variables whenever it is traced. "
            f"Received: different variables in each of {_MOST_PLANS} traces"
        )


class TraceAhead:
    """Traces the step inside a Keras train function once for each kind of data, without running it.

    TensorFlow caches the graph, so the call that follows uses it and traces nothing. A train function without
    Keras' own tf.functions is not traced: under `run_eagerly`, or with the user's own `make_train_function`.
    """

    def __init__(self, train_function: Callable[..., Any]) -> None:
        self._functions = step_functions(train_function)
        self._seen_specs: list[Any] = []  # of iterators; few, and one iterator's spec stays the same object
        self._seen_batches: set[str] = set()

    def trace(self, data: Any) -> None:
        """Trace the step that a call with `data`, an iterator or a list of batches, runs; once per kind."""
        if self._functions is None or tf.config.functions_run_eagerly():
            return
        on_iterator, on_batch = self._functions
        if isinstance(data, list):
            kind = repr(tf.nest.map_structure(_kind_of, data))
            if kind not in self._seen_batches:
                for batch in data:
                    on_batch.get_concrete_function(tf.nest.map_structure(_none_if_optional, batch))
                self._seen_batches.add(kind)
        elif data.element_spec not in self._seen_specs:
            on_iterator.get_concrete_function(data)
            self._seen_specs.append(data.element_spec)


def _kind_of(leaf: Any) -> Any:
    """Return what makes TensorFlow trace again if it changes: type, dtype and shape, or a number itself."""
    if not hasattr(leaf, "shape"):
        return leaf
    return type(leaf).__name__, str(leaf.dtype), str(leaf.shape)


def _none_if_optional(leaf: Any) -> Any:
    """Return what Keras hands to a step in place of an empty tf.experimental.Optional."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf
