"""Functions that TensorFlow rounds alike anywhere in a graph.

TensorFlow's graph optimizer reorders products and sums with constants, in one way at the top of a graph and
in another inside a `tf.cond`. So the last bit would depend on the overlap. It does not touch the inside of a
function that is called, not inlined, with the optimizer switched off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


def kept_whole(function: Callable[..., Any]) -> Any:
    """Return a tf.function that is not inlined. Call it under `graph_optimizer_off`."""
    return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})


@contextlib.contextmanager
def graph_optimizer_off() -> Iterator[None]:
    """Switch the graph optimizer off for functions called inside this context; nothing else changes."""
    switch = "disable_meta_optimizer"
    before = tf.config.optimizer.get_experimental_options().get(switch, False)
    tf.config.optimizer.set_experimental_options({switch: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({switch: before})


def same_bits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors, or lists of them, that gives the same bits anywhere in a graph."""
    whole = kept_whole(function)

    def call(*arguments: Any) -> Any:
        with graph_optimizer_off():
            return whole.get_concrete_function(*arguments)(*arguments)

    return call
