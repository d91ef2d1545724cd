"""The TensorFlow ops of the engine, as functions on tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvpipe.comm.native import REBUILD, native_directory, tensorflow_fits
from hvpipe.errors import BuildMismatchError


def check_tensorflow(built: str | None, running: str) -> None:
    """Raise BuildMismatchError unless hvpipe was built against the TensorFlow that runs.

    Its C++ interface changes with every minor version.
    """
    if built is None:
        raise BuildMismatchError(
            "hvpipe was built where no TensorFlow was installed, so it has no TensorFlow kernels. "
            f"Rebuild it now that there is one: {REBUILD} (where TensorFlow comes from a module, by "
            f"PYTHONPATH, with --no-build-isolation). Received: tensorflow {running}"
        )
    if not tensorflow_fits(built, running):
        raise BuildMismatchError(
            f"hvpipe was built against TensorFlow {built}, but TensorFlow {running} runs. Install "
            f"tensorflow=={built}, or rebuild hvpipe here: {REBUILD}. "
            f"Received: built={built!r}, running={running!r}"
        )


@functools.cache
def library() -> Any:
    """The loaded op library, after a check that it fits."""
    folder = native_directory()
    from hvpipe._build_info import TENSORFLOW_VERSION

    check_tensorflow(TENSORFLOW_VERSION, tf.__version__)
    return tf.load_op_library(str(folder / "libhvpipe_tf.so"))


def begin_step(samples: Any, step: Any, reduces: Any, plan: int) -> Any:
    """Announce a step to all ranks; this rank's share of all samples (float64 scalar), once all have."""
    return library().hvpipe_begin_step(
        samples=tf.cast(samples, tf.float64), step=step, reduces=reduces, plan=plan
    )


def submit(scale: Any, tensors: Sequence[Any], plan: int, bucket: int) -> Any:
    """Pack tensors times `scale` into a bucket and start its all-reduce; a token (int64 scalar, 1)."""
    return library().hvpipe_submit(scale=scale, tensors=tensors, plan=plan, bucket=bucket)


def collect(token: Any, shapes: Sequence[tuple[int, ...]], dtype: str, plan: int, bucket: int) -> list[Any]:
    """The reduced tensors of a bucket, once they are there."""
    found: list[Any] = library().hvpipe_collect(
        token=token, shapes=list(shapes), N=len(shapes), T=dtype, plan=plan, bucket=bucket
    )
    return found


def send_message(number: int, tensor: Any) -> None:
    """Give the tensor of a message that was posted (Engine.post_send); waits for nothing."""
    with tf.device("CPU:0"):
        on_the_host = tf.constant(number, tf.int64)
    library().hvpipe_send_message(number=on_the_host, tensor=tensor)


def take_message(number: int, shape: Sequence[int], dtype: Any) -> Any:
    """The tensor of a message that has come (Engine.post_receive)."""
    with tf.device("CPU:0"):
        on_the_host = tf.constant(number, tf.int64), tf.constant(list(shape), tf.int64, [len(shape)])
    return library().hvpipe_take_message(number=on_the_host[0], shape=on_the_host[1], T=dtype)


def mark(value: Any, name: str) -> Any:
    """Pass a value on and note in the trace when it was there; its gradient is computed after that."""

    @tf.custom_gradient
    def noted(tensor: Any) -> Any:
        marked = library().hvpipe_mark(value=tensor, label=name)

        def gradient(upstream: Any) -> Any:
            # Else the mark, which no gradient needs, may come when the backward is over.
            with tf.control_dependencies([marked]):
                return tf.identity(upstream)

        return marked, gradient

    return noted(value)
