"""Sessions of an MPI job over TCP, as under `horovodrun --gloo`. MPI tells ranks where the others listen."""

from __future__ import annotations

import os

import hvpipe.session
from hvpipe.comm import mpi
from hvpipe.comm.discover import Launch
from hvpipe.comm.settings import Settings
from hvpipe.comm.tcp import TcpWorld, connect_mesh, own_address


def _open_world(launch: Launch, settings: Settings) -> TcpWorld:
    ranks = mpi.open_world(launch, settings.timeout_s)
    numbers = Launch("horovodrun", ranks.rank, ranks.size, ranks.local_rank, ranks.local_size)
    mesh = connect_mesh(ranks.rank, own_address(ranks.host), ranks.allgather_object, settings.timeout_s)
    ranks.close()
    return TcpWorld(mesh, numbers, ranks.host, settings.timeout_s)


def use_tcp_if_asked() -> None:
    """Let TCP carry everything of the sessions to come, if TEST_OVER_TCP is set."""
    if os.environ.get("TEST_OVER_TCP") == "1":
        hvpipe.session.open_world = _open_world  # type: ignore[assignment]
