"""The host and cores of a rank, and a warning if the launcher's binding leaves most cores idle."""

from __future__ import annotations

import os

from hvpipe.environment.discover import Launch
from hvpipe.log import logger
from hvpipe.monitor.process_limits import cores_allowed
from hvpipe.world.world import World


def log_placement(world: World, launch: Launch) -> None:
    """Log where this rank runs. On rank 0, warn if mpirun bound the ranks of its host to few cores."""
    cores = usable_cores()
    logger.info(
        "hvpipe: rank %d of %d is on %s (%d of %d there, %d cores), started by %s; MPI: %s; data over %s",
        *(world.rank, world.size, world.host, world.local_rank, world.local_size, cores),
        "nobody" if launch.launcher == "none" else launch.launcher,
        world.library_version,
        world.network,
    )
    # srun binds to the cores that the job asked for. mpirun does not bind its own process, the parent.
    if world.rank == 0 and launch.launcher == "mpirun":
        there = usable_cores(os.getppid())
        if mostly_idle(cores, world.local_size, there):
            logger.warning(
                "hvpipe: mpirun bound each rank to %d of the %d cores of %s, so the %d ranks there leave "
                "most cores idle. Start with `mpirun --bind-to none ...` or with `hvpipe run`.",
                *(cores, there, world.host, world.local_size),
            )


def mostly_idle(cores: int, ranks: int, there: int) -> bool:
    """Tell whether `ranks` ranks, bound to `cores` each, leave at least half of a host's cores idle."""
    return cores < there and 2 * cores * ranks <= there


def usable_cores(process: int = 0) -> int:
    """Return how many cores a process (0: this one) may run on."""
    return len(own_cores(process))


def own_cores(process: int = 0) -> set[int]:
    """Return the numbers of the cores that a process (0: this one) may run on."""
    try:
        return os.sched_getaffinity(process)
    except (AttributeError, OSError):  # not on this system, or not for this process
        return set(range(os.cpu_count() or 1))


def affordable_cores() -> int:
    """Return how many cores this process and its siblings can keep busy together.

    A container's CPU limit hides no cores, but threads beyond the limit only wait for their turn.
    """
    allowed = cores_allowed()
    return usable_cores() if allowed is None else min(usable_cores(), max(1, int(allowed)))
