"""Traces a train function before it runs, so that its graph can be inspected first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvpipe.keras.compat import step_functions


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
