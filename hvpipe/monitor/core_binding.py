"""Where a rank runs: its host and its cores, and a launcher's binding that leaves most of them idle."""

from __future__ import annotations

import os

from hvpipe.comm.discover import Launch
from hvpipe.comm.world import World
from hvpipe.log import logger
from hvpipe.monitor.process_limits import cores_allowed


def tell_placement(world: World, launch: Launch) -> None:
    """Log where this rank runs, and warn, on rank 0, where mpirun bound its host's ranks to few cores."""
    cores = usable_cores()
    logger.info(
        "hvpipe: rank %d of %d is on %s (%d of %d there, %d cores), started by %s; MPI: %s",
        *(world.rank, world.size, world.host, world.local_rank, world.local_size, cores),
        "nobody" if launch.launcher == "none" else launch.launcher,
        world.library_version,
    )
    # srun binds to what the job asked for. mpirun's own process is bound to nothing.
    if world.rank == 0 and launch.launcher in ("mpirun", "horovodrun"):
        there = usable_cores(os.getppid())
        if mostly_idle(cores, world.local_size, there):
            logger.warning(
                "hvpipe: mpirun bound each rank to %d of the %d cores of %s, and %d ranks there leave most "
                "of them idle: start with `mpirun --bind-to none ...`, or with `hvpipe run`.",
                *(cores, there, world.host, world.local_size),
            )


def mostly_idle(cores: int, ranks: int, there: int) -> bool:
    """Whether so many ranks of a host, bound to `cores` each, leave at least half of its cores idle."""
    return cores < there and 2 * cores * ranks <= there


def usable_cores(process: int = 0) -> int:
    """The cores that a process may run on: this one, unless another one's number is given."""
    try:
        return len(os.sched_getaffinity(process))
    except (AttributeError, OSError):  # not on every system; not every process
        return os.cpu_count() or 1


def affordable_cores() -> int:
    """As many cores as processes of this one's kind can keep busy together.

    A container's CPU limit hides no core: threads beyond it only wait for their turn.
    """
    allowed = cores_allowed()
    return usable_cores() if allowed is None else min(usable_cores(), max(1, int(allowed)))
