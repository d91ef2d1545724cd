"""Opens the world of ranks: one rank, or those that MPI or TCP joins."""

from __future__ import annotations

import sys

from hvpipe.environment.discover import Launch
from hvpipe.environment.settings import Settings
from hvpipe.errors import InitError
from hvpipe.world.versions import check_same_versions
from hvpipe.world.world import RunningRanks, SingleWorld, World


def running_ranks() -> RunningRanks | None:
    """Return the ranks that MPI or TCP has joined in this process, even if hvpipe has not joined them."""
    if "mpi4py.MPI" in sys.modules:
        from hvpipe.world import mpi

        by_mpi = mpi.running_ranks()
        if by_mpi is not None and not by_mpi.alone:
            return by_mpi
    if "hvpipe.world.tcp" in sys.modules:
        from hvpipe.world import tcp

        return tcp.running_ranks()
    return None


def open_world(launch: Launch, settings: Settings) -> World:
    """Join the ranks of this launch. Without a launcher and a running MPI the world has one rank.

    Raises:
        InitError: If the ranks cannot be joined, or `settings.backend` cannot carry their data.
    """
    if launch.launcher == "horovodrun":
        if settings.backend == "mpi":
            raise InitError(
                "MPI has no ranks under `horovodrun --gloo`: each process would be alone. Leave "
                "HVPIPE_BACKEND unset, or launch with `horovodrun --mpi`, `mpirun` or `hvpipe run`. "
                f"Received: backend={settings.backend!r}"
            )
        from hvpipe.world import tcp

        world = tcp.open_world(launch, settings)
        check_same_versions(world)
        return world
    if launch.launcher == "none" and "mpi4py.MPI" not in sys.modules:
        return SingleWorld()
    from hvpipe.world import ethernet, mpi

    ranks = mpi.open_world(launch, settings.timeout_s, settings.longest_shutdown_s)
    check_same_versions(ranks)
    return ethernet.over_tcp(ranks, launch, settings)
