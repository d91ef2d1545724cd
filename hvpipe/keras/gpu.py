"""The GPU that TensorFlow uses on this rank: one of its own, with memory taken as it is needed."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import tensorflow as tf

from hvpipe.comm.rank_gpu import assign_gpu
from hvpipe.errors import HvpipeError
from hvpipe.monitor.nvml import list_gpus
from hvpipe.monitor.visible_gpus import uuid_of_rank
from hvpipe.session import Session

logger = logging.getLogger("hvpipe")


def on_the_host() -> Any:
    """A scope for numbers of hvpipe's own: whether and when something is to be done, not what is trained.

    TensorFlow would keep them on a GPU where there is one, and every look at them would wait for all that the
    GPU was given before.
    """
    return tf.device("CPU:0")


def claim_gpu(session: Session) -> None:
    """Let TensorFlow see this rank's GPU alone; before it has used any. Where it sees none nothing is set.

    Raises HvpipeError where a host has more ranks than GPUs, or where TensorFlow holds them all already.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        _warn_of_unseen_gpus(session)
        return
    mine = gpus[assign_gpu(session.world.local_rank, session.world.local_size, len(gpus))]
    try:
        tf.config.set_visible_devices([mine], "GPU")
        with contextlib.suppress(ValueError):  # the user has set a limit, which is to stay
            tf.config.experimental.set_memory_growth(mine, True)
    except RuntimeError as error:
        if session.world.local_size == 1:
            return  # nobody else is there to have room for
        raise HvpipeError(
            "hvpipe.init() should come before TensorFlow's first operation on a GPU, so that each rank takes "
            f"its own. Received: {error}"
        ) from error


def _warn_of_unseen_gpus(session: Session) -> None:
    """Rank 0 says where CUDA would show it a GPU, and TensorFlow lacks the libraries for it, say."""
    world = session.world
    if world.rank == 0 and uuid_of_rank(session.settings.visible_gpus, world.local_rank, list_gpus()):
        logger.warning(
            "hvpipe: there are GPUs here and TensorFlow sees none: it trains on the processor. Its own lines "
            "above say why. CUDA_VISIBLE_DEVICES='' says that this is meant."
        )


def device_of_messages(session: Session) -> str | None:
    """Where tensors between ranks of a pipeline stay, None where they go by host memory; collective.

    A GPU, where all ranks have one and hvpipe was built for it.
    """
    able = bool(tf.config.get_visible_devices("GPU")) and session.engine.serves_gpus
    if not all(session.engine.agree("whether all ranks have GPUs", float(able))):
        return None
    return "GPU:0" if reduces_on_gpu(session) else None


def reduces_on_gpu(session: Session) -> bool:
    """Whether gradients are to go to the engine in a GPU's memory; all ranks together.

    No where TensorFlow sees no GPU, and where hvpipe was built without its GPU library, which is said once:
    TensorFlow then copies gradients to the host.
    """
    visible = tf.config.get_visible_devices("GPU")
    if session.engine.core is None or not visible:
        return False
    # TensorFlow's first: the only one, unless the user chose before hvpipe could. Both count as CUDA does.
    return session.engine.use_device_if_built(tf.config.list_physical_devices("GPU").index(visible[0]))
