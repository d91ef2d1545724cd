"""The GPU that TensorFlow uses on this rank. Each rank has its own GPU; its memory use grows as needed."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvpipe.engine.rank_gpu import assign_gpu, may_have_gpu
from hvpipe.environment.this_host import cpu_name
from hvpipe.errors import HvpipeError
from hvpipe.monitor.nvml import list_gpus
from hvpipe.monitor.visible_gpus import uuid_of_rank
from hvpipe.session import Session

logger = logging.getLogger("hvpipe")


def on_the_host() -> Any:
    """Return a device scope for hvpipe's own counters and flags, but not for trained variables.

    TensorFlow would put them on the GPU, if the host has one. Reading them would then wait for everything
    that was enqueued there before.
    """
    return tf.device("CPU:0")


def computes_with_onednn() -> bool | None:
    """Return whether TensorFlow computes on this CPU with oneDNN; None if that is not known, or no choice.

    TensorFlow does so by itself only on x86 with AVX-512's VNNI or newer, unless TF_ENABLE_ONEDNN_OPTS says
    otherwise.
    """
    if platform.machine() != "x86_64":
        return None
    try:
        from tensorflow.python.util._pywrap_util_port import IsMklEnabled
    except ImportError:
        return None
    return bool(IsMklEnabled())


def has_gpu() -> bool:
    """Return whether TensorFlow sees a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))


def processor() -> str:
    """Return the model of the GPU that TensorFlow uses on this rank, else of the CPU."""
    for gpu in tf.config.get_visible_devices("GPU"):
        return str(tf.config.experimental.get_device_details(gpu).get("device_name", "GPU"))
    return cpu_name()


def claim_gpu(session: Session) -> None:
    """Let TensorFlow see only this rank's GPU. Call it before TensorFlow uses one.

    Raises HvpipeError if a host has more ranks than GPUs, or if TensorFlow already holds them all.
    """
    # Where no driver is, TensorFlow prints an error the first time that it looks for GPUs, and later none.
    quiet = contextlib.nullcontext() if may_have_gpu(session.settings) else _without_lines(b"cuInit")
    with quiet:
        gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        _warn_of_unseen_gpus(session)
        return
    mine = gpus[assign_gpu(session.world.local_rank, session.world.local_size, len(gpus))]
    try:
        tf.config.set_visible_devices([mine], "GPU")
        with contextlib.suppress(ValueError):  # the user has set a limit, which stays
            tf.config.experimental.set_memory_growth(mine, True)
    except RuntimeError as error:
        if session.world.local_size == 1:
            return  # no other rank needs memory
        raise HvpipeError(
            "hvpipe.init() should come before TensorFlow's first operation on a GPU, so that each rank takes "
            f"its own. Received: {error}"
        ) from error


def _warn_of_unseen_gpus(session: Session) -> None:
    """Warn, on rank 0, if CUDA shows a GPU that TensorFlow does not see: it may lack libraries."""
    world = session.world
    if world.rank == 0 and uuid_of_rank(session.settings.visible_gpus, world.local_rank, list_gpus()):
        logger.warning(
            "hvpipe: this host has GPUs, but TensorFlow sees none and trains on the CPU. TensorFlow's "
            "messages above say why. Set CUDA_VISIBLE_DEVICES='' if this is intended."
        )


@contextlib.contextmanager
def _without_lines(containing: bytes) -> Iterator[None]:
    """Leave lines out of what this process writes to standard error, in C++ too; the others come late."""
    try:
        stderr = os.dup(2)
    except OSError:  # closed
        yield
        return
    held = os.memfd_create("stderr")
    os.dup2(held, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        with open(held, "rb") as lines:
            lines.seek(0)
            os.write(2, b"".join(line for line in lines if containing not in line))


def device_of_messages(session: Session) -> str | None:
    """Return the device for tensors that a pipeline sends between ranks; collective.

    Return a GPU if gradients go there. Otherwise return None: tensors go through host memory.
    """
    return "GPU:0" if reduces_on_gpu(session) else None


def reduces_on_gpu(session: Session) -> bool:
    """Return whether gradients go to the engine in the memory of GPUs; the same on all ranks.

    They do if every rank can open the GPU that TensorFlow uses. The first call is collective in jobs where
    any rank may have a GPU.
    """
    if session.engine.native is None or session.settings.elastic:
        return False  # NCCL does not survive the loss of a rank
    visible = tf.config.get_visible_devices("GPU")
    # TensorFlow's first GPU is its only one, unless the user chose before hvpipe. Both count as CUDA does.
    place = tf.config.list_physical_devices("GPU").index(visible[0]) if visible else None
    return session.engine.use_gpus_of_all(place)
