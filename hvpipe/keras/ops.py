"""Loads the engine's TensorFlow ops, and wraps the ops for messages and trace marks as functions on tensors.

data_parallel/bucket_reduce.py calls the ops for gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from hvpipe.environment.native import REBUILD, native_directory, tensorflow_fits
from hvpipe.errors import BuildMismatchError

Function = TypeVar("Function", bound=Callable[..., Any])


def check_tensorflow(built: str | None, running: str) -> None:
    """Raise BuildMismatchError unless hvpipe was built against the TensorFlow that runs.

    Its C++ interface changes with every minor version.
    """
    if built is None:
        raise BuildMismatchError(
            "hvpipe was built without TensorFlow, so it has no TensorFlow kernels. "
            f"Rebuild it {REBUILD}, now that TensorFlow is installed (if TensorFlow comes from a module, by "
            f"PYTHONPATH, with --no-build-isolation). Received: tensorflow {running}"
        )
    if not tensorflow_fits(built, running):
        raise BuildMismatchError(
            f"hvpipe was built against TensorFlow {built}, but TensorFlow {running} runs. Install "
            f"tensorflow=={built}, or rebuild hvpipe here {REBUILD}. "
            f"Received: built={built!r}, running={running!r}"
        )


@functools.cache
def library() -> Any:
    """Load the op library, after a check that it fits the running TensorFlow."""
    folder = native_directory()
    from hvpipe._build_info import TENSORFLOW_VERSION

    check_tensorflow(TENSORFLOW_VERSION, tf.__version__)
    return tf.load_op_library(str(folder / "libhvpipe_tf.so"))


def send_message(number: int, tensor: Any) -> None:
    """Hand over the tensor of what was posted (EngineClient.post_send, post_group_reduce). Does not wait."""
    with tf.device("CPU:0"):
        on_the_host = tf.constant(number, tf.int64)
    library().hvpipe_send_message(number=on_the_host, tensor=tensor)


def take_message(number: int, shape: Sequence[int], dtype: Any) -> Any:
    """Return the tensor that has arrived (EngineClient.post_receive, post_group_reduce)."""
    with tf.device("CPU:0"):
        on_the_host = tf.constant(number, tf.int64), tf.constant(list(shape), tf.int64, [len(shape)])
    return library().hvpipe_take_message(number=on_the_host[0], shape=on_the_host[1], T=dtype)


def mark(value: Any, name: str) -> Any:
    """Return a value, and note in the trace when it was computed. Its gradient is computed after the mark."""

    @tf.custom_gradient
    def noted(tensor: Any) -> Any:
        marked = library().hvpipe_mark(value=tensor, label=name)

        def gradient(upstream: Any) -> Any:
            # No gradient needs the mark, so without this it may come after the backward.
            with tf.control_dependencies([marked]):
                return tf.identity(upstream)

        return marked, gradient

    return noted(value)


def without_autograph(function: Function) -> Function:
    """Decorate a function that AutoGraph should call as it is: it would warn about MPI's functions."""
    kept: Function = tf.autograph.experimental.do_not_convert(function)
    return kept
