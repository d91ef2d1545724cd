"""Whether the ranks of each host have room for their shared memory, before the engine takes it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvpipe.environment.native import import_native
from hvpipe.environment.settings import Settings
from hvpipe.log import logger

if TYPE_CHECKING:
    from hvpipe.world.world import World

FOLDER = "/dev/shm"  # where MPI allocates windows of shared memory
_WINDOWS = 2  # for sums, and for broadcasts or calls by name (csrc/progress/network.h)
_SLOTS = 4  # of a rank in a window (csrc/progress/network.h)
_HEAD_BYTES = 8192  # at most, of a rank in a window (csrc/transport/shared_window.cc)


@dataclass(frozen=True)
class HostMemory:
    """What the ranks of one host need in /dev/shm, and what is free there (None: unknown)."""

    host: str
    ranks: int
    needed_bytes: int
    free_bytes: int | None

    @property
    def is_short(self) -> bool:
        """Whether the engine's shared memory does not fit."""
        return self.free_bytes is not None and self.needed_bytes > self.free_bytes


def fits_on_all_hosts(world: World, settings: Settings) -> bool:
    """Tell whether every host has room for the engine's shared memory; collective.

    All ranks get the same answer. If it is no, rank 0 warns.
    """
    mine = host_memory(world, settings)
    short = [host for host in world.allgather_object(mine) if host.is_short]
    if short and world.rank == 0:
        host = short[0]
        logger.warning(
            "hvpipe: all ranks use the ring instead of shared memory, which is faster. %d ranks on %s need "
            "%.1f MB in %s. Received: %.1f MB free. Give the container more (docker run --shm-size=2g), or "
            "set HVPIPE_SHARED_MEMORY=0 to use the ring without this warning.",
            *(host.ranks, host.host, host.needed_bytes / 1e6, FOLDER, (host.free_bytes or 0) / 1e6),
        )
    return not short


def host_memory(world: World, settings: Settings, folder: str = FOLDER) -> HostMemory:
    """Return what this host's ranks need and what is free. Call it before any rank allocates."""
    windows = 0 if world.local_size == 1 else _WINDOWS
    needed_bytes = world.local_size * windows * (_SLOTS * settings.slot_bytes + _HEAD_BYTES)
    try:
        found = os.statvfs(folder)
    except OSError:  # MPI then finds another place
        return HostMemory(world.host, world.local_size, needed_bytes, None)
    return HostMemory(world.host, world.local_size, needed_bytes, found.f_bavail * found.f_frsize)


@contextlib.contextmanager
def shared_file(world: World, settings: Settings, hosts: list[int]) -> Iterator[str]:
    """Give the file that the ranks of this host map, and remove its name afterwards. Collective.

    The name is "" on all ranks if no two share a host, or if the ranks of any host cannot share a file.

    Args:
        world: Gathers objects of the ranks.
        settings: The settings of this rank.
        hosts: The number of its host, by rank.
    """
    several = len(set(hosts)) < len(hosts)
    if not (settings.shared_memory and several and fits_on_all_hosts(world, settings)):
        yield ""
        return
    first = hosts.index(hosts[world.rank])
    path, why = "", ""
    if first == world.rank:
        try:
            ranks = hosts.count(hosts[first])
            path = _make_file(import_native().shared_file_bytes(settings.slot_bytes, ranks))
        except OSError as error:
            why = f"{world.host}: {error}"
    try:
        path_of_host = str(world.allgather_object(path)[first])
        if path_of_host and not os.access(path_of_host, os.R_OK | os.W_OK):
            why = f"{world.host}: rank {world.rank} cannot open {path_of_host}, which rank {first} has made"
        reasons = [each for each in world.allgather_object(why) if each]
        if reasons and world.rank == 0:
            logger.warning(
                "hvpipe: all ranks use the ring instead of shared memory, which is faster: the ranks of each "
                "host should share %s. Received: %s",
                *(FOLDER, reasons[0]),
            )
        yield "" if reasons else path_of_host
        world.allgather_object(None)  # all have opened it
    finally:
        if path:
            os.unlink(path)


def _make_file(size_bytes: int) -> str:
    file, path = tempfile.mkstemp(prefix="hvpipe-", dir=FOLDER)
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return path
