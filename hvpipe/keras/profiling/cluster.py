"""`measure_ranks`: the speeds, memory and links of the ranks of this run, and a profile for all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import combinations

import tensorflow as tf

from hvpipe.engine.link_probe import measure_links
from hvpipe.keras.gpu import processor, reduces_on_gpu
from hvpipe.keras.profiling.action_time import measure_action_s
from hvpipe.monitor.nvml import list_gpus
from hvpipe.monitor.process_limits import usable_bytes
from hvpipe.monitor.visible_gpus import memory_of, uuid_of_rank
from hvpipe.session import Session, current
from hvpipe.specs.cluster import Cluster, Link
from hvpipe.specs.cluster_fit import RankFacts, measured_cluster, profile_of_kinds
from hvpipe.specs.profile import Profile

logger = logging.getLogger("hvpipe")

_MOST_MEASURED = 16
"""With more ranks than this, links are not measured between all of them."""

_GPU_TENTHS, _GPU_LESS_BYTES = 9, 500_000_000
"""What ranks may take of a GPU: tenths, as memory is fragmented, and what CUDA and NCCL of a rank take."""


def measure_cluster(profile: Profile) -> Cluster:
    """Return the cluster of `measure_ranks`, for ranks whose processors are of one model; collective.

    Args:
        profile: The profile that `measure` returned on this rank.

    Returns:
        The cluster, the same on all ranks.

    Raises:
        HvpipeError: The ranks measured different models.

    Example:

    ```python
    hvpipe.init()
    profile = hvpipe.keras.measure(build_model, x[:32])
    cluster = hvpipe.keras.measure_cluster(profile)
    ```
    """
    return measure_ranks(profile)[1]


def measure_ranks(profile: Profile) -> tuple[Profile, Cluster]:
    """Measure the cluster that the ranks of this run form; collective, after `hvpipe.init`.

    Where processors are of several models, the cluster has them as types of its devices. A GPU that runs one
    layer 50 times as fast as a CPU may run another one twice as fast. So the profile has each layer's times
    on each type.

    Devices are named HOST:LOCAL_RANK. The total times of the profiles give their speeds; rank 0 has speed 1.
    A device's memory is the bytes that its process may still take: the memory of the host or its control
    group, shared equally among the host's ranks, or the limit of `ulimit`. If TensorFlow uses a GPU, it is
    an equal share of nine tenths of that GPU's memory, less 0.5 GB for CUDA and NCCL. Links are measured
    while all ranks compute, in host memory, also where NCCL sends between GPUs. With more than 16 ranks, one
    link is measured for each two hosts, and one inside each. A pipeline of tiny layers gives `action_s`.

    Args:
        profile: The profile that `measure` returned on this rank. All ranks measure the same model and batch.

    Returns:
        Rank 0's profile with the times of the other types, and the cluster: the same on all ranks.

    Raises:
        HvpipeError: The ranks measured different models.

    Example:

    ```python
    hvpipe.init()
    profile = hvpipe.keras.measure(build_model, x[:32])
    profile, cluster = hvpipe.keras.measure_ranks(profile)
    if hvpipe.rank() == 0:
        profile.write("profile.json")
        cluster.write("cluster.json")
    ```
    """
    session = current()
    world = session.world
    # A slow device measures for minutes longer than a fast one: that is no stall.
    session.agree_patiently("measure_ranks (a rank may still measure)")
    mine = RankFacts(world.host, world.local_rank, profile, _memory_bytes(session), processor())
    ranks = session.engine.allgather_object(mine, "measure_ranks")
    links = _links(session, [facts.host for facts in ranks])
    action_s = measure_action_s(session)
    if _sends_by_nccl(session) and world.rank == 0:
        logger.warning(
            "hvpipe: links were measured in the memory of the hosts. Training sends between GPUs by NCCL, "
            "which may be faster: then write the links' latency and bandwidth into the cluster's file."
        )
    return profile_of_kinds(ranks), measured_cluster(ranks, links, action_s)


def _sends_by_nccl(session: Session) -> bool:
    return session.world.size > 1 and reduces_on_gpu(session) and session.engine.messages_by_nccl


def _links(session: Session, hosts: Sequence[str]) -> dict[tuple[int, int], Link]:
    """Return the link of each pair of ranks, which are on these hosts; collective.

    A pair takes some 0.2 s at 10 Gb/s. With many ranks, one pair is measured for each two hosts or one host.
    """
    if len(hosts) <= _MOST_MEASURED:
        return measure_links(session.engine, computing=_computing())
    alike: dict[frozenset[str], list[tuple[int, int]]] = {}
    for a, b in combinations(range(len(hosts)), 2):
        alike.setdefault(frozenset((hosts[a], hosts[b])), []).append((a, b))
    first = [pairs[0] for pairs in alike.values()]
    found = measure_links(session.engine, pairs=first, computing=_computing())
    return {pair: found[pairs[0]] for pairs in alike.values() for pair in pairs}


def _computing() -> Callable[[], object]:
    """Return a function of two billion operations on the threads and the device that training uses."""
    values = tf.zeros((512, 512))

    @tf.function
    def compute(matrix: tf.Tensor) -> tf.Tensor:
        for _ in range(8):
            matrix = tf.matmul(matrix, values)
        return matrix

    return lambda: compute(values).numpy()


def _memory_bytes(session: Session) -> int | None:
    """Return this rank's share of its device's memory, or None if the driver does not tell it; collective."""
    world, gpus = session.world, list_gpus()
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    uuid = uuid_of_rank(session.settings.visible_gpus, world.local_rank, gpus) if on_gpu else None
    sharing = session.engine.allgather_object((world.host, uuid), "measure_ranks").count((world.host, uuid))
    if not on_gpu:
        return usable_bytes(world.local_size)
    whole_bytes = memory_of(uuid, gpus)
    if whole_bytes is None:
        logger.warning(
            "hvpipe: the memory of rank %d's GPU is unknown, so the cluster has no limit for it: install "
            "nvidia-ml-py (pip install 'hvpipe[gpu]'), or write memory_bytes into the file.",
            world.rank,
        )
        return None
    return max(0, whole_bytes * _GPU_TENTHS // 10 // sharing - _GPU_LESS_BYTES)
