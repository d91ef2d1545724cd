"""The cluster that these ranks run on, measured: speeds, memory and links."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from hvpipe.comm.link_probe import measure_links
from hvpipe.monitor.nvml import list_gpus
from hvpipe.monitor.process_limits import usable_bytes
from hvpipe.session import current
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.cluster_fit import RankFacts, measured_cluster
from hvpipe.specs.profile import Profile


def measure_cluster(profile: Profile) -> Cluster:
    """The cluster of all ranks, the same on each; collective, after `hvpipe.init`.

    `profile` is what `measure` returned on this rank, of the same model and batch on all: the total times
    give the speeds, rank 0's being 1. Devices are named HOST:LOCAL_RANK. The memory of a device is what this
    process may still take, in equal shares among the ranks of a host: of the machine or its control group, or
    by `ulimit`; with a GPU that TensorFlow uses, that GPU's. Links come from `measure_links`, beside
    computing.
    Raises HvpipeError where the ranks measured different models.
    """
    session = current()
    world = session.world
    mine = RankFacts(world.host, world.local_rank, profile, _memory_bytes(world.local_size))
    ranks = session.engine.allgather_object(mine)
    return measured_cluster(ranks, measure_links(session.engine, computing=_computing()))


def _computing() -> Callable[[], object]:
    """Two billion operations, on the threads and the device that training computes on."""
    values = tf.zeros((512, 512))

    @tf.function
    def compute(matrix: tf.Tensor) -> tf.Tensor:
        for _ in range(8):
            matrix = tf.matmul(matrix, values)
        return matrix

    return lambda: compute(values).numpy()


def _memory_bytes(ranks_here: int) -> int:
    seen = list_gpus() if tf.config.list_logical_devices("GPU") else []
    gpus = [gpu.memory_bytes for gpu in seen if gpu.memory_bytes is not None]
    if not gpus:
        return usable_bytes(ranks_here)
    # Which of them this rank has is not known: the smallest, shared evenly.
    return min(gpus) // -(-ranks_here // len(gpus))
